"""Tasks with prompts of topics: served beside fixed and computed prompts, put over HTTP, and refused."""

from __future__ import annotations

import itertools
import shutil
import threading
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ready_client import serving
from samples import WORDS
from serving import OPTIONS, K, computed_prompt, query_texts, task_files, upload
from stored_topics import model_of_words, store_topic_task
from topic_prompts import random_saved_topics

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, describe
from riptide.retriever.forward import batching
from riptide.retriever.options import Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.serve.one_process import open_local
from riptide.serve.parts.query_states import PendingQuery
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release_tasks import search_of_mode
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import ExpiredError

MODEL = model_of_words(WORDS[::2], 3)  # the other words are unknown
WORDLESS = f"{WORDS[1]} {WORDS[3]}"
WAITING_S = 30
EXACT = ("--dtype", "float32", "--compile", "never")


@dataclass(frozen=True)
class Topical:
    """A served root with two tasks of its store, whose passages are encoded by their topics.

    Attributes:
        root: The root.
        prompt: The prompts of the task `topical`.
        guessing: The same of the task `guessing`, in which a query without a known word has the most probable topic.
    """

    root: Path
    prompt: TaskPrompt
    guessing: TaskPrompt


@pytest.fixture(scope="module")
def topical(
    served: Path, model: str, tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]
) -> Topical:
    root = Path(shutil.copytree(served, tmp_path_factory.mktemp("topical") / "root"))
    store = Store(str(root / "store"))
    prompt = store_topic_task(store, model, "topical", MODEL, OPTIONS)
    guessing = store_topic_task(store, model, "guessing", MODEL, OPTIONS, wordless="prior")
    for task in ("topical", "guessing"):
        assert call_job("encode_corpus", "--store", store.url, "--task", task, *EXACT) == 0
    live = live_release_id(store)
    release, left = plan_release(store, index="idx")
    assert not left
    assert save_as_live(store, release, live and live[1])
    return Topical(root, prompt, guessing)


@pytest.fixture
def prompt(topical: Topical) -> TaskPrompt:
    return topical.prompt


@pytest.fixture
def root(topical: Topical, tmp_path: Path) -> Path:
    return Path(shutil.copytree(topical.root, tmp_path / "root"))


@pytest.fixture
def local(root: Path) -> Service:
    return open_local(Store(str(root / "store")), ServiceOptions(threads=2), device="cpu")


def vectors_of(prompt: TaskPrompt, model: str, texts: list[str], side: Side = "query") -> np.ndarray:
    """Returns the vectors of texts by the encoder alone, float32 [texts, dim]."""
    encoder = Encoder(model, OPTIONS, tasks={"task": prompt})
    return encoder.encode(texts, side=side, task="task")


def assert_are_the_best(hits: list[list[tuple[str, float]]], root: Path, task: str, vectors: np.ndarray) -> None:
    """Asserts that hits are the best passages of a store by the products of vectors, float32 [queries, dim]."""
    store = Store(str(root / "store"))
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, task, corpus)
    rows = np.setdiff1d(np.arange(corpus.num_rows), corpus.deleted)
    scores = vectors @ embeddings.take(rows).astype(np.float32).T
    ids = corpus.ids(rows).tolist()
    for own, of_query in zip(hits, scores, strict=True):
        assert len(own) == K
        best = np.sort(of_query)[::-1][:K]
        np.testing.assert_allclose([score for _, score in own], best, rtol=1e-3)
        np.testing.assert_allclose([of_query[ids.index(id)] for id, _ in own], best, rtol=1e-3)


def known_texts(root: Path) -> list[str]:
    texts = [text for text in query_texts(root).values() if MODEL.infer([text])[0] >= 0]
    assert len({*MODEL.infer(texts[:6])}) == 3
    return texts[:6]


def hits_of(client: Any, task: str, texts: list[str]) -> list[list[tuple[str, float]]]:
    answer = client.post("/v1/search", json={"queries": texts, "task": task, "mode": "exact", "k": K})
    assert answer.status_code == 200, answer.text
    return [[(hit["id"], hit["score"]) for hit in result["hits"]] for result in answer.json()["results"]]


def live_tasks(local: Service) -> set[str]:
    assert local.live is not None
    return {*local.live.tasks}


def assert_close(actual: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [id for id, _ in actual] == [id for id, _ in expected]
    np.testing.assert_allclose([score for _, score in actual], [score for _, score in expected], rtol=1e-4)


def test_a_mixed_batch_has_the_hits_of_single_task_calls(
    root: Path, local: Service, model: str, prompt: TaskPrompt, tmp_path: Path
) -> None:
    texts = known_texts(root)
    with serving(local) as client:
        uploads = {
            "computed": upload(tmp_path / "computed", computed_prompt(model, 1)),
            "fixed": task_files(tmp_path / "fixed", model, 3, 6),
        }
        for name, files in uploads.items():
            assert client.put(f"/v1/tasks/{name}", files=files).status_code == 200
        again = upload(tmp_path / "again", prompt)
        answer = client.put("/v1/tasks/again", files=again, data={"index": "topical"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["length"] == {"query": 5, "passage": 5}
        names = ("topical", "again", "computed", "fixed", "default")
        alone = {name: hits_of(client, name, texts) for name in names}
        for name, other_name in itertools.combinations(("topical", "computed", "fixed", "default"), 2):
            assert alone[name] != alone[other_name]
        for own, other in zip(alone["again"], alone["topical"], strict=True):
            assert_close(own, other)
        vectors = vectors_of(prompt, model, texts)
        assert_are_the_best(alone["topical"], root, "topical", vectors)
        rows = client.post("/v1/embeddings", json={"model": "topical", "input": texts}).json()["data"]
        np.testing.assert_allclose([row["embedding"] for row in rows], vectors, atol=1e-5)
        live = local.live
        assert live is not None
        batch = [(name, number) for number in range(len(texts)) for name in alone]
        queries = [
            PendingQuery(
                live.release, texts[number], live.tasks[name], K, search_of_mode(live.tasks[name], "exact"), 4e9
            )
            for name, number in batch
        ]
        for (name, number), answered in zip(batch, local.engine.search(queries), strict=True):
            assert answered.error is None
            assert_close([(hit.id, hit.score) for hit in answered.hits], alone[name][number])


def test_a_query_without_a_known_word_fails_alone(
    root: Path, local: Service, model: str, topical: Topical, documented: Callable[..., None]
) -> None:
    fine, other = known_texts(root)[:2]
    with serving(local) as client:
        expected = hits_of(client, "topical", [fine, other])
        assert expected[0] != expected[1]
        answer = client.post("/v1/search", json={"queries": [fine, WORDLESS], "task": "topical", "mode": "exact"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        documented("HTTP", "a search in a task with prompts of topics without a word that they know", message, 400)
        assert hits_of(client, "default", [WORDLESS])[0]
        live = local.live
        assert live is not None
        task = live.tasks["topical"]
        search = search_of_mode(task, "exact")
        queries = [PendingQuery(live.release, text, task, K, search, 4e9) for text in (fine, WORDLESS, other)]
        answers = local.engine.search(queries)
        assert [answered.error is None for answered in answers] == [True, False, True]
        assert isinstance(answers[1].error, InputError)
        for answered, hits in zip((answers[0], answers[2]), expected, strict=True):
            assert_close([(hit.id, hit.score) for hit in answered.hits], hits)
        answer = client.post("/v1/embeddings", json={"model": "topical", "input": [fine, WORDLESS]})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("task topical: text 1 has no word that the topics of its")
        passages = {"model": "topical", "input": [WORDLESS], "input_type": "passage"}
        [row] = client.post("/v1/embeddings", json=passages).json()["data"]
        vectors = vectors_of(topical.prompt, model, [WORDLESS], "passage")
        np.testing.assert_allclose([row["embedding"]], vectors, atol=1e-5)
        guessed = hits_of(client, "guessing", [WORDLESS])
        assert_are_the_best(guessed, root, "guessing", vectors_of(topical.guessing, model, [WORDLESS]))
        local.check_parts(live.release)
        assert client.get("/readyz").json()["ready"]


def test_uploads_that_do_not_fit_are_refused(
    root: Path, local: Service, model: str, prompt: TaskPrompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, files: dict[str, Any], data: dict[str, str], expected: str) -> None:
        answer = client.put(f"/v1/tasks/{name}", files=files, data=data)
        assert (answer.status_code, expected in answer.json()["error"]["message"]) == (400, True), answer.text

    with serving(local) as client:
        given = upload(tmp_path / "given", prompt)
        refused("bad", given, {}, "its passages' vectors are not those of embeddings/enc (another prompt)")
        backbone = backbone_of(describe(model, OPTIONS))
        other = TaskPrompt(backbone, OPTIONS, None, None, topics=random_saved_topics(model=MODEL, seed=1))
        refused("bad", upload(tmp_path / "other", other), {"index": "topical"}, "(another prompt)")
        monkeypatch.setattr("riptide.serve.service.prompt_uploads.MAX_KEPT", 1000)
        refused("bad", given, {"index": "topical"}, "3 prompts of topics with 1,920 numbers, expected up to 1,000")
        assert "bad" not in live_tasks(local)


@pytest.fixture
def second_call() -> Iterator[tuple[threading.Event, threading.Event]]:
    """(begun, go_on): `begun` is set before the second piece of a request's text is normalised, which waits for
    `go_on`."""
    begun, go_on, calls = threading.Event(), threading.Event(), itertools.count(1)

    def watch(frame: Any, event: str, argument: Any) -> None:
        is_call = event == "c_call" and argument is unicodedata.normalize
        if is_call and threading.current_thread().name.startswith("batch") and next(calls) == 2:
            begun.set()
            go_on.wait(WAITING_S)

    threading.setprofile(watch)
    yield begun, go_on
    threading.setprofile(None)
    go_on.set()


def test_the_service_answers_while_the_topic_of_a_long_text_is_inferred(
    second_call: tuple[threading.Event, threading.Event], local: Service
) -> None:
    begun, go_on = second_call
    text = f"{WORDS[0]} " + "a\u0301\u0323" * 10_000
    answers: list[int] = []

    with serving(local) as client:

        def embed() -> None:
            answers.append(client.post("/v1/embeddings", json={"model": "topical", "input": text}).status_code)

        thread = threading.Thread(target=embed)
        thread.start()
        assert begun.wait(WAITING_S)
        assert client.get("/healthz").status_code == 200
        assert not answers
        go_on.set()
        thread.join()
        assert answers == [200]


class PassingDeadline(float):
    """A deadline that has passed when it is checked for the fourth time."""

    checks = 0

    def __lt__(self, now: float) -> bool:
        self.checks += 1
        return self.checks > 3


def test_the_deadline_is_checked_between_texts(local: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PIECE", 100)
    with serving(local):
        assert local.live is not None
        texts = [" ".join(WORDS[:20])] * 9
        encode, id = local.engine.encoder.encode, local.live.release.id
        with pytest.raises(ExpiredError):
            encode(id, texts, ["topical"] * len(texts), "query", PassingDeadline(4e9))
        tasks = ["topical", "default", "default"] * 3
        encoded = encode(id, texts, tasks, "query", 4e9)
        alone = [encode(id, [text], [task], "query").vectors[0] for text, task in zip(texts, tasks, strict=True)]
        np.testing.assert_allclose(encoded.vectors, alone, atol=1e-6)
