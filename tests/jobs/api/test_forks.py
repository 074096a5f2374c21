"""A forked process that needs the threads of its parent gets one line; one that does not need them works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import riptide

PROGRAM = """
import multiprocessing, os, subprocess, sys, time
import riptide

def search_in(store):
    print([hit.id for hit in store.search(sys.argv[2])("bama", k=1)], flush=True)

def fork(function, *arguments):
    child = os.fork()
    if not child:
        try:
            function(*arguments)
        except riptide.InputError as error:
            print(error, flush=True)
        os._exit(0)
    for _ in range(600):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    os.kill(child, 9)
    print("the child hangs", flush=True)

store = riptide.Store(sys.argv[1])
if sys.argv[2] == "bm25":
    fork(search_in, store)  # before the parent has threads
search_in(store)
fork(search_in, store)
fork(lambda: print(len(store.corpus()), flush=True))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(len, ["four"]), flush=True)
subprocess.run(["echo", "by exec"])
search_in(store)
"""
LINE = (
    "this process was forked after {}, whose threads exist in the parent only: start it with "
    'multiprocessing.get_context("spawn"), or fork before'
)


def run(store: riptide.Store, source: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, store.url, source]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_dense_search_in_a_forked_process_is_refused_and_harmless_forks_work(
    shared: riptide.Store, documented: Callable[..., None]
) -> None:
    first, refused, *others, last = run(shared, "exact")
    assert first == last
    assert refused == LINE.format("the first encoding or dense search")
    assert others == ["240", "[4]", "by exec"]
    documented("Python", "a dense search in a process that was forked after one", refused, 1)


def test_bm25_in_a_forked_process_is_refused(shared: riptide.Store) -> None:
    first, again, refused, *_, last = run(shared, "bm25")
    assert first == again == last
    assert refused == LINE.format("the start of Java")
