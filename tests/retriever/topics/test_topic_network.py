"""The network of topics' prompts against its equation in float64, its tokens, and its use as a PromptProvider."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from topic_prompts import SHAPE, TOPIC_WORDS

from riptide.base.errors import InputError
from riptide.retriever.forward.batching import TextTokenizer
from riptide.retriever.forward.prompt_rows import PromptInputs
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.topics.network import TopicPrompts, topic_tokens

Tiny = Callable[..., Path]


def random_network(length: int = 4, *, dropout: float = 0.0, position_offset: bool = False) -> TopicPrompts:
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 20, (3, length))
    return TopicPrompts(SHAPE, torch.randn(20, 32), tokens, 6, dropout, position_offset=position_offset)


def inputs(topics: list[int] | None) -> PromptInputs:
    count = 3 if topics is None else len(topics)
    given = None if topics is None else torch.tensor(topics)
    return PromptInputs(torch.zeros((count, 2), dtype=torch.int64), torch.full((count,), 2), given)


def reference(network: TopicPrompts, topic: int, layer: int, kind: int, head: int, token: int, place: int) -> float:
    """Returns a number of M (e + W2 GELU(W1 e)), with loops and Python's floats."""
    word = network.get_buffer("embeddings")[topic, token].tolist()
    first, second = (network.residual[number].weight.tolist() for number in (0, 2))
    hidden = [sum(weight * number for weight, number in zip(row, word, strict=True)) for row in first]
    hidden = [number * (1 + math.erf(number / math.sqrt(2))) / 2 for number in hidden]
    value = [
        number + sum(weight * unit for weight, unit in zip(row, hidden, strict=True))
        for number, row in zip(word, second, strict=True)
    ]
    row = ((layer * 2 + kind) * SHAPE.heads + head) * SHAPE.head_dim + place
    return sum(weight * number for weight, number in zip(network.out.weight[row].tolist(), value, strict=True))


def test_it_is_the_equation() -> None:
    network = random_network()
    matrices = network.matrices()
    assert matrices.shape == (3, SHAPE.layers, 2, SHAPE.heads, 4, SHAPE.head_dim)
    places = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 2, 3, 7), (2, 0, 1, 3, 2, 1), (2, 1, 1, 1, 0, 4)]
    for topic, layer, kind, head, token, place in places:
        expected = reference(network, topic, layer, kind, head, token, place)
        assert float(matrices[topic, layer, kind, head, token, place]) == pytest.approx(expected, abs=1e-5)


def test_each_text_has_the_prompt_of_its_topic() -> None:
    network = random_network()
    rows = network(inputs([2, 0, 2, 2]))
    assert rows.position_offsets is None
    for layer in range(SHAPE.layers):
        keys, values = rows.keys_and_values(layer, 4)
        for text, topic in enumerate([2, 0, 2, 2]):
            torch.testing.assert_close(torch.stack([keys[text], values[text]]), network.matrices()[topic, layer])
    with pytest.raises(ValueError, match="expected the topic of each text"):
        network(inputs(None))


def test_dropout_and_offsets_are_those_of_the_options() -> None:
    network = random_network(dropout=0.5, position_offset=True)
    assert network(inputs([1])).dropout == 0.5
    rows = network.eval()(inputs([1, 1]))
    assert rows.dropout == 0
    assert rows.position_offsets is not None
    assert rows.position_offsets.tolist() == [4, 4]


def test_only_the_network_is_trained() -> None:
    """The word embeddings are constants; a topic that no text has does not matter."""
    network = random_network()
    assert sorted(name for name, _ in network.named_parameters()) == [
        "out.weight",
        "residual.0.weight",
        "residual.2.weight",
    ]
    assert sorted(network.state_dict()) == sorted(name for name, _ in network.named_parameters())
    network(inputs([0, 1])).table.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_tokens_are_those_of_the_words(tiny: Tiny, kind: str) -> None:
    """A word in pieces has several; special and unknown tokens do not count."""
    options = EncoderOptions(query_prefix="query : ")
    tokenizer = TextTokenizer(read_recipe(tiny(kind), options), options)
    topics = (*TOPIC_WORDS, ("漢字", "banks", "river"))
    tokens = topic_tokens(tokenizer, topics, 4)
    assert tokens.dtype == np.int64
    for topic, words in enumerate(TOPIC_WORDS):
        ids = [int(tokenizer([word], side="query", prefix="").ids[1]) for word in words]
        assert tokens[topic].tolist() == ids + [tokenizer.pad_id] * (4 - len(ids))
    pieces = tokenizer(["banks"], side="query", prefix="").ids[1:-1].tolist()
    assert len(pieces) > 1
    ids = [*pieces, *tokenizer(["river"], side="query", prefix="").ids[1:-1].tolist()]
    assert tokens[3].tolist() == [*ids, *[tokenizer.pad_id] * 4][:4]
    with pytest.raises(InputError, match=r"^topic 1 \(漢字, \.\.\.\) has no word that the backbone knows"):
        topic_tokens(tokenizer, [("river",), ("漢字",)], 4)
