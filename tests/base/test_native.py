"""Kernels are compiled for the CPU of the machine, on x86-64 and on ARM."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from riptide.base import native

ARM_CPU = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimdhp bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

processor\t: 1
Features\t: fp
"""


def test_the_cpu_is_described_on_x86_and_on_arm(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert native.cpu_info(file) == (set(), "")
    file.write_text(ARM_CPU)
    assert native.cpu_info(file) == (
        {"fp", "asimd", "asimdhp", "bf16"},
        "CPU implementer 0x41, CPU part 0xd40, CPU variant 0x1",
    )
    file.write_text("model name\t: EPYC\nflags\t\t: sse2 avx2\n")
    assert native.cpu_info(file) == ({"sse2", "avx2"}, "EPYC")


def test_the_flags_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIPTIDE_ARCHITECTURE", raising=False)
    for machine, flag in (("x86_64", "-march=native"), ("aarch64", "-mcpu=native")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert native.compiler_flags() == (*native.FLAGS, flag)
    monkeypatch.setenv("RIPTIDE_ARCHITECTURE", "haswell")
    assert native.compiler_flags() == (*native.FLAGS, "-march=haswell")


def test_other_machines_have_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no kernel for Linux on riscv64"):
        native.load_library(tmp_path / "kernel.cpp")
