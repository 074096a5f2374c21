"""Refuses work in a forked process that would wait forever for threads that exist only in its parent.

A fork copies the memory of a library, but not its threads. torch and FAISS share a pool of OpenMP threads, an encoder
has threads too, and the JVM has many. Programs that use none of them after a fork are not affected, nor are processes
that start again by exec (subprocess, "spawn").
"""

from __future__ import annotations

import os
from typing import Literal

from riptide.base.errors import InputError

Threads = Literal["the first encoding or dense search", "the start of Java"]

_started: set[Threads] = set()
_lost: set[Threads] = set()


def need_threads(threads: Threads) -> None:
    """Records that this process has the threads of a library; raises InputError if it lost them in a fork.

    Raises:
        InputError: If the process was forked from one that had them.
    """
    if threads in _lost:
        raise InputError(
            f"this process was forked after {threads}, whose threads exist in the parent only: start it with "
            'multiprocessing.get_context("spawn"), or fork before'
        )
    _started.add(threads)


os.register_at_fork(after_in_child=lambda: _lost.update(_started))
