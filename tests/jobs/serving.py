"""A small store to be served, the job that serves it in a process of its own, and prompts to put there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastapi.testclient import TestClient
from samples import make_passages, make_queries, write_beir
from synthesisers import SHAPE, random_synthesis

from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import EncoderOptions, describe
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.prompts.task_prompt import SETTINGS, WEIGHTS, TaskPrompt, backbone_of
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = EncoderOptions(dtype="float32", compile="never")
K = 12


def make_served(folder: Path, model: str, call_job: Callable[..., int]) -> Path:
    """A store of 240 passages, 6 of them deleted, with filters, vectors, an index, BM25 and runs of each."""
    passages = make_passages(240)
    for number, passage in enumerate(passages):
        passage["metadata"]["lang"] = "en" if number % 5 else "de"
        passage["metadata"]["tags"] = [name for name, step in (("even", 2), ("third", 3)) if number % step == 0]
    queries, judged = make_queries(passages, 40)
    source = write_beir(folder / "tiny", passages, queries, {"test": judged})
    at = ("--store", folder / "store")
    filters = ("--filters", "year", "int64", "lang", "string", "tags", "list[string]")
    assert call_job("import_corpus", *at, "--source", source, "--part-size", 60, *filters) == 0
    (folder / "gone").write_text("".join(f"p{number}\n" for number in range(0, 240, 40)))
    assert call_job("import_corpus", *at, "--delete", folder / "gone") == 0
    exact = ("--dtype", "float32", "--compile", "never")
    assert call_job("encode_corpus", *at, "--encoder", model, "--name", "enc", *exact) == 0
    assert call_job("build_index", *at, "--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3) == 0
    assert call_job("build_bm25", *at) == 0
    for mode in ("exact", "dense", "bm25", "hybrid"):
        assert call_job("search", *at, "--mode", mode, "--k", K, "--name", mode) == 0
    store = Store(str(folder / "store"))
    release, left = plan_release(store)
    assert not left
    assert save_as_live(store, release, None)
    (folder / "queries.json").write_text(json.dumps({query["_id"]: query["text"] for query in queries}))
    return folder


NEW, GONE = make_passages(1, seed=11, prefix="n")[0], "p77"  # the passage that a growth adds, and the deleted one's id


class Growth(NamedTuple):
    """A store of `make_served`, and the jobs by which it grows, by the artifact that each makes."""

    store: Store
    steps: dict[str, Callable[[], str]]

    def grow(self, *names: str) -> None:
        """Runs some of the jobs; without names, all."""
        for name in names or self.steps:
            self.steps[name]()


def make_growth(folder: Path, store: Path, model: str, done: Callable[..., str]) -> Growth:
    """Returns the jobs that add one passage to a store, and delete one; folder: gets their input."""
    at = ("--store", store)
    source = write_beir(folder / "more", [NEW])
    (folder / "gone").write_text(f"{GONE}\n")
    exact = ("--dtype", "float32", "--compile", "never")
    index = ("--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3)
    return Growth(
        Store(str(store)),
        {
            "corpus": lambda: done("import_corpus", *at, "--source", source, "--append", "--delete", folder / "gone"),
            "embeddings": lambda: done("encode_corpus", *at, "--encoder", model, "--name", "enc", *exact),
            "index": lambda: done("build_index", *at, *index),
            "bm25": lambda: done("build_bm25", *at),
        },
    )


def query_texts(root: Path) -> dict[str, str]:
    """Returns the texts of the queries of a folder that `make_served` made, by id."""
    return json.loads((root / "queries.json").read_text())


def task_files(folder: Path, model: str, seed: int, length: int = 3, **changes: Any) -> dict[str, Any]:
    """The multipart body of a random query-side prompt."""
    torch.manual_seed(seed)
    matrix = torch.randn(SHAPE.layers, 2, SHAPE.heads, length, SHAPE.head_dim)
    return upload(folder, TaskPrompt(backbone_of({**describe(model, OPTIONS), **changes}), OPTIONS, matrix, None))


def computed_prompt(
    model: str, seed: int, shape: PromptShape = SHAPE, width: int = 32, encoder: EncoderOptions = OPTIONS, **sizes: Any
) -> TaskPrompt:
    """A random prompt that is computed from each query."""
    synthesis = random_synthesis(seed, shape, width, **sizes)
    return TaskPrompt(backbone_of(describe(model, encoder)), encoder, None, None, synthesis=synthesis)


def upload(folder: Path, prompt: TaskPrompt) -> dict[str, Any]:
    """The multipart body of a prompt, which is saved in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    prompt.save(folder)
    return {
        "prompt": (WEIGHTS, (folder / WEIGHTS).read_bytes()),
        "settings": (SETTINGS, (folder / SETTINGS).read_bytes()),
    }


@contextlib.contextmanager
def started(
    *arguments: object, environment: Mapping[str, str] | None = None, output: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The job in a process of its own, and its address once it listens.

    Args:
        arguments: The job's options.
        environment: What it has beside this one's.
        output: Gets the lines that it prints before it listens.
    """
    command = [sys.executable, str(REPOSITORY / "jobs/serve_search.py"), *map(str, arguments), "--threads", "2"]
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if output is not None:
                    output.append(line.rstrip("\n"))
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield process, found.group()
                    return
            raise AssertionError("it did not start")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


class Server(NamedTuple):
    """A server in a process of its own, on a store that tests may change."""

    address: str
    root: Path
    pid: int


def asked(
    connection: HTTPConnection, method: str, path: str, body: bytes, kind: str, token: str | None = None
) -> tuple[int, bytes]:
    own = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, body, {"Content-Type": kind, **own})
    answer = connection.getresponse()
    return answer.status, answer.read()


def metrics_of(client: TestClient, path: str = "/metrics") -> str:
    """Returns the metrics of a server as text, without the label of the store."""
    text = re.sub(r'store="[^"]*",?', "", client.get(path).text)
    return text.replace(",}", "}").replace("{}", "")


def connect(server: Server) -> HTTPConnection:
    return HTTPConnection(server.address.removeprefix("http://"), timeout=240)


class Load:
    """Clients that ask in a closed loop, each over one connection, until they are told to end."""

    def __init__(self, server: Server, bodies: list[bytes], clients: int, token: str | None = None):
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.faults: list[BaseException] = []
        self._server, self._bodies, self._token, self._done = server, bodies, token, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()

    def wait_for(self, more: int) -> None:
        """Waits for a given number of further answers."""
        wanted = len(self.answers) + more
        while len(self.answers) < wanted and not self.faults:
            time.sleep(0.005)

    def _ask(self, number: int) -> None:
        try:
            connection = connect(self._server)
            while not self._done.is_set():
                body = self._bodies[number % len(self._bodies)]
                status, content = asked(connection, "POST", "/v1/search", body, "application/json", self._token)
                self.answers.append((status, json.loads(content)))
                number += 1
        except BaseException as error:
            self.faults.append(error)
