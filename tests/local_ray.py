"""A Ray of two cores in a separate process, to which tests connect and which no job finds by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Unlike `ray start`, ray.init does not name its address in a file where jobs look for a cluster. The end of stdin ends
# the process and its Ray, also if the tests are killed.
SCRIPT = """
import logging, sys, ray
context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                   _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
END_S = 60.0  # seconds after which a Ray that does not end is killed


@contextlib.contextmanager
def running_ray(variables: Mapping[str, str]) -> Iterator[str]:
    """Starts a Ray, which ends with the block.

    Args:
        variables: Environment variables of its workers.

    Yields:
        Its address, for ray.init.
    """
    folder = Path(tempfile.mkdtemp(prefix="riptide-ray-", dir="/tmp"))  # the path of a socket has at most 107 bytes
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            env={**environment, **variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdin
    assert process.stdout
    try:
        address = process.stdout.readline().strip()
        assert address, (folder / "log").read_text()
        yield address
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
