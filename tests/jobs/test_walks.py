"""The files that a passage, a query and a training step cross are at most those that docs/architecture.md lists.

A passage or a step crosses a file if a function of the file runs at least once more for each further part or step.
"""

from __future__ import annotations

import contextlib
import csv
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import uvicorn
from mined import mine
from samples import make_passages

from riptide.indexing.store.store import Store
from riptide.serve.app import build_app
from riptide.serve.http.connection_limits import HttpLimits
from riptide.serve.http.connections import Connections, bounded_protocol
from riptide.serve.http.guard import Tokens
from riptide.serve.one_process import open_local
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PART_SIZE = 20  # passages
SHARED = ("base", "process", "telemetry")  # packages in riptide/
EXACT = ("--dtype", "float32", "--compile", "never")
TEXT = "what is a rip current?"
Calls = Counter[tuple[str, str]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Counts the calls of functions of riptide in this thread and in new ones, by file and function."""
    counts: Calls = Counter()
    root = f"{ROOT}/"

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            path = code.co_filename.removeprefix(root)
            top = path.removeprefix("riptide/").partition("/")[0]
            if top in (*SHARED, "indexing", "jobs", "retriever", "serve"):
                name = path if top in SHARED else path.removeprefix("riptide/")
                counts[name, code.co_qualname] += 1

    threading.setprofile(record)
    sys.setprofile(record)
    yield counts
    sys.setprofile(None)
    threading.setprofile(None)


@contextlib.contextmanager
def counted(calls: Calls, output: Calls) -> Iterator[None]:
    """Adds the calls within the block to `output`."""
    calls.clear()
    yield
    output.update(calls)


def crossed_files(fewer: Calls, more: Calls, further: int) -> list[str]:
    """Returns the files with a function that ran at least `further` times more, in the order of the first calls."""
    return list(dict.fromkeys(key[0] for key, count in more.items() if count >= fewer[key] + further))


def listed_files(walk: str) -> list[str]:
    """Returns the files that the page lists for a walk."""
    text = PAGE.read_text(encoding="utf-8").partition(f"**{walk}**")[2].partition("```text\n")[2].partition("```")[0]
    files: list[str] = []
    for line in text.splitlines():
        folder, *names = re.findall(r"\S+", line)
        files += [f"{folder}/{name}.py".replace("//", "/") for name in names]
    return files


def check_walk(walk: str, crossed: Iterable[str]) -> None:
    """Checks that the page lists existing files, and at least as many as are crossed."""
    crossed, listed = sorted(set(crossed)), listed_files(walk)
    print(f"{walk}: {len(crossed)} files")
    assert [file for file in listed if not (ROOT / file).is_file()] == []
    assert len(set(listed)) == len(listed)
    new, gone = sorted(set(crossed) - set(listed)), sorted(set(listed) - set(crossed))
    assert len(crossed) <= len(listed), f"{walk} crosses {len(crossed)} files, listed are {len(listed)}: {new=} {gone=}"


def index_passages(done: Callable[..., str], folder: Path, model: str, num_parts: int, calls: Calls) -> Calls:
    """Returns the calls that make an index of a CSV file."""
    folder.mkdir()
    rows = [{"id": each["_id"], "text": each["text"]} for each in make_passages(num_parts * PART_SIZE)]
    with (folder / "passages.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    store, output = ("--store", folder / "store"), Calls()
    with counted(calls, output):
        done("import_corpus", *store, "--source", folder / "passages.csv", "--part-size", PART_SIZE)
        done("encode_corpus", *store, "--encoder", model, "--name", "enc", *EXACT)
        done("build_index", *store, "--name", "idx", "--factory", "IVF4,Flat", "--shards", num_parts)
    return output


def test_a_passage_crosses_the_listed_files(done: Callable[..., str], tmp_path: Path, model: str, calls: Calls) -> None:
    fewer, more = (index_passages(done, tmp_path / str(parts), model, parts, calls) for parts in (1, 3))
    check_walk("A passage", crossed_files(fewer, more, 2))


def test_a_training_step_crosses_the_listed_files(world: Any, done: Callable[..., str], calls: Calls) -> None:
    mine(Store(str(world.store)))
    training = ("train_retriever", "--store", world.store, "--backbone", world.model, "--train", "all")
    data = ("--split", "train", "--negatives", "hand", "--negatives-per-query", 2, "--batch", 8)
    runs: Sequence[Calls] = Calls(), Calls()
    for steps, output in zip((2, 6), runs, strict=True):
        with counted(calls, output):
            done(*training, *data, "--task", f"of{steps}", "--steps", steps, "--cpus", 1, "--dtype", "float32")
    check_walk("A training step", crossed_files(*runs, 4))


def start_server(service: Service) -> tuple[uvicorn.Server, threading.Thread]:
    """Starts a server as `run_server` does, in a thread of this process."""
    connections = Connections(HttpLimits(), 16)
    app = build_app(ReleaseChanges(service), Tokens(), connections=connections)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=bounded_protocol(connections), log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    return server, thread


def test_a_dense_query_crosses_the_listed_files(served: Path, calls: Calls) -> None:
    live = threading.Event()
    service = open_local(Store(str(served / "store")), ServiceOptions(threads=1), device="cpu")
    service.on_live = live.set
    server, thread = start_server(service)
    try:
        assert live.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            client.post("/v1/search", json={"query": TEXT}).raise_for_status()  # opens the connection
            queries = []
            for _ in range(50):
                calls.clear()
                client.post("/v1/search", json={"query": TEXT}).raise_for_status()
                queries.append({file for file, _ in list(calls)})
            crossed = set.intersection(*queries)  # a loop of the service may run during some of them
    finally:
        server.should_exit = True
        thread.join(60)
    check_walk("A query", crossed)
    assert len([file for file in crossed if file.startswith("serve/")]) <= 14
