"""The topic model of a fitted tree, against its equations in float64 with loops; small topics are merged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_topics import SMALL

from riptide.base.errors import InputError
from riptide.indexing.topics.fitting import FittedTree, main_topic_per_passage
from riptide.indexing.topics.topic_model_file import read_topics, write_topics
from riptide.indexing.topics.tree import build_topics

VOCABULARY = ("cell", "gene", "judge", "orbit", "star")
# Node 0 is a leaf below node 4, to have children before their parents.
PARENTS = np.array([4, -1, 1, 1, 1, 2, 3, 2], np.int64)
LEVELS = np.array([2, 0, 1, 1, 1, 2, 2, 2], np.int64)
OPTIONS = replace(SMALL, merge_below=0.1, words=3)


def random_tree(seed: int = 0, documents: int = 40) -> FittedTree:
    """Returns a tree of depth 3 with three nodes of level 1: node 4 has the path of the first passage alone."""
    random = np.random.default_rng(seed)
    leaves = np.array([5, 6, 7])[random.integers(0, 3, documents)]
    leaves[0] = 0
    tokens: list[tuple[int, int, int]] = []
    for document, leaf in enumerate(leaves):
        path = [1, PARENTS[leaf], leaf]
        levels = [1] if document == 0 else random.integers(0, 3, 6)
        liked = {2: [3, 4], 3: [0, 1], 4: [0, 0, 1]}[int(PARENTS[leaf])]
        for level in levels:
            word = random.choice(liked) if level else random.integers(len(VOCABULARY))
            tokens.append((document, int(word), int(path[level])))
    places, words, nodes = (np.array(column, np.int64) for column in zip(*tokens, strict=True))
    passages = np.zeros(8, np.int64)
    for leaf in leaves:
        for node in (1, PARENTS[leaf], leaf):
            passages[node] += 1
    return FittedTree(VOCABULARY, places, words, nodes, documents, PARENTS, LEVELS, passages)


def test_the_model_is_that_of_the_equations() -> None:
    tree = random_tree()
    built, assigned = build_topics(tree, OPTIONS)
    model = built.model
    tokens = list(zip(tree.nodes.tolist(), tree.words.tolist(), strict=True))

    def probability(node: int, word: int) -> float:
        size = sum(1 for n, _ in tokens if n == node)
        return (tokens.count((node, word)) + OPTIONS.eta) / (size + OPTIONS.eta * len(VOCABULARY))

    shares = [sum(1 for n, _ in tokens if LEVELS[n] == level) / len(tokens) for level in range(3)]
    leaves = [0, 5, 6, 7]
    total = sum(int(tree.passages_per_node[leaf]) + 1 for leaf in leaves)
    for row, leaf in enumerate(leaves):
        path = [1, int(PARENTS[leaf]), leaf]
        for word in range(len(VOCABULARY)):
            expected = math.fsum(share * probability(node, word) for share, node in zip(shares, path, strict=True))
            assert model.log_words[row, word] == pytest.approx(math.log(expected), abs=1e-6)
        assert model.log_prior[row] == pytest.approx(
            math.log((int(tree.passages_per_node[leaf]) + 1) / total), abs=1e-6
        )

    sizes = {node: int(tree.passages_per_node[node]) for node in (2, 3, 4)}
    large = sorted((2, 3), key=lambda node: -sizes[node])  # node 4 has 1 of 40 passages, less than 10%
    likelihood = [sum(math.log(probability(node, word)) for n, word in tokens if n == 4) for node in large]
    merged = likelihood.index(max(likelihood))
    assert large[merged] == 3, "the words of node 4 are those of node 3"
    topic_of = {large[0]: 0, large[1]: 1, 4: merged}
    assert model.path_topics.tolist() == [topic_of[int(PARENTS[leaf])] for leaf in leaves]
    assert model.num_topics == 2
    known = main_topic_per_passage(tree)
    assert assigned.tolist() == [topic_of[node] if node >= 0 else -1 for node in known.tolist()]
    for topic, node in enumerate(large):
        counts = sorted((-tokens.count((node, word)), word) for word in range(len(VOCABULARY)))
        assert model.words[topic] == tuple(VOCABULARY[word] for count, word in counts[:3] if count)


def test_nothing_is_merged_without_a_bound() -> None:
    built, assigned = build_topics(random_tree(), replace(OPTIONS, merge_below=0.0))
    assert built.model.num_topics == 3
    assert assigned[0] == 2  # the smallest topic is the last one
    assert not any(node.merged for node in built.nodes)


def test_the_tree_has_parents_before_children_and_keeps_merged_nodes() -> None:
    tree = random_tree()
    built, _ = build_topics(tree, OPTIONS)
    assert [node.parent < number for number, node in enumerate(built.nodes)] == [True] * 8
    assert [node.level for node in built.nodes] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert sorted(node.passages for node in built.nodes) == sorted(tree.passages_per_node.tolist())
    [merged] = [node for node in built.nodes if node.merged]
    assert (merged.level, merged.passages, merged.words) == (1, 1, ("gene",) if "gene" in merged.words else ("cell",))
    assert built.nodes[0].topic == -1
    for node in built.nodes[4:]:
        assert node.topic == built.nodes[node.parent].topic >= 0


def test_a_passage_with_words_of_the_root_alone_has_no_topic() -> None:
    tree = random_tree()
    nodes = np.where(tree.token_passages == 5, 1, tree.nodes)
    _, assigned = build_topics(replace(tree, nodes=nodes), OPTIONS)
    assert assigned[5] == -1
    assert (assigned >= 0).sum() >= 37


def test_one_topic_alone_is_refused() -> None:
    with pytest.raises(InputError) as error:
        build_topics(random_tree(seed=1), replace(OPTIONS, merge_below=0.49))
    assert str(error.value) == (
        "topics with at least 49.0% of the 40 passages: found 1 (of 3 in all), expected at least 2: give a larger "
        "parameter gamma, another parameter eta, or a smaller parameter merge_below"
    )


def test_a_file_returns_the_topics_with_the_same_bytes(tmp_path: Path) -> None:
    built, _ = build_topics(random_tree(), OPTIONS)
    for name in ("one", "two"):
        write_topics(built, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = read_topics(tmp_path / "one")
    assert again.nodes == built.nodes
    assert again.model.fingerprint() == built.model.fingerprint()
    (tmp_path / "two").write_bytes((tmp_path / "one").read_bytes()[:-4])
    with pytest.raises(InputError, match="two: not a file of topics: "):
        read_topics(tmp_path / "two")
