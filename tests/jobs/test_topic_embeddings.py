"""encode_corpus, search and their growth for a task with prompts of topics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import WORDS, make_passages, write_beir
from stored_topics import model_of_words, store_topic_task, store_topics

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions

Done = Callable[..., str]
OPTIONS = EncoderOptions(dtype="float32", compile="never")
EXACT = ("--dtype", "float32", "--compile", "never")
MODEL = model_of_words(WORDS[::2], 3)  # the other words are unknown


def texts_of(passages: list[dict]) -> list[str]:
    return [f"{passage['title']} {passage['text']}" if passage["title"] else passage["text"] for passage in passages]


def given_topics(count: int) -> np.ndarray:
    """Topics that inference would not give, some of them unknown."""
    topics = np.arange(count, dtype=np.int64) % 3
    topics[::50] = -1
    return topics


def expected_vectors(world: Any, task: Any, texts: list[str], topics: np.ndarray) -> np.ndarray:
    encoder = Encoder(world.model, OPTIONS, tasks={"t": task})
    tokens = encoder.tokenize(texts, side="passage")
    return encoder.forward(tokens, side="passage", task="t", topics=topics)


def test_passages_have_the_prompt_of_their_stored_topic(
    world: Any, done: Done, interrupt: Callable[..., Any], tmp_path: Path
) -> None:
    """A grown corpus: the topics of new passages are inferred, and earlier parts stay as they are."""
    store = Store(str(world.store))
    topics = given_topics(240)
    prompt = store_topic_task(store, world.model, "t", MODEL, OPTIONS, topics=store_topics(store, MODEL, topics))
    encode = ("encode_corpus", "--store", world.store, "--task", "t", *EXACT)
    interrupt(2, *encode)
    line = "topics   240 stored in topics/hand/g0000, 0 inferred from the texts of the passages"
    assert line in done(*encode, "--plan")
    assert line in done(*encode)
    embeddings = Embeddings.open(store, "t", Corpus.open(store))
    known = np.where(topics < 0, 2, topics)  # the most probable topic
    stored = embeddings.topics()
    assert stored is not None
    assert stored.tolist() == known.tolist()
    assert embeddings.generations[0].inputs["topics"]["artifact"] == "topics/hand/g0000"
    texts = texts_of(world.passages)
    expected = expected_vectors(world, prompt, texts, known)
    np.testing.assert_allclose(embeddings.take(np.arange(240)), expected, atol=2e-3)
    assert prompt.topics is not None
    inferred = prompt.topics.text_topics.topics_of(texts, "passage")
    assert (inferred != known).sum() > 50
    assert np.abs(expected - expected_vectors(world, prompt, texts, inferred)).max() > 0.01

    more = make_passages(30, seed=9, prefix="n")
    source = write_beir(tmp_path / "more", more)
    done("import_corpus", "--store", world.store, "--source", source, "--append")
    assert "topics   240 stored in topics/hand/g0000, 30 inferred" in done(*encode)
    grown = Embeddings.open(store, "t", Corpus.open(store))
    assert [made.fingerprint for made in grown.generations[:1]] == [embeddings.generations[0].fingerprint]
    assert "topics" not in grown.generations[1].inputs
    all_topics = grown.topics()
    assert all_topics is not None
    assert all_topics[:240].tolist() == known.tolist()
    assert all_topics[240:].tolist() == prompt.topics.text_topics.topics_of(texts_of(more), "passage").tolist()
    assert done("verify", "--store", world.store, "--encoders").count(": smallest similarity 0.9999") == 3


def test_topics_are_inferred_without_stored_ones_and_queries_have_their_own(world: Any, done: Done) -> None:
    store = Store(str(world.store))
    prompt = store_topic_task(store, world.model, "t", MODEL, OPTIONS, wordless="prior")
    output = done("encode_corpus", "--store", world.store, "--task", "t", *EXACT)
    assert "topics   0 stored, 240 inferred from the texts of the passages" in output
    embeddings = Embeddings.open(store, "t", Corpus.open(store))
    assert prompt.topics is not None
    topics = embeddings.topics()
    assert topics is not None
    assert topics.tolist() == prompt.topics.text_topics.topics_of(texts_of(world.passages), "passage").tolist()
    assert Embeddings.open(store, "enc", Corpus.open(store)).topics() is None
    search = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "t", "--k", 5)
    done(*search, "--name", "run")
    encoder = Encoder(world.model, OPTIONS, tasks={"t": prompt})
    queries = [query["text"] for query in world.queries]
    scores = encoder.encode(queries, task="t") @ embeddings.take(np.arange(240)).astype(np.float32).T
    table = next(read_run(store.open("runs", "run")))
    best: dict[str, float] = {}
    for query, score in zip(table["query_id"].to_pylist(), table["score"].to_pylist(), strict=True):
        best[query] = max(score, best.get(query, score))
    assert len(best) >= 30
    for query, row in zip(world.queries, scores, strict=True):
        if query["_id"] in best:
            assert best[query["_id"]] == pytest.approx(float(row.max()), abs=2e-3)


def test_a_query_without_a_known_word_is_refused(
    world: Any, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    store = Store(str(world.store))
    store_topic_task(store, world.model, "t", MODEL, OPTIONS)
    done("encode_corpus", "--store", world.store, "--task", "t", "--limit", 60, *EXACT)
    search = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "t", "--k", 5)
    done(*search, "--query", WORDS[0])
    line = refused(*search, "--query", WORDS[1])
    documented("Searching", "search with prompts of topics and a query without a known word", line, 1)
