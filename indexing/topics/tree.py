"""Converts a fitted tree to a topic model: nodes of level 1 become topics, small ones are merged. No tomotopy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.topics.fitting import FittedTree, main_topic_per_passage, top_ancestors
from riptide.indexing.topics.topic_options import FitOptions
from riptide.retriever.topics.model import NO_TOPIC, TopicModel


@dataclass(frozen=True)
class TopicNode:
    """A node of the topic tree, as the HTML page of the topics shows it.

    Attributes:
        parent: The number of its parent, -1 for none; a parent comes before its children.
        level: The distance from the root.
        topic: The number of its topic, -1 for the root.
        merged: Whether it is a node of level 1 that was merged into the topic of another one.
        passages: The number of the fitted passages whose path has it.
        words: Its most frequent words.
    """

    parent: int
    level: int
    topic: int
    merged: bool
    passages: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class TopicTree:
    """A topic model with its tree.

    Attributes:
        model: The topics.
        nodes: The nodes; a parent comes before its children.
    """

    model: TopicModel
    nodes: tuple[TopicNode, ...]


def build_topics(tree: FittedTree, options: FitOptions) -> tuple[TopicTree, np.ndarray]:
    """Builds the topic model of a fitted tree; returns it with its tree, and the topic of each passage.

    A topic is a node of level 1; topics are ordered by the number of their passages, the largest first. A node with
    fewer than `merge_below` of the passages is merged into the remaining topic under which its words are the most
    probable. With n counts of the fit, V the size of the vocabulary and c a path from level 0 to a leaf:

        p(w | node) = (n(node, w) + eta) / (n(node) + eta V)
        p(w | c)    = sum over the levels l of c: n(l) / n * p(w | node of c at l)
        p(c)        = (passages of c + 1) / (passages + paths)

    Args:
        tree: The fitted tree.
        options: Its options.

    Returns:
        The topics, and the topic of each passage: int64 [passages], -1 for one without a word below the root.

    Raises:
        InputError: If fewer than two topics remain.
    """
    size = len(tree.vocabulary)
    counts = np.bincount(tree.nodes * size + tree.words, minlength=len(tree.levels) * size).reshape(-1, size)
    probabilities = (counts + options.eta) / (counts.sum(1, keepdims=True) + options.eta * size)
    assigned = main_topic_per_passage(tree)
    topic_of, large = _number_topics(tree, counts, probabilities, assigned, options)
    tops = top_ancestors(tree)
    node_topics = np.where(tops >= 0, topic_of[tops], -1)
    leaves = np.setdiff1d(np.arange(len(tree.levels)), tree.parents)
    level_tokens = np.bincount(tree.levels[tree.nodes], minlength=tree.levels.max() + 1)
    shares = level_tokens / level_tokens.sum()
    words = np.zeros((len(leaves), size))
    for row, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            words[row] += shares[tree.levels[node]] * probabilities[node]
            node = tree.parents[node]
    passages = tree.passages_per_node[leaves] + 1
    model = TopicModel(
        tree.vocabulary,
        tuple(_frequent_words(tree, counts[node], options.words) for node in large),
        node_topics[leaves],
        np.log(passages / passages.sum()).astype(np.float32),
        np.log(words).astype(np.float32),
    )
    order = np.argsort(tree.levels, kind="stable")  # parents before children
    places = np.argsort(order)
    nodes = tuple(
        TopicNode(
            parent=int(places[tree.parents[node]]) if tree.parents[node] >= 0 else -1,
            level=int(tree.levels[node]),
            topic=int(node_topics[node]),
            merged=bool(tree.levels[node] == 1 and node not in large),
            passages=int(tree.passages_per_node[node]),
            words=_frequent_words(tree, counts[node], options.words),
        )
        for node in order
    )
    return TopicTree(model, nodes), np.where(assigned >= 0, topic_of[assigned], NO_TOPIC)


def _number_topics(
    tree: FittedTree, counts: np.ndarray, probabilities: np.ndarray, assigned: np.ndarray, options: FitOptions
) -> tuple[np.ndarray, list[int]]:
    """Numbers topics; returns each node's topic (int64 [nodes], -1 except at level 1) and each topic's node."""
    sizes = np.bincount(assigned[assigned >= 0], minlength=len(tree.levels))
    top = np.flatnonzero(tree.levels == 1)
    top = top[np.argsort(-sizes[top], kind="stable")]
    is_large = sizes[top] >= max(1, options.merge_below * sizes.sum())
    large, small = top[is_large], top[~is_large]
    if len(large) < 2:
        first = f"a larger {Parameter('gamma')}" if options.method == "hlda" else f"another {Parameter('alpha')}"
        raise InputError(
            f"topics with at least {options.merge_below:.1%} of the {sizes.sum():,} passages: found {len(large)} (of "
            f"{len(top):,} in all), expected at least 2: give {first}, another {Parameter('eta')}, or a smaller "
            f"{Parameter('merge_below')}"
        )
    topics = np.full(len(tree.levels), -1, np.int64)
    topics[large] = np.arange(len(large))
    for node in small:
        topics[node] = (np.log(probabilities[large]) @ counts[node]).argmax()
    return topics, large.tolist()


def _frequent_words(tree: FittedTree, counts: np.ndarray, limit: int) -> tuple[str, ...]:
    """Returns the `limit` most frequent words of a node without words of count 0; one word if all counts are 0."""
    order = np.argsort(-counts, kind="stable")[: max(1, min(limit, int((counts > 0).sum())))]
    return tuple(tree.vocabulary[word] for word in order)
