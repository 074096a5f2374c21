"""The server as others see it: OpenAI's and LangChain's clients, a fuzzer, clients in great number, a browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from local_cluster import LONG
from samples import save_tiny_bert
from serving import OPTIONS, REPOSITORY, Load, Server, asked, connect, query_texts, started, task_files

from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.prompts.task_prompt import SETTINGS, WEIGHTS
from riptide.serve.client import Client, ServerError
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, served: Path) -> Iterator[Server]:
    root = Path(shutil.copytree(served, tmp_path_factory.mktemp("outside") / "root"))
    with started("--store", root / "store", "--port", 0) as (process, address):
        yield Server(address, root, process.pid)
        assert process.poll() is None


def test_openais_client_takes_it_as_it_is(server: Server, model: str) -> None:
    from openai import BadRequestError, NotFoundError, OpenAI

    client = OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    expected = Encoder(model, OPTIONS).encode(["bafa", "gola"])
    found = client.embeddings.create(model="default", input=["bafa", "gola"])  # asks for base64, and reads it itself
    np.testing.assert_allclose([row.embedding for row in found.data], expected, atol=1e-5)
    assert found.usage.total_tokens > 2
    found = client.embeddings.create(model="default", input="gola", encoding_format="float")
    np.testing.assert_allclose(found.data[0].embedding, expected[1], atol=1e-5)
    with pytest.raises(BadRequestError, match="dimensions: found 7, expected "):
        client.embeddings.create(model="default", input="bafa", dimensions=7)
    assert [model.id for model in client.models.list()] == ["default"]
    assert client.models.retrieve("default").object == "model"
    with pytest.raises(NotFoundError, match="no task 'law'; the tasks are default"):
        client.models.retrieve("law")
    with pytest.raises(NotFoundError, match="no task 'law'; the tasks are default"):
        client.embeddings.create(model="law", input="bafa")


def test_langchains_embeddings_take_it_as_it_is(server: Server, model: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model="default", base_url=f"{server.address}/v1", api_key="none", check_embedding_ctx_length=False
    )  # type: ignore[call-arg]
    expected = Encoder(model, OPTIONS).encode(["bafa", "gola"])
    np.testing.assert_allclose(embeddings.embed_documents(["bafa", "gola"]), expected, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query("bafa"), expected[0], atol=1e-5)


def test_the_retriever_of_the_docs_works(server: Server) -> None:
    [code] = re.findall(
        r"```python\n(from langchain_core.*?)```", (REPOSITORY / "docs/serving.md").read_text(), re.DOTALL
    )
    assert len(code.strip().splitlines()) <= 20
    space: dict = {}
    exec(code, space)
    found = space["RiptideRetriever"](url=server.address, mode="dense", k=3).invoke("bafa")
    expected = Client(server.address).search("bafa", k=3)
    assert [document.id for document in found] == [hit.id for hit in expected]
    assert [document.page_content for document in found] == [hit.text for hit in expected]
    assert found[0].metadata["score"] == expected[0].score


def test_a_fuzzer_finds_no_500_and_nothing_that_the_schema_does_not_say(server: Server, tmp_path: Path) -> None:
    """schemathesis over the OpenAPI document: examples, and cases that it makes up, right and wrong ones."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    program = Path(sys.executable).with_name("schemathesis")
    command = [
        str(program),
        "run",
        f"{server.address}/openapi.json",
        "--checks",
        checks,
        "--max-examples",
        "25",
        "--seed",
        "1",
        "--phases",
        "examples,coverage,fuzzing",
        "--exclude-path-regex",
        "release",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]


def wrong(random: Random) -> tuple[str, bytes]:
    """A path, and a body that is no request there."""
    good: dict[str, dict[str, Any]] = {
        "/v1/search": {"query": "bafa", "k": 3, "mode": "dense", "timeout_ms": 1000},
        "/v1/embeddings": {"model": "default", "input": ["bafa"], "encoding_format": "float"},
        "/v1/rerank": {"query": "bafa", "documents": ["gola"]},
    }
    path = random.choice(list(good))
    text = json.dumps(good[path]).encode()
    kind = random.randrange(5)
    if kind == 0:
        return path, random.randbytes(random.randrange(200))
    if kind == 1:
        return path, text[: random.randrange(len(text))]
    if kind == 2:  # a character that stands in no JSON
        at = random.randrange(len(text))
        return path, text[:at] + b"\x01" + text[at:]
    name = random.choice(list(good[path]))
    values = [None, [], {}, -1, 1e400, True, "", [[["a"]]], "\ud800", {"$ne": 1}, 10**30, ["a"] * 5_000]
    value = random.choice([v for v in values if type(v) is not type(good[path][name])])
    if kind == 3:
        return path, json.dumps({**good[path], name: value}).encode()
    return path, (b"[" * 100_000 if random.random() < 0.1 else json.dumps([good[path]]).encode())


def test_half_open_heads_and_idle_connections_keep_nobody_out(served: Path, tmp_path: Path) -> None:
    """Clients from before the attack are answered throughout, /healthz on new connections too; memory stays."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    with started("--store", root / "store", "--port", 0, "--max-connections", 16) as (process, address):
        server = Server(address, root, process.pid)
        bodies = [json.dumps({"query": text, "k": 3}).encode() for text in query_texts(root).values()]
        attackers: list[socket.socket] = []
        with Load(server, bodies, clients=2) as load:
            load.wait_for(20)
            before = psutil.Process(process.pid).memory_info().rss
            for number in range(60):
                attackers.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=60))
                if number % 2:
                    attackers[-1].sendall(b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
            over = connect(server)
            assert asked(over, "GET", "/healthz", b"", "text/plain")[0] == 200
            with contextlib.suppress(OSError):  # the server closes it on the way
                attackers[0].sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (32 << 20))
            load.wait_for(100)
            assert psutil.Process(process.pid).memory_info().rss < before + (64 << 20)
            while asked(connect(server), "GET", "/v1/info", b"", "text/plain")[0] != 200:
                pass  # the first attackers have not waited for two seconds yet
        assert load.faults == []
        assert {status for status, _ in load.answers} == {200}
        for attacker in attackers:
            attacker.close()


@pytest.mark.chaos  # for `make test-system`; `make test-all` has the long form
def test_malformed_requests_are_refused_and_cost_nothing(server: Server) -> None:
    """Ten thousand in the long form."""
    random, counts = Random(7), Counter[int]()
    connection = connect(server)
    for _ in range(9_000 if LONG else 600):
        path, body = wrong(random)
        status, content = asked(connection, "POST", path, body, "application/json")
        counts[status] += 1
        assert status in (400, 404, 413, 422), (path, body[:200], content)
        assert json.loads(content)["error"]["message"]
    assert counts[422] > 100
    assert len(Client(server.address).search("bafa", k=3)) == 3


@pytest.mark.chaos  # for `make test-system`; `make test-all` has the long form
def test_broken_prompt_files_are_refused_and_nothing_is_kept(server: Server, model: str, tmp_path: Path) -> None:
    random, client = Random(8), Client(server.address)
    task_files(tmp_path / "prompt", model, 1)
    good = {name: (tmp_path / "prompt" / name).read_bytes() for name in (WEIGHTS, SETTINGS)}
    header = 8 + int.from_bytes(good[WEIGHTS][:8], "little")
    before, kept = client.tasks(), set(Store(str(server.root / "store")).keys())
    for number in range(1_000 if LONG else 60):
        name = (WEIGHTS, SETTINGS)[number % 2]
        data = bytearray(good[name])
        how = random.randrange(3)
        if how == 0:
            data = data[: random.randrange(len(data))]
        elif how == 1:
            data = bytearray(random.randbytes(random.randrange(2_000)))
        else:  # what no header and no JSON holds
            data[random.randrange(header if name == WEIGHTS else len(data))] = 0xFF
        (tmp_path / "prompt" / name).write_bytes(data)
        with pytest.raises(ServerError) as raised:
            client.put_task("broken", tmp_path / "prompt")
        assert raised.value.status in (400, 422), raised.value
        (tmp_path / "prompt" / name).write_bytes(good[name])
    assert client.tasks() == before
    assert set(Store(str(server.root / "store")).keys()) == kept


@pytest.mark.parametrize("changed", ["prompt", "backbone", "corpus"])
def test_releases_change_under_load_and_no_request_fails_or_mixes_them(
    server: Server, model: str, tmp_path: Path, call_job: Callable[..., int], changed: str
) -> None:
    """Ten times to and fro between two releases; every answer is that of the release it names."""
    client, texts = Client(server.address), list(query_texts(server.root).values())[:8]
    store, at = Store(str(server.root / "store")), ("--store", server.root / "store")
    body: dict[str, Any] = {"k": 20, "mode": "exact"}
    releases = [client.info()["release"]]
    if changed == "prompt":
        body["task"] = "ours"
        releases = []
        for seed in (1, 2):
            task_files(tmp_path / str(seed), model, seed, length=3 + seed)
            client.put_task("ours", tmp_path / str(seed))
            releases.append(client.info()["release"])
    elif changed == "backbone":
        other = save_tiny_bert(tmp_path / "wide", hidden=48, seed=7)
        assert call_job("encode_corpus", *at, "--encoder", other, "--name", "wide", "--dtype", "float32") == 0
        releases.append(saved(store, plan_release(store, embeddings="wide")[0]))
    else:
        best = {hits[0].id for hits in client.search_all(texts, **body)}
        (tmp_path / "gone").write_text("".join(f"{id}\n" for id in best))
        assert call_job("import_corpus", *at, "--delete", tmp_path / "gone") == 0
        encoder = ("--encoder", model, "--name", "enc", "--dtype", "float32", "--compile", "never")
        assert call_job("encode_corpus", *at, *encoder) == 0
        index = ("--name", "idx", "--factory", "IVF4,PQ8x4fs", "--shards", 3)
        assert call_job("build_index", *at, "--embeddings", "enc", *index) == 0
        assert call_job("build_bm25", *at) == 0
        releases.append(client.switch(None))
    expected: dict[str, dict[str, list[str]]] = {}
    for release in releases:
        client.switch(release)
        found = client.search_all(texts, **body)
        expected[release] = {text: [hit.id for hit in hits] for text, hits in zip(texts, found, strict=True)}
    one, other = releases
    assert all(expected[one][text] != expected[other][text] for text in texts)
    bodies = [json.dumps({"query": text, **body}).encode() for text in texts]
    with Load(server, bodies, clients=6) as load:
        for number in range(10):
            load.wait_for(20)
            assert client.switch(releases[number % 2]) == releases[number % 2]
        load.wait_for(20)
    assert load.faults == []
    assert {answer.get("release") for _, answer in load.answers} == set(releases)
    for status, answer in load.answers:
        assert status == 200, answer
        [result] = answer["results"]
        assert [hit["id"] for hit in result["hits"]] == expected[answer["release"]][result["query"]]
    client.switch(releases[0])
    if changed == "prompt":
        client.drop_task("ours")


def saved(store: Store, release: Release) -> str:
    release.save(store)
    return release.id


@pytest.mark.chaos  # for `make test-system`; `make test-all` has the long form
def test_more_than_it_can_take_is_refused_and_memory_stays(served: Path, tmp_path: Path) -> None:
    """Five times as many askers as places: 200, 429 with Retry-After, or 503, and nothing else."""
    root = Path(shutil.copytree(served, tmp_path / "root"))
    with started("--store", root / "store", "--port", 0, "--queue", 4, "--batch", 4) as (process, address):
        server = Server(address, root, process.pid)
        texts = list(query_texts(root).values())
        bodies = [json.dumps({"query": text, "k": 10, "timeout_ms": 2_000}).encode() for text in texts]
        with Load(server, bodies, clients=40) as load:
            load.wait_for(400)
            before = psutil.Process(process.pid).memory_info().rss
            load.wait_for(6_000 if LONG else 1_500)
        assert load.faults == []
        counts = Counter(status for status, _ in load.answers)
        assert set(counts) <= {200, 429, 503}
        assert counts[200] > 0
        assert counts[429] > 0
        assert psutil.Process(process.pid).memory_info().rss < before + (64 << 20)
        assert len(Client(address).search(texts[0], k=3)) == 3
