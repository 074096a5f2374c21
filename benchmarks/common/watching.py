"""Runs a job while its memory is watched."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common.program import ROOT


class Watched(NamedTuple):
    """A job that has ended.

    Attributes:
        seconds: Its duration.
        cpu_seconds: CPU time of the job's process and of its descendants, without those that outlive it (Ray's).
        pss_bytes: Peak of the proportional set sizes (PSS) of the job and all its descendants.
        anonymous_bytes: Peak of the part of them that maps no file.
        rss_bytes: Peak of the resident memory of the job's own process.
        output: What it has printed.
    """

    seconds: float
    cpu_seconds: float
    pss_bytes: int
    anonymous_bytes: int
    rss_bytes: int
    output: str


def watch_job(store: Path | str, name: str, *arguments: object) -> Watched:
    """Runs a job of this checkout on a store while its memory is watched. Ends the program if it fails."""
    command = [sys.executable, f"jobs/{name}.py", "--store", str(store), *map(str, arguments)]
    started, cpu_before, pss, anonymous, rss = time.perf_counter(), _cpu_of_children(), 0, 0, 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = psutil.Popen(command, cwd=ROOT, stdout=out)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
                memory = tree_memory(process)
                pss, anonymous = max(pss, memory["Pss"]), max(anonymous, memory["Pss_Anon"])
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                rss = 1024 * int(match[1]) if (match := re.search(r"VmHWM:\s+(\d+) kB", status)) else rss
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(process.returncode)
        out.seek(0)
        return Watched(seconds, _cpu_of_children() - cpu_before, pss, anonymous, rss, out.read())


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tree_memory(process: Any) -> Counter[str]:
    """Returns the memory of a process and all its descendants in bytes, by the names of /proc/PID/smaps_rollup."""
    total = Counter[str]()
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(OSError):  # it may end meanwhile
            for line in Path(f"/proc/{member.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
                name, kilobytes, _ = line.split()
                total[name.rstrip(":")] += 1024 * int(kilobytes)
    return total
