"""The machine that a benchmark runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Returns the name of the CPU, or that of its architecture if the system does not tell the former."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
