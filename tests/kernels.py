"""Which of the project's C++ kernels must be loaded on this machine, and kernels that are compiled for older CPUs."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from riptide.process import native

ARCHITECTURES = {  # of x86-64: the compiler's name, and a flag that the CPU needs to run it
    "x86-64": "sse2",
    "haswell": "avx2",
    "alderlake": "avx_vnni",
    "skylake-avx512": "avx512bw",
    "icelake-server": "avx512_vnni",
}


def must_load() -> bool:
    """Returns whether kernels must be loaded: on Linux on x86-64 and ARM.

    A missing source file or compiler is no reason to skip a test there.
    """
    return platform.system() == "Linux" and platform.machine() in native.NATIVE


def load_for(architecture: str, source: Path) -> ctypes.CDLL:
    """Loads a kernel that is compiled for an architecture; skips the test where the CPU does not run it."""
    if ARCHITECTURES[architecture] not in native.cpu_info()[0]:
        pytest.skip(f"this CPU has no {ARCHITECTURES[architecture]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIPTIDE_ARCHITECTURE", architecture)
        return native.load_library(source)
