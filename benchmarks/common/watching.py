"""Runs a job while its memory is watched."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common.program import ROOT


class Watched(NamedTuple):
    """A job that has ended.

    Attributes:
        seconds: Its duration.
        pss_bytes: Peak of the proportional set sizes (PSS) of the job and all its descendants.
        rss_bytes: Peak of the resident memory of the job's own process.
        output: What it has printed.
    """

    seconds: float
    pss_bytes: int
    rss_bytes: int
    output: str


def watch_job(store: Path | str, name: str, *arguments: object) -> Watched:
    """Runs a job of this checkout on a store while its memory is watched. Ends the program if it fails."""
    command = [sys.executable, f"jobs/{name}.py", "--store", str(store), *map(str, arguments)]
    started, pss, rss = time.perf_counter(), 0, 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = psutil.Popen(command, cwd=ROOT, stdout=out)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
                pss = max(pss, tree_pss(process))
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                rss = 1024 * int(match[1]) if (match := re.search(r"VmHWM:\s+(\d+) kB", status)) else rss
            time.sleep(0.25)
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(process.returncode)
        out.seek(0)
        return Watched(seconds, pss, rss, out.read())


def tree_pss(process: Any) -> int:
    """Returns the proportional set size of a process and all its descendants, in bytes."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += member.memory_full_info().pss
    return total
