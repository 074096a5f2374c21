"""The memory that a process may still use, with the limits of containers in both versions and of the process."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from riptide.process.memory import describe_lack_of_memory, free_memory, return_freed_memory

CGROUPS = Path("/sys/fs/cgroup")
GiB = 1 << 30
UNLIMITED = 9_223_372_036_854_771_712  # the first version's number for no limit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the files of a machine of 8 GiB, of which 5 are available."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {8 << 20} kB\nMemAvailable:    {5 << 20} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def limit(folder: Path, most: object, used: int, cache: int = 0) -> None:
    """Writes the files of a cgroup of the second version."""
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 1\nactive_file {GiB}\ninactive_file {cache}\n")


def test_without_containers_it_is_what_the_system_says(root: Path) -> None:
    assert free_memory(root=root) == 5 * GiB
    assert free_memory(root=root / "none") == psutil.virtual_memory().total
    assert free_memory() <= psutil.virtual_memory().total


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no memory")
def test_memory_that_a_thread_has_freed_below_a_kept_block_is_returned() -> None:
    def allocate() -> None:
        blocks = [bytes([number % 256]) * (64 << 10) for number in range(2_048)]
        kept.append(blocks.pop())

    kept, process = list[bytes](), psutil.Process()
    return_freed_memory()
    before = process.memory_info().rss
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    freed = process.memory_info().rss - before
    return_freed_memory()
    assert kept
    assert freed > 64 << 20  # glibc keeps it, otherwise this test shows nothing
    assert process.memory_info().rss - before < 30 << 20


def test_errors_for_lack_of_memory_are_known() -> None:
    lacks = [
        MemoryError("malloc of size 64 failed"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("a.so: failed to map segment from shared object"),
    ]
    assert all((describe_lack_of_memory(error) or "").startswith("out of memory") for error in lacks)
    others = [OSError(2, "No such file"), RuntimeError("a"), ValueError("can't start new thread"), ImportError("a")]
    assert not any(map(describe_lack_of_memory, others))


def test_the_smallest_limit_of_all_cgroups_above_counts_less_what_is_used(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/pod/box\n")
    top = root / "sys/fs/cgroup"
    limit(top / "pods/pod/box", "max", 3 * GiB)
    assert free_memory(root=root) == 5 * GiB
    limit(top / "pods", 6 * GiB, 3 * GiB)
    assert free_memory(root=root) == 3 * GiB
    limit(top / "pods/pod", 2 * GiB, 3 * GiB // 2, cache=GiB // 4)
    assert free_memory(root=root) == 3 * GiB // 4  # page cache that can be reclaimed counts as free
    limit(top / "pods/pod/box", GiB, 2 * GiB)
    assert free_memory(root=root) == 0


def test_a_container_that_sees_its_own_cgroup_as_the_top_is_limited(root: Path) -> None:
    """Whether /proc has the path on the machine or one relative to the container."""
    limit(root / "sys/fs/cgroup", 2 * GiB, GiB)
    for path in ("/", "/docker/0123", "/../../other"):
        write(root / "proc/self/cgroup", f"0::{path}\n")
        assert free_memory(root=root) == GiB


def test_cgroups_of_the_first_version_are_limited(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:devices:/box\n4:cpu,memory:/box/inner\n0::/\n")
    for folder, most, used in (("", UNLIMITED, 7), ("box", 3 * GiB, 2 * GiB), ("box/inner", UNLIMITED, GiB)):
        memory = root / "sys/fs/cgroup/memory" / folder
        write(memory / "memory.limit_in_bytes", f"{most}\n")
        write(memory / "memory.usage_in_bytes", f"{used}\n")
        write(memory / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GiB // 2}\n")
    assert free_memory(root=root) == 3 * GiB // 2


@contextlib.contextmanager
def cgroup(most: int) -> Iterator[list[Path]]:
    """A cgroup with a limit: the files to which a process writes its id to enter it. Skips where none can be made."""
    is_first = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_first else CGROUPS) / f"riptide-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        name = "memory.limit_in_bytes" if is_first else "memory.max"
        try:
            (folder / name).write_text(str(most))
        except OSError as error:
            pytest.skip(f"no limit of memory can be set here: {error}")
        yield [folder / "cgroup.procs"]
    finally:
        folder.rmdir()


def run_child(script: str, entered: list[Path], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python in a child that enters cgroups first."""
    enter = "import os, sys\nfor file in sys.argv[1].split():\n    open(file, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", enter + script, " ".join(map(str, entered)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


PUT_TASKS = """
import resource
import torch
from riptide.process import memory
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.base.errors import InputError
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
torch.set_num_threads(1)
encoder = Encoder(sys.argv[2], EncoderOptions(dtype="float32", compile="never"), device="cpu", tasks={})
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
if sys.argv[3] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[4]) << 20), resource.RLIM_INFINITY))
print(memory.free_memory() >> 20)
matrix = torch.zeros(2, 2, 4, 8192, 8)
for number in range(1000):
    try:
        encoder.put_task(str(number), TaskPrompt(backbone_of(encoder.config), encoder.options, matrix, None))
    except InputError as error:
        print(number, error)
        break
"""


@pytest.mark.parametrize(("way", "limit_mib"), [("limited", 192), ("contained", 700)])
def test_a_prompt_beyond_the_memory_of_the_process_is_refused_and_the_process_lives(
    tiny: Callable[..., Path], way: str, limit_mib: int
) -> None:
    """1,000 prompts of 4 MiB each need 4 GiB, more than the limits of the address space and of the cgroup."""
    with contextlib.ExitStack() as stack:
        entered = stack.enter_context(cgroup(limit_mib << 20)) if way == "contained" else []
        ended = run_child(PUT_TASKS, entered, tiny("bert"), way, limit_mib)
    assert ended.returncode == 0, ended.stderr[-2000:]
    free_mib, line = ended.stdout.splitlines()
    assert 0 < int(free_mib) <= limit_mib
    assert re.match(
        r"\d+ with a prompt of 8192 tokens the table of all prompts takes \d\.\d GiB, and 0\.\d are free",
        line,
    )
