"""Which of the project's C++ kernels must be loaded on this machine."""

from __future__ import annotations

import platform
from collections.abc import Collection

from riptide.base.native import cpu_info


def must_load(needed: Collection[str] = ()) -> bool:
    """Returns whether a kernel must be loaded: on x86-64 Linux, if the CPU has the needed flags.

    A missing source file or compiler is no reason to skip a test there.
    """
    return platform.system() == "Linux" and platform.machine() == "x86_64" and {*needed} <= cpu_info()[0]
