"""Prompts of topics in an encoder: mixed with fixed and computed ones, dense and sparse, and refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from synthesisers import random_synthesis
from tiny import add_masked_head
from topic_prompts import SHAPE, random_saved_topics

from riptide.base.errors import InputError, TextsError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.options import Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of

Tiny = Callable[..., Path]
FLOAT32 = EncoderOptions(dtype="float32", compile="never")
TEXTS = ["river water of the bank", "money", "a fast river", "the answer : query", "bank money slow", "passage query"]
TOPICS = [0, 1, 0, 2, 1, 2]


def of_topics(encoder: Encoder, length: int = 5, **changes: int) -> TaskPrompt:
    saved = random_saved_topics(length, **changes)
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, topics=saved)


def fixed(encoder: Encoder, length: int) -> TaskPrompt:
    matrix = torch.randn(
        SHAPE.layers, 2, SHAPE.heads, length, SHAPE.head_dim, generator=torch.Generator().manual_seed(1)
    )
    return TaskPrompt(backbone_of(encoder.config), encoder.options, matrix, matrix)


def computed(encoder: Encoder) -> TaskPrompt:
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, synthesis=random_synthesis())


@pytest.fixture
def encoder(tiny: Tiny) -> Encoder:
    return Encoder(str(tiny("bert")), FLOAT32, tasks={})


@pytest.mark.parametrize("side", ["query", "passage"])
def test_a_text_has_the_prompt_of_its_topic(encoder: Encoder, side: Side) -> None:
    """Against the backbone called with one text and one prompt."""
    prompt = of_topics(encoder)
    encoder.put_task("topics", prompt)
    assert prompt.topics is not None
    topics = encoder.topics_of(TEXTS, side=side, task="topics")
    assert topics is not None
    assert topics.tolist() == TOPICS
    vectors = encoder.encode(TEXTS, side=side, task="topics")
    for text, topic, vector in zip(TEXTS, TOPICS, vectors, strict=True):
        tokens = encoder.tokenize([text], side=side)
        ids = torch.from_numpy(tokens.ids.astype(np.int64))[None]
        rows = PromptRows(prompt.topics.prompts[topic][:, :, None])
        with torch.no_grad():
            expected = encoder._head(encoder._eager(ids, torch.tensor([ids.shape[1]]), rows))
        np.testing.assert_allclose(vector, expected[0].numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "t5"])  # packed and padded
@pytest.mark.parametrize("with_computed", [False, True])
def test_a_mixed_batch_equals_texts_on_their_own(tiny: Tiny, kind: str, with_computed: bool) -> None:
    encoder = Encoder(str(tiny(kind)), FLOAT32, tasks={})
    for name, prompt in (
        ("topics", of_topics(encoder)),
        ("others", of_topics(encoder, 9, seed=1)),
        ("fixed", fixed(encoder, 3)),
        ("computed", computed(encoder)),
    ):
        encoder.put_task(name, prompt)
    names = ["topics", "fixed", None, "others", *(["computed"] if with_computed else [])]
    texts = TEXTS * 5
    tasks = [names[row % len(names)] for row in range(len(texts))]
    mixed = encoder.encode(texts, task=tasks)
    for name in names:
        rows = [row for row, task in enumerate(tasks) if task == name]
        single = encoder.encode([texts[row] for row in rows], task=name)
        np.testing.assert_allclose(mixed[rows], single, atol=1e-5, rtol=1e-5)
    encoder.drop_task("others")
    np.testing.assert_allclose(encoder.encode(texts[:1], task="topics"), mixed[:1], atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="no such task"):
        encoder.encode(texts, task="others")


def test_given_topics_replace_inferred_ones(encoder: Encoder) -> None:
    encoder.put_task("topics", of_topics(encoder))
    tokens = encoder.tokenize(TEXTS, side="passage")
    vectors = encoder.forward(tokens, side="passage", task="topics", topics=np.array(TOPICS))
    np.testing.assert_array_equal(vectors, encoder.encode(TEXTS, side="passage", task="topics"))
    others = encoder.forward(tokens, side="passage", task="topics", topics=np.array([0, 1, 0, 2, 1, 0]))
    assert (vectors[:5] == others[:5]).all()
    assert np.abs(vectors[5] - others[5]).max() > 1e-3


def test_prompts_of_other_topics_give_other_vectors(encoder: Encoder) -> None:
    prompt = of_topics(encoder)
    assert prompt.topics is not None
    encoder.put_task("topics", prompt)
    others = replace(prompt.topics, prompts=prompt.topics.prompts.roll(1, 0))
    encoder.put_task("others", replace(prompt, topics=others))
    vectors = [encoder.encode(TEXTS, task=task) for task in ("topics", "others")]
    assert (np.abs(vectors[0] - vectors[1]).max(1) > 1e-3).all()


def test_a_query_without_a_known_word_is_refused_alone(encoder: Encoder) -> None:
    encoder.put_task("topics", of_topics(encoder))
    encoder.put_task("computed", computed(encoder))
    queries, tasks = ["the river", "beta", "", "gamma"], ["topics", "topics", "computed", "computed"]
    with pytest.raises(
        TextsError, match=r"^text 1 of 4 has no word that the topics of its task know, by which"
    ) as error:
        encoder.encode(queries, task=tasks)
    reasons = {text: reason[:44] for text, reason in error.value.reasons.items()}
    assert reasons == {
        1: "the text has no word that the topics of its ",
        2: "the text has no word that the backbone knows",
    }
    topics = encoder.topics_of(queries, task=tasks)
    tokens = encoder.tokenize(queries, side="query")
    assert [*encoder.unusable_texts(tokens, task=tasks, topics=topics)] == [1, 2]
    vectors = encoder.forward(tokens, task=tasks, topics=topics, check=False)
    assert np.isfinite(vectors).all(axis=1).tolist() == [True, False, False, True]
    passages = encoder.encode(["beta", ""], side="passage", task="topics")  # have the most probable topic
    known = encoder.forward(
        encoder.tokenize(["beta", ""], side="passage"), side="passage", task="topics", topics=np.array([2, 2])
    )
    np.testing.assert_array_equal(passages, known)


@pytest.mark.parametrize("bad", [None, 3, b"river", "\ud800"])
def test_a_text_that_is_no_string_is_named(tiny: Tiny, encoder: Encoder, bad: object) -> None:
    encoder.put_task("topics", of_topics(encoder))
    with pytest.raises(InputError, match=r"^text 1 of 2 is no valid string"):
        encoder.encode(["the river", bad], task="topics")  # type: ignore[list-item]
    sparse = SparseEncoder(str(add_masked_head(tiny("bert"))), replace(FLOAT32, pooling="splade"), tasks={})
    sparse.put_task("topics", of_topics(sparse.dense))
    with pytest.raises(InputError, match=r"^text 1 of 2 is no valid string"):
        sparse.encode(["the river", bad], task="topics")  # type: ignore[list-item]


def test_no_texts_have_no_vectors(encoder: Encoder) -> None:
    encoder.put_task("topics", of_topics(encoder))
    assert encoder.encode([], task="topics").shape == (0, encoder.dim)
    assert encoder.encode([], task=[]).shape == (0, encoder.dim)


def test_prompts_are_kept_in_the_table_alone(encoder: Encoder) -> None:
    """The encoder keeps the model of topics, and no float32 copy of the prompts."""
    prompt = of_topics(encoder)
    assert prompt.topics is not None
    prompts = weakref.ref(prompt.topics.prompts)
    encoder.put_task("topics", prompt)
    del prompt
    gc.collect()
    assert prompts() is None
    assert encoder.encode(TEXTS, task="topics").shape == (6, encoder.dim)


def test_topics_must_be_given_and_known(encoder: Encoder) -> None:
    encoder.put_task("topics", of_topics(encoder))
    tokens = encoder.tokenize(TEXTS, side="query")
    with pytest.raises(InputError, match=r"^task 'topics': has prompts of topics: expected the topics of 6 texts"):
        encoder.forward(tokens, task="topics")
    with pytest.raises(InputError, match=r"found \[2\]$"):
        encoder.forward(tokens, task="topics", topics=np.array([0, 1]))
    with pytest.raises(InputError, match=r"^task 'topics': text 5 has the topic 3, expected -1 to 2$"):
        encoder.forward(tokens, task="topics", topics=np.array([0, 0, 0, 0, 0, 3]))
    assert encoder.topics_of(TEXTS) is None
    encoder.put_task("fixed", fixed(encoder, 3))
    assert encoder.topics_of(TEXTS, task="fixed") is None


def test_prompts_that_do_not_fit_are_refused(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(of_topics(encoder), topics=random_saved_topics(shape=PromptShape(3, 4, 8)))
    with pytest.raises(
        InputError, match=r"^the prompt is of shape \(3, 2, 4, 5, 8\), expected that of a backbone of 2 layers"
    ):
        encoder.put_task("topics", wrong)
    late = replace(of_topics(encoder, 20), position_offset=True, options=replace(FLOAT32, query_length=50))
    with pytest.raises(InputError, match=r"a prompt of 20 tokens need 81 positions, and the backbone has 61"):
        encoder.put_task("topics", late)
    size = encoder._tasks.tables["query"].bytes_needed(5, 3) + encoder._tasks.tables["passage"].bytes_needed(5, 3)
    bytes_per_prompt = 4 * 5 * SHAPE.layers * 2 * SHAPE.heads * SHAPE.head_dim
    assert size == 2 * 4 * bytes_per_prompt  # of three topics and of the empty prompt
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: size - 1)
    with pytest.raises(InputError, match=r"^with a prompt of 5 tokens the table of all prompts takes"):
        encoder.put_task("topics", of_topics(encoder))
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: size)
    encoder.put_task("topics", of_topics(encoder))
    encoder.probe("no known word", task="topics")


def test_texts_start_after_the_prompt_of_their_topic(tiny: Tiny) -> None:
    options = replace(FLOAT32, query_length=20, passage_length=20)
    encoder = Encoder(str(tiny("bert")), options, tasks={})
    encoder.put_task("usual", of_topics(encoder))
    encoder.put_task("later", replace(of_topics(encoder), position_offset=True))
    usual, later = (encoder.encode(TEXTS, task=task) for task in ("usual", "later"))
    assert (np.abs(usual - later).max(1) > 1e-4).all()
    mixed = encoder.encode(TEXTS, task=["usual", "later"] * 3)
    np.testing.assert_allclose(mixed[1::2], later[1::2], atol=1e-5, rtol=1e-5)


def test_a_sparse_encoder_infers_topics_too(tiny: Tiny) -> None:
    sparse = SparseEncoder(str(add_masked_head(tiny("bert"))), replace(FLOAT32, pooling="splade"), tasks={})
    sparse.put_task("topics", of_topics(sparse.dense))
    dense = sparse.dense.encode(TEXTS, task="topics")
    np.testing.assert_allclose(sparse.encode(TEXTS, task="topics").dense(), dense, atol=1e-6)
    with pytest.raises(TextsError, match=r"^text 1 of 2 has no word that the topics of its task know"):
        sparse.encode(["river", "beta"], task="topics")


def test_many_tasks_share_one_table(encoder: Encoder) -> None:
    for number in range(20):
        encoder.put_task(f"t{number}", of_topics(encoder, 2 + number % 3, seed=number))
    tasks = [f"t{number % 20}" for number in range(60)]
    texts = [TEXTS[number % 6] for number in range(60)]
    mixed = encoder.encode(texts, task=tasks)
    for name in ("t0", "t7", "t19"):
        rows = [row for row, task in enumerate(tasks) if task == name]
        single = encoder.encode([texts[row] for row in rows], task=name)
        np.testing.assert_allclose(mixed[rows], single, atol=1e-5, rtol=1e-5)
    for number in range(20):
        encoder.drop_task(f"t{number}")
    encoder.put_task("again", of_topics(encoder))
    assert encoder._tasks.tables["query"].snapshot().numbers.shape[3] == 64  # the slots of dropped tasks are free again
