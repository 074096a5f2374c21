"""The kernels, compiled for ARM and run by an emulator, give the bytes that x86-64 with AVX2 gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kernels import ARCHITECTURES

from riptide.indexing.exact import kernel
from riptide.process import native
from riptide.retriever.forward import int8, packing

RUNNER = Path(__file__).with_name("kernel_runner.cpp")
KERNELS = {"EXACT": kernel.SOURCE, "PACKING": packing.SOURCE, "INT8": int8.SOURCE}
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def compile_runner(compiler: str, architecture: str, name: str, folder: Path, *options: str) -> Path:
    """Compiles the program that runs a kernel, with the flags of kernels."""
    program = folder / f"{name}-{architecture}"
    flags = [flag for flag in native.FLAGS if flag not in ("-shared", "-fPIC")]
    source = [f'-DKERNEL="{KERNELS[name]}"', f"-D{name}", str(RUNNER), "-o", str(program)]
    command = [compiler, *flags, f"-I{native.HEADERS}", f"-march={architecture}", *options, *source]
    subprocess.run(command, check=True, timeout=600)
    return program


@pytest.mark.arm
@pytest.mark.parametrize("name", KERNELS)
def test_the_bytes_on_arm_are_those_of_avx2(name: str, tmp_path: Path) -> None:
    """NEON, and the instructions for bfloat16 that exact search uses where ARM has them."""
    for program in (CROSS_COMPILER, EMULATOR):
        assert shutil.which(program), f"no {program}: `make arm` installs it"
    if ARCHITECTURES["haswell"] not in native.cpu_info()[0]:
        pytest.skip("this CPU has no avx2")
    expected = subprocess.run(
        [compile_runner("g++", "haswell", name, tmp_path)], capture_output=True, check=True
    ).stdout
    assert len(expected) > 10_000
    for architecture in ("armv8.2-a", "armv8.6-a"):
        program = compile_runner(CROSS_COMPILER, architecture, name, tmp_path, "-static")
        command = [EMULATOR, "-cpu", "max", str(program)]
        assert subprocess.run(command, capture_output=True, check=True, timeout=600).stdout == expected, architecture
