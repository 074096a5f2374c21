"""The free memory of this process: that of the machine, of its containers (cgroups), and of the limits of the process.

Also says in one line that an error means too little memory.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from riptide.base.wording import shown

if TYPE_CHECKING:
    import torch


# For cgroup v2 and v1: the files for limit and usage, and the fields of memory.stat for reclaimable page cache. A limit
# that is not set is "max", or a number above any machine's memory.
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file",))
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))


# Parts of the messages of libraries that cannot be loaded, and of threads that cannot be started, for lack of memory.
_LACKS = ("failed to map segment", "cannot allocate memory", "can't start new thread", "bad_alloc")


def describe_lack_of_memory(error: BaseException) -> str | None:
    """Returns a line about an error that means too little memory, with the limit; None for any other error."""
    reason = " ".join(str(error).split())
    is_lack = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if isinstance(error, ImportError | OSError | RuntimeError):
        is_lack = is_lack or any(each in reason.lower() for each in _LACKS)
    if not is_lack:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    place = "this machine or its container has no more; use a larger one"
    if limit != resource.RLIM_INFINITY:
        place = f"this process may use {format_bytes(limit)} of address space (ulimit -v); raise the limit"
    return f"out of memory{f' ({shown(reason)})' if reason else ''}: {place}, or give the work less at once"


def free_memory(device: torch.device | None = None, root: Path = Path("/")) -> int:
    """Returns the bytes that this process can still use on a device without swapping or being killed.

    Of main memory it is the smallest of these: the available memory of the machine; the limit of each cgroup of the
    process and of its parents minus their usage, not counting reclaimable page cache; and the limit of the address
    space (`ulimit -v`) minus its present size.

    Args:
        device: The device; None: main memory.
        root: The folder that has `proc` and `sys`.
    """
    if device is not None and device.type == "cuda":
        import torch

        # torch reuses the memory that it has reserved.
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached_bytes
    return max(0, min([_free_machine_memory(root), *_free_cgroup_memory(root), *free_address_space(root)]))


def format_bytes(size: float) -> str:
    """Formats a size in bytes for people, for example `3.2 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError


def _free_machine_memory(root: Path) -> int:
    """Returns the available memory of the machine in bytes; its total memory if the system does not report it."""
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(root / "proc/meminfo"), re.MULTILINE):
        return 1024 * int(match[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_cgroup_memory(root: Path) -> Iterator[int]:
    """Yields the free bytes of each cgroup with a limit, among this process's cgroups and their parents."""
    for folder, version in _cgroups(root):
        limit_file, used_file, reclaimable = version
        limit, used = _read_text(folder / limit_file).strip(), _read_text(folder / used_file).strip()
        if limit.isdecimal() and used.isdecimal():
            fields = dict(line.split(" ", 1) for line in _read_text(folder / "memory.stat").splitlines() if " " in line)
            cache = next((int(fields[name]) for name in reclaimable if name in fields), 0)
            yield int(limit) - int(used) + cache


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Yields the folders of cgroups that limit this process's memory, with the file names of their cgroup version.

    Not all of them exist: a container often sees its own cgroup as the top folder although /proc/self/cgroup has the
    path of the machine.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inner = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        depths = range(len(inner) + 1)
        if not controllers:
            for mount in (mounts, mounts / "unified"):
                yield from ((mount.joinpath(*inner[:depth]), _VERSION_2) for depth in depths)
        elif "memory" in controllers.split(","):
            yield from (((mounts / "memory").joinpath(*inner[:depth]), _VERSION_1) for depth in depths)


def free_address_space(root: Path = Path("/")) -> Iterator[int]:
    """Yields the free bytes of the address space, if it has a limit and the system reports its usage."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _read_text(root / "proc/self/statm").partition(" ")[0]
    if limit != resource.RLIM_INFINITY and pages.isdecimal():
        yield limit - int(pages) * os.sysconf("SC_PAGE_SIZE")


def _read_text(file: Path) -> str:
    """Reads a small system file; returns an empty string if that fails."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
