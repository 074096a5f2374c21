"""Compiles C++ kernels for the CPU of this machine, and loads them from a cache.

A library of the cache ends with the SHA-256 of the bytes before it, which is checked before each load: a library that
is cut, for example by a full disk, would end the process with SIGBUS. torch's own compiled libraries get the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

HEADERS = Path(__file__).parent  # of all kernels
SEAL_BYTES = 32  # of a SHA-256
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
    if is_sealed(library):
        return library
    # Several processes may compile at once. Each renames its own finished file, so none loads an unfinished one.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        output = Path(scratch) / name
        command = [compiler, *options, f"-I{HEADERS}", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=600)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise OSError(f"{compiler} failed: {errors[0] if errors else done.returncode}")
        seal(output)
        output.replace(library)
    return library


def seal(library: Path) -> None:
    """Appends the SHA-256 of a shared library to it; a loader ignores what follows the last section."""
    data = library.read_bytes()
    sealed = library.with_name(f"{library.name}.{os.getpid()}")
    try:
        sealed.write_bytes(data + hashlib.sha256(data).digest())
        sealed.chmod(stat.S_IMODE(library.stat().st_mode))
        sealed.replace(library)
    finally:
        sealed.unlink(missing_ok=True)


def is_sealed(library: Path) -> bool:
    """Returns whether a shared library is there, and ends with the SHA-256 of the bytes before it."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-SEAL_BYTES]).digest() == data[-SEAL_BYTES:]


@contextlib.contextmanager
def checked_libraries(folder: Path) -> Iterator[None]:
    """Context in which another compiler may load the libraries below a folder, and add some.

    Libraries that are not sealed are removed before, and sealed after. Both wait for no other process: while one
    compiles, its libraries stay as they are, and what the last process does not seal is compiled again. On a file
    system without locks, nothing is removed or sealed.

    Args:
        folder: The folder; it is created.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as lock:  # NFS needs it open for reading, to share the lock
        if _lock(lock.fileno(), fcntl.LOCK_EX):
            for library in _unsealed(folder):
                library.unlink(missing_ok=True)
        _lock(lock.fileno(), fcntl.LOCK_SH)
        yield
        if _lock(lock.fileno(), fcntl.LOCK_EX):
            with contextlib.suppress(OSError):  # a full disk: what is not sealed is compiled again
                for library in _unsealed(folder):
                    seal(library)


def _unsealed(folder: Path) -> list[Path]:
    """Returns the shared libraries below a folder that are not sealed."""
    return [library for library in folder.rglob("*.so") if library.is_file() and not is_sealed(library)]


def _lock(descriptor: int, kind: int) -> bool:
    """Locks a file without waiting; returns whether it could: other processes may hold it, or there may be no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    """Returns a cache directory that only this user can read and write, because its libraries are run as code."""
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
        is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o77 == 0
        runs_code = not os.statvfs(cache).f_flag & os.ST_NOEXEC
        if is_private and runs_code and os.access(cache, os.W_OK):
            return cache
    raise OSError("no private cache directory, in the home directory or among temporary files")
