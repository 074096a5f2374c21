"""Tasks whose prompts are computed from each query: searched by jobs, served beside fixed prompts, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from ready_client import serving
from serving import OPTIONS, SHAPE, K, Load, Server, computed_prompt, query_texts, started, task_files, upload

from riptide.base.errors import InputError
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.task_prompt import TaskPrompt
from riptide.serve.one_process import open_local
from riptide.serve.parts.query_states import EmbedTextsRequest, PendingQuery
from riptide.serve.release.live import live_release_id
from riptide.serve.release.release_tasks import search_of_mode
from riptide.serve.service.prompt_uploads import MAX_KEPT, check_synthesis
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
WORDLESS = "漢字 ???"
NO_WORDS = (
    "has no word that the backbone knows, from which its prompt could be computed: use words of the backbone's language"
)


@pytest.fixture
def root(served: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path / "root"))


@pytest.fixture
def store(root: Path) -> Store:
    return Store(str(root / "store"))


def put(client: Any, task: str, files: dict[str, Any]) -> dict[str, Any]:
    answer = client.put(f"/v1/tasks/{task}", files=files)
    assert answer.status_code == 200, answer.text
    return answer.json()


def hits_of(client: Any, task: str, texts: list[str], mode: str = "exact") -> list[list[tuple[str, float]]]:
    answer = client.post("/v1/search", json={"queries": texts, "task": task, "mode": mode, "k": K})
    assert answer.status_code == 200, answer.text
    return [[(hit["id"], hit["score"]) for hit in result["hits"]] for result in answer.json()["results"]]


def assert_close(actual: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [id for id, _ in actual] == [id for id, _ in expected]
    np.testing.assert_allclose([score for _, score in actual], [score for _, score in expected], rtol=1e-4)


def test_a_mixed_batch_has_the_hits_of_single_task_calls_and_of_the_search_job(
    root: Path, store: Store, service: Service, client: TestClient, model: str, tmp_path: Path, done: Done
) -> None:
    texts = list(query_texts(root).values())[:6]
    prompt = computed_prompt(model, 2, mix="after", length=9)
    uploads = {
        "before": upload(tmp_path / "before", computed_prompt(model, 1)),
        "after": upload(tmp_path / "after", prompt),
        "fixed": task_files(tmp_path / "fixed", model, 3, 6),
    }
    lengths = {name: put(client, name, files)["length"] for name, files in uploads.items()}
    assert lengths == {"before": {"query": 4}, "after": {"query": 9}, "fixed": {"query": 6}}
    alone = {name: hits_of(client, name, texts) for name in (*uploads, "default")}
    assert len({json.dumps(hits) for hits in alone.values()}) == 4
    live = service.live
    assert live is not None
    batch = [(name, number) for number in range(len(texts)) for name in alone]
    queries = [
        PendingQuery(live.release, texts[number], live.tasks[name], K, search_of_mode(live.tasks[name], "exact"), 4e9)
        for name, number in batch
    ]
    for (name, number), answer in zip(batch, service.engine.search(queries), strict=True):
        assert answer.error is None
        assert_close([(hit.id, hit.score) for hit in answer.hits], alone[name][number])
    vectors = Encoder(model, OPTIONS, tasks={"t": prompt}).encode(texts, task="t")
    served = client.post("/v1/embeddings", json={"model": "after", "input": texts}).json()["data"]
    np.testing.assert_allclose([row["embedding"] for row in served], vectors, atol=1e-5)
    stored = next(name for name in store.names("prompts") if name.startswith("after."))
    done("search", "--store", store.url, "--source", "exact:enc", "--task", stored, "--k", K, "--name", "own")
    by_query = dict(zip(texts, alone["after"], strict=True))
    rows = [row for table in read_run(store.open("runs", "own")) for row in table.to_pylist()]
    ids = {id: text for id, text in query_texts(root).items() if text in by_query}
    for id, text in ids.items():
        assert_close([(row["id"], row["score"]) for row in rows if row["query_id"] == id], by_query[text])
    assert '"mix": "after"' in done("store", "show", f"prompts/{stored}", "--store", store.url)


def test_a_query_without_a_known_word_fails_alone(
    root: Path,
    store: Store,
    service: Service,
    client: TestClient,
    model: str,
    tmp_path: Path,
    refused: Done,
    documented: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probes of checks work although the backbone knows none of their words."""
    monkeypatch.setattr("riptide.serve.parts.service_models.PROBE", WORDLESS)
    fine = next(iter(query_texts(root).values()))
    put(client, "task", upload(tmp_path / "task", computed_prompt(model, 1)))
    expected = hits_of(client, "task", [fine])[0]
    answer = client.post("/v1/search", json={"queries": [fine, WORDLESS], "task": "task"})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (400, f"task task: the text {NO_WORDS}")
    documented("HTTP", "a search in a task of computed prompts without a word that the backbone knows", message, 400)
    assert client.post("/v1/search", json={"query": WORDLESS, "task": "task", "mode": "bm25"}).status_code == 200
    assert hits_of(client, "default", [WORDLESS])[0]
    live = service.live
    assert live is not None
    task = live.tasks["task"]
    searches = [
        PendingQuery(live.release, text, task, K, search_of_mode(task, "exact"), 4e9) for text in (fine, WORDLESS, fine)
    ]
    answers = service.engine.search(searches)
    assert [answer.error is None for answer in answers] == [True, False, True]
    for answer in (answers[0], answers[2]):
        assert_close([(hit.id, hit.score) for hit in answer.hits], expected)
    answer = client.post("/v1/embeddings", json={"model": "task", "input": [fine, WORDLESS]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"task task: text 1 {NO_WORDS}")
    requests = [EmbedTextsRequest(live.release, [text] * 40, "task", "query", 4e9) for text in (fine, WORDLESS, fine)]
    outcomes = service.engine.embed(requests)  # in two calls of the encoder
    assert [isinstance(outcome, InputError) for outcome in outcomes] == [False, True, False]
    assert str(outcomes[1]) == f"task task: text 0 {NO_WORDS}"
    service.check_parts(live.release)
    assert client.get("/readyz").json()["ready"]
    [stored] = store.names("prompts")
    line = refused("search", "--store", store.url, "--source", "exact:enc", "--task", stored, "--query", WORDLESS)
    assert NO_WORDS in line
    documented("Searching", "a query without a word that the backbone knows, in a task of computed prompts", line, 1)


@pytest.mark.slow
def test_a_task_is_swapped_under_load_and_is_served_again_after_a_kill(
    root: Path, store: Store, model: str, tmp_path: Path
) -> None:
    texts = list(query_texts(root).values())[:2]
    first, second = (upload(tmp_path / str(seed), computed_prompt(model, seed, mix="after")) for seed in (1, 2))
    with started("--store", store.url, "--port", 0) as (process, address):
        with httpx.Client(base_url=address, timeout=120) as client:
            put(client, "task", first)
            put(client, "fixed", task_files(tmp_path / "fixed", model, 3))
            before, fixed = hits_of(client, "task", texts), hits_of(client, "fixed", texts)
            bodies = [
                json.dumps({"queries": texts, "task": task, "mode": "exact", "k": K}).encode()
                for task in ("task", "fixed")
            ]
            with Load(Server(address, root, process.pid), bodies, clients=3) as load:
                load.wait_for(6)
                put(client, "task", second)
                load.wait_for(12)
            after = hits_of(client, "task", texts)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not load.faults
    ids = {
        name: [[id for id, _ in hits] for hits in all_hits]
        for name, all_hits in {"first": before, "second": after, "fixed": fixed}.items()
    }
    seen = set()
    for status, answer in load.answers:
        assert status == 200, answer
        actual = [[hit["id"] for hit in result["hits"]] for result in answer["results"]]
        seen.add(next(name for name, expected in ids.items() if expected == actual))
    assert seen == {"first", "second", "fixed"}
    assert [finding.problem for finding in verify(store) if finding.problem] == []
    with serving(open_local(store, ServiceOptions(threads=2), device="cpu")) as client:
        for actual, expected in zip(hits_of(client, "task", texts), after, strict=True):
            assert_close(actual, expected)


def spoiled(prompt: TaskPrompt, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> TaskPrompt:
    assert prompt.synthesis is not None
    tensors = {**prompt.synthesis.tensors, name: edit(prompt.synthesis.tensors[name])}
    return replace(prompt, synthesis=SavedSynthesis(prompt.synthesis.options, tensors))


UPLOADS: dict[str, tuple[Callable[[str], TaskPrompt], str]] = {
    "basic prompts of another number than the settings say": (
        lambda model: spoiled(computed_prompt(model, 1), "basic", lambda basic: basic[:2].clone()),
        "synthesis.basic is torch.float32 (2, 4, 32), expected float32 (3, 4, 32)",
    ),
    "a synthesiser with numbers that are not finite": (
        lambda model: spoiled(computed_prompt(model, 1), "down.weight", lambda down: down * float("inf")),
        "synthesis.down.weight holds numbers that are not finite",
    ),
    "a synthesiser over word embeddings of another width": (
        lambda model: computed_prompt(model, 1, width=64),
        "word embeddings of 64 numbers, expected 32 as the backbone's have",
    ),
    "a synthesiser for a backbone of another number of layers": (
        lambda model: computed_prompt(model, 1, PromptShape(3, SHAPE.heads, SHAPE.head_dim)),
        "has 192 numbers per token, expected those of a backbone of 2 layers",
    ),
    "a synthesiser of too many basic prompts": (
        lambda model: computed_prompt(model, 1, prompts=1025),
        "synthesis.prompts: 1,025, expected up to 1,024",
    ),
    "a synthesiser whose vectors overflow": (
        lambda model: spoiled(computed_prompt(model, 1), "up.weight", lambda up: up * 0 + 3e38),
        "is not finite",
    ),
}


def test_uploads_that_do_not_fit_are_refused_and_nothing_changes(
    store: Store, client: TestClient, model: str, tmp_path: Path, documented: Callable[..., None]
) -> None:
    before = live_release_id(store)
    for number, (case, (make, expected)) in enumerate(UPLOADS.items()):
        answer = client.put("/v1/tasks/bad", files=upload(tmp_path / str(number), make(model)))
        message = answer.json()["error"]["message"]
        assert (answer.status_code, expected in message) == (400, True), message
        assert str(tmp_path) not in answer.text
        if "vector of text" not in message:  # which names the CPU
            documented("HTTP", f"an upload of {case}", message, 400)
    files = upload(tmp_path / "unknown", computed_prompt(model, 1))
    settings = json.loads(files["settings"][1])
    settings["synthesis"]["other"] = 1
    answer = client.put("/v1/tasks/bad", files={**files, "settings": ("prompt.json", json.dumps(settings).encode())})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    documented("HTTP", "an upload of a synthesiser with an unknown setting", message, 400)
    assert live_release_id(store) == before


def test_sizes_whose_products_exceed_memory_are_refused() -> None:
    """A file of 260 MiB, of which a service would keep 2 GiB."""
    options = SynthesisOptions(prompts=1024, length=64, hidden=1, bottleneck=1, mix="after")
    shapes = {"basic": (1024, 64, 8), "up.weight": (8192, 1)}
    huge = SavedSynthesis(options, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    with pytest.raises(InputError, match=rf"536,879,\d+ numbers are kept, expected up to {MAX_KEPT:,}"):
        check_synthesis("task", huge)


def test_peft_cannot_have_a_prompt_that_is_computed(
    store: Store, model: str, tmp_path: Path, refused: Done, done: Done, documented: Callable[..., None]
) -> None:
    prompt = computed_prompt(model, 1)
    upload(tmp_path / "made", prompt)
    with store.create("prompts", "computed", config={}, inputs={}) as draft:
        draft.add_notes(backbone=model, options=asdict(prompt.options))
        commit_files(draft, tmp_path / "made")
    line = refused("convert_prompts", "--store", store.url, "--task", "computed", "--to", tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    documented("Converting prompts", "convert_prompts: a computed prompt, for PEFT", line, 1)
    done("store", "export", "prompts/computed", "--to", tmp_path / "copy", "--store", store.url)
    assert (tmp_path / "copy/prompt.json").read_bytes() == (tmp_path / "made/prompt.json").read_bytes()
