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
from collections.abc import Collection
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fwrapv", "-std=c++20", "-shared", "-fPIC", "-pthread")


def load_library(source: Path, required_flags: Collection[str] = ()) -> ctypes.CDLL:
    """Loads the shared library of a C++ source, compiled unless the cache has it for this compiler and CPU.

    Args:
        source: The C++ file.
        required_flags: Flags that the CPU must have, as in /proc/cpuinfo.

    Raises:
        OSError: If the library cannot be compiled or loaded, or if this is not Linux on x86-64.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OSError(f"no kernel for {platform.system()} on {platform.machine()}")
    flags, model = cpu_info()
    if missing := set(required_flags) - flags:
        raise OSError(f"the CPU lacks {' '.join(sorted(missing))}")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise OSError("no C++ compiler (install g++)")
    try:
        return ctypes.CDLL(str(_build(source, compiler, model, flags)))
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def _build(source: Path, compiler: str, model: str, flags: set[str]) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, encoding="utf-8", check=True, timeout=60
    ).stdout
    texts = [file.read_text(encoding="utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
    key = "\0".join((*texts, *FLAGS, version, model, *sorted(flags)))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    cache = cache_directory()
    library = cache / name
    if library.exists():
        return library
    # Several processes may compile at once. Each renames its own finished file, so none loads an unfinished one.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        output = Path(scratch) / name
        command = [compiler, *FLAGS, str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=600)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise OSError(f"{compiler} failed: {errors[0] if errors else done.returncode}")
        output.replace(library)
    return library


def cpu_info() -> tuple[set[str], str]:
    """Returns the flags and model name of the first core; empty if there is no /proc/cpuinfo."""
    fields, cpuinfo = {}, Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return set(fields.get("flags", "").split()), fields.get("model name", "")


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
