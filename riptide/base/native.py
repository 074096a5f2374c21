"""Compiles C++ kernels for the CPU of this machine, and loads them from a cache."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HEADERS = Path(__file__).parent  # of all kernels
FLAGS = ("-O3", "-fwrapv", "-std=c++20", "-shared", "-fPIC", "-pthread")
NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}  # the compiler's flag for the CPU of this machine


def load_library(source: Path) -> ctypes.CDLL:
    """Loads the shared library of a C++ source, compiled unless the cache has it for this compiler and CPU.

    Args:
        source: The C++ file.

    Raises:
        OSError: If the library cannot be compiled or loaded, or if this is not Linux on x86-64 or ARM.
    """
    if platform.system() != "Linux" or platform.machine() not in NATIVE:
        raise OSError(f"no kernel for {platform.system()} on {platform.machine()}")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler (install g++)")
    try:
        return ctypes.CDLL(str(_build(source, compiler)))
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def compiler_flags() -> tuple[str, ...]:
    """Returns the flags that compile a kernel for the CPU of this machine.

    RIPTIDE_ARCHITECTURE names another one to measure and test, of which this CPU must have all instructions: haswell
    for example has AVX2 without AVX-512.
    """
    architecture = os.environ.get("RIPTIDE_ARCHITECTURE")
    return *FLAGS, f"-march={architecture}" if architecture else NATIVE[platform.machine()]


def _build(source: Path, compiler: str) -> Path:
    flags, model = cpu_info()
    options = compiler_flags()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, encoding="utf-8", check=True, timeout=60
    ).stdout
    headers = [file for folder in (source.parent, HEADERS) for file in sorted(folder.glob("*.h"))]
    texts = [file.read_text(encoding="utf-8") for file in (source, *headers)]
    key = "\0".join((*texts, *options, version, model, *sorted(flags)))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    cache = cache_directory()
    library = cache / name
    if library.exists():
        return library
    # Several processes may compile at once. Each renames its own finished file, so none loads an unfinished one.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        output = Path(scratch) / name
        command = [compiler, *options, f"-I{HEADERS}", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=600)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise OSError(f"{compiler} failed: {errors[0] if errors else done.returncode}")
        output.replace(library)
    return library


def cpu_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[set[str], str]:
    """Returns the flags and model name of the first core; empty if there is no /proc/cpuinfo.

    Linux on ARM calls the flags features, and numbers the models.
    """
    fields = {}
    for line in cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    numbers = [f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part", "CPU variant") if name in fields]
    return set(fields.get("flags", fields.get("Features", "")).split()), fields.get("model name", ", ".join(numbers))


def cache_directory() -> Path:
    """Returns a cache directory that only this user can write to, because its libraries are run as code."""
    parents = [Path(tempfile.gettempdir())]
    with contextlib.suppress(RuntimeError):  # The user may have no home directory.
        parents.insert(0, Path.home() / ".cache")
    for parent in parents:
        cache = parent / f"riptide-{os.getuid()}"
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        status = cache.lstat()
        if status.st_uid == os.getuid() and status.st_mode & 0o22 == 0 and os.access(cache, os.W_OK):
            return cache
    raise OSError("no private cache directory, in the home directory or among temporary files")
