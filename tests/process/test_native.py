"""Kernels are compiled for the CPU of the machine, on x86-64 and on ARM."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from riptide.process import native

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


def test_a_library_that_is_cut_or_changed_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading a cut library would end the process with SIGBUS."""
    source = tmp_path / "kernel.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    assert native.load_library(source).answer() == 42
    [library] = tmp_path.glob("*.so")
    whole = library.read_bytes()
    for damaged in (whole[:4096], b"", whole[:-32], whole[:200] + b"x" + whole[201:]):
        library.write_bytes(damaged)
        assert not native.is_sealed(library)
    library.unlink()  # this process has mapped the file that was changed
    library.write_bytes(whole[:4096])
    native.load_library(source)
    assert library.read_bytes() == whole


def test_libraries_of_another_compiler_are_checked_too(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    with native.checked_libraries(folder):
        (folder / "inner").mkdir()
        library, cut = folder / "inner" / "a.so", folder / "b.so"
        library.write_bytes(b"code")
        cut.write_bytes(b"code")
    assert native.is_sealed(library)
    assert folder.stat().st_mode & 0o777 == 0o700
    cut.write_bytes(b"co")
    with native.checked_libraries(folder):
        assert (library.exists(), cut.exists()) == (True, False)
        cut.write_bytes(b"new")
        with native.checked_libraries(folder):
            assert cut.exists(), "another process may have compiled it just now"
    assert native.is_sealed(cut)


def test_the_cache_is_a_folder_that_only_this_user_can_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    cache = native.cache_directory()
    assert cache.is_relative_to(tmp_path / "home")
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o755)
    assert native.cache_directory().is_relative_to(tmp_path / "tmp")
    native.cache_directory().rename(tmp_path / "other")
    (tmp_path / "tmp" / cache.name).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="no private cache directory"):
        native.cache_directory()


def test_other_machines_have_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no kernel for Linux on riscv64"):
        native.load_library(tmp_path / "kernel.cpp")
