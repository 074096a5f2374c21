"""A Ray of two cores in a separate process, to which tests connect and which no job finds by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

# Unlike `ray start`, ray.init does not name its address in a file where jobs look for a cluster. The end of stdin ends
# the process and its Ray, also if the tests are killed.
SCRIPT = """
import logging, sys, ray
context = ray.init(num_cpus=2, num_gpus=int(sys.argv[2]), include_dashboard=False, log_to_driver=False,
                   logging_level=logging.ERROR, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
CORES = 2
START_S = 300.0  # seconds after which a Ray that does not start is killed
END_S = 60.0  # seconds after which a Ray that does not end is killed
FREE_S = 30.0  # seconds after which the cores of an earlier driver count as lost


class SessionRay:
    """The Ray of a test session; it is started when it is first needed.

    Args:
        variables: Environment variables of its workers.
    """

    def __init__(self, variables: Mapping[str, str]):
        self._variables = variables
        self._stack = contextlib.ExitStack()
        self._address = ""

    def address(self) -> str:
        """Returns its address, for ray.init."""
        if not self._address:
            self._address = self._stack.enter_context(running_ray(self._variables))
        return self._address

    def connect(self) -> None:
        """Connects this process to it.

        A Ray that still holds cores for an earlier driver is replaced, since a job that needs all cores would wait for
        ever.
        """
        init(self.address())
        if not all_cores_free():
            print("the Ray of the tests holds cores of a driver that has ended: it is replaced", file=sys.stderr)
            disconnect()
            self.close()
            init(self.address())

    def close(self) -> None:
        """Ends it."""
        self._address = ""
        self._stack.close()


def init(address: str) -> None:
    """Connects this process to a Ray, quietly."""
    import logging

    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    for name in ("ray.data", "ray.data._internal"):
        logging.getLogger(name).setLevel(logging.ERROR)


def disconnect() -> None:
    """Disconnects this process from its Ray, once no thread of Ray Data calls it any more.

    Such a thread outlives a failed run. If it calls Ray's C++ core later, that ends the process without a line.
    """
    import ray

    for thread in threading.enumerate():
        if thread.name.startswith("StreamingExecutor-"):
            thread.join(FREE_S)
    ray.shutdown()


def all_cores_free() -> bool:
    """Returns whether no task or actor holds a core; waits FREE_S seconds for that."""
    import ray

    end = time.monotonic() + FREE_S
    while (free := ray.available_resources().get("CPU", 0)) < CORES and time.monotonic() < end:
        time.sleep(0.1)
    return free >= CORES


@contextlib.contextmanager
def running_ray(variables: Mapping[str, str], gpus: int = 0) -> Iterator[str]:
    """Starts a Ray, which ends with the block.

    Args:
        variables: Environment variables of its workers.
        gpus: GPUs that it pretends to have.

    Yields:
        Its address, for ray.init.
    """
    folder = Path(tempfile.mkdtemp(prefix="riptide-ray-", dir="/tmp"))  # the path of a socket has at most 107 bytes
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(gpus)],
            env={**environment, **variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdin
    assert process.stdout
    limit = threading.Timer(START_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        address = process.stdout.readline().strip()
        limit.cancel()
        assert address, f"Ray did not start within {START_S:.0f} s, or ended:\n{(folder / 'log').read_text()}"
        yield address
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
