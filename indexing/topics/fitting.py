"""Fits hierarchical LDA or LDA with tomotopy, which assigns a topic to each word of each passage."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.topics.topic_options import FitOptions
from riptide.process.extras import require

MIN_DOCUMENTS = 50  # minimum number of passages with words; fewer give no useful topics


@dataclass(frozen=True)
class FittedTree:
    """A tree of topics (for LDA, separate nodes of level 1), and the topic of each word of each passage.

    Attributes:
        vocabulary: The words that count, sorted.
        token_passages: int64 [tokens], the number of the passage of each token, ascending.
        words: int64 [tokens], its word.
        nodes: int64 [tokens], its topic: a node of the tree.
        num_passages: The number of passages.
        parents: int64 [nodes], the parent of each node; -1 for one without a parent.
        levels: int64 [nodes], the distance from the root: 0 for the root.
        passages_per_node: int64 [nodes], the number of passages whose path has the node.
    """

    vocabulary: tuple[str, ...]
    token_passages: np.ndarray
    words: np.ndarray
    nodes: np.ndarray
    num_passages: int
    parents: np.ndarray
    levels: np.ndarray
    passages_per_node: np.ndarray


def tomotopy_version() -> str:
    """Returns the version of tomotopy. Raises InputError if it is not installed."""
    require("fitting topics", "tomotopy")
    return importlib.metadata.version("tomotopy")


def choose_vocabulary(documents: Iterable[Sequence[str]], min_passages: int, most_frequent: int) -> tuple[str, ...]:
    """Returns the sorted vocabulary of documents without rare words and without the most frequent words.

    Args:
        documents: The words of each passage.
        min_passages: Minimum number of passages that have a word; rarer words do not count.
        most_frequent: So many of these words do not count: those with the most occurrences, of equal ones the first by
            the alphabet.
    """
    occurrences: Counter[str] = Counter()
    passages: Counter[str] = Counter()
    for words in documents:
        occurrences.update(words)
        passages.update(set(words))
    known = [word for word, count in passages.items() if count >= min_passages]
    known.sort(key=lambda word: (-occurrences[word], word))
    return tuple(sorted(known[most_frequent:]))


def fit_tree(
    documents: Sequence[Sequence[str]], options: FitOptions, report: Callable[[int], object] = lambda done: None
) -> FittedTree:
    """Fits topics to passages, in one thread: the same passages and options give the same tree.

    Args:
        documents: The words of each passage.
        options: The options.
        report: Called with the number of iterations that are done.

    Returns:
        The tree.

    Raises:
        InputError: If no word counts, if fewer than MIN_DOCUMENTS passages have words that count, or if tomotopy is not
            installed.
    """
    vocabulary = choose_vocabulary(documents, options.min_passages, options.most_frequent)
    if not vocabulary:
        raise InputError(
            f"none of the words of {len(documents):,} passages is in at least {options.min_passages} of them, without "
            f"the {options.most_frequent} most frequent ones: give a smaller {Parameter('min_passages')} or "
            f"{Parameter('most_frequent')}, or a larger corpus"
        )
    known = set(vocabulary)
    texts = [[word for word in words if word in known] for words in documents]
    numbers = [number for number, words in enumerate(texts) if words]
    least = max(MIN_DOCUMENTS, options.topics or 0)
    if len(numbers) < least:
        raise InputError(
            f"{len(numbers):,} of {len(documents):,} passages have words that count, expected at least {least:,}: the "
            "corpus is too small for topics"
        )
    model = _create_model(options)
    for number in numbers:
        model.add_doc(texts[number])
    for iteration in range(options.iterations):
        model.train(1, workers=1)  # with several threads, the samples would depend on their number
        report(iteration + 1)
    return _read_tree(model, vocabulary, numbers, len(documents), options)


def _create_model(options: FitOptions) -> Any:
    """Creates a tomotopy model without documents."""
    tomotopy_version()
    import tomotopy

    shared = {"alpha": options.alpha, "eta": options.eta, "seed": options.seed}
    if options.method == "lda":
        return tomotopy.LDAModel(k=options.topics, **shared)
    return tomotopy.HLDAModel(depth=options.depth, gamma=options.gamma, **shared)


def _read_tree(
    model: Any, vocabulary: tuple[str, ...], numbers: Sequence[int], num_passages: int, options: FitOptions
) -> FittedTree:
    """Converts a fitted tomotopy model to a FittedTree. numbers: the number of the passage of each document."""
    word_numbers = {word: number for number, word in enumerate(vocabulary)}
    word_of_model_id = np.array([word_numbers[word] for word in model.vocabs], np.int64)
    is_tree = options.method == "hlda"
    live = [topic for topic in range(model.k) if not is_tree or model.is_live_topic(topic)]
    node_of_topic = np.full(model.k, -1, np.int64)
    node_of_topic[live] = np.arange(len(live))
    levels = np.array([model.level(topic) if is_tree else 1 for topic in live], np.int64)
    parents = np.array(
        [node_of_topic[model.parent_topic(topic)] if is_tree and model.level(topic) else -1 for topic in live], np.int64
    )
    documents = list(model.docs)
    lengths = [len(document.words) for document in documents]
    words = np.concatenate([word_of_model_id[np.asarray(document.words, np.int64)] for document in documents])
    nodes = np.concatenate([node_of_topic[np.asarray(document.topics, np.int64)] for document in documents])
    places = np.repeat(np.asarray(numbers, np.int64), lengths)
    if is_tree:
        passages = np.array([model.num_docs_of_topic(topic) for topic in live], np.int64)
    else:
        tree = FittedTree(vocabulary, places, words, nodes, num_passages, parents, levels, parents)
        topics = main_topic_per_passage(tree)
        passages = np.bincount(topics[topics >= 0], minlength=len(live))
    return FittedTree(vocabulary, places, words, nodes, num_passages, parents, levels, passages)


def top_ancestors(tree: FittedTree) -> np.ndarray:
    """Returns each node's ancestor at level 1 (a node of level 1 itself; -1 for the root): int64 [nodes]."""
    tops = np.full(len(tree.levels), -1, np.int64)
    for node in np.argsort(tree.levels, kind="stable"):  # parents before children
        if tree.levels[node] == 1:
            tops[node] = node
        elif tree.levels[node] > 1:
            tops[node] = tops[tree.parents[node]]
    return tops


def main_topic_per_passage(tree: FittedTree) -> np.ndarray:
    """Returns the node of level 1 to which most words of each passage belong.

    In a tree of hierarchical LDA, all words of a passage that are below the root have the same one: that of its path.

    Returns:
        int64 [passages]; -1 for a passage without a word below the root. Of equal numbers the first node counts.
    """
    tops = top_ancestors(tree)[tree.nodes]
    below = tops >= 0
    pairs, counts = np.unique(np.stack([tree.token_passages[below], tops[below]]), axis=1, return_counts=True)
    passages, nodes = pairs
    order = np.lexsort((nodes, -counts, passages))
    first = order[np.unique(passages[order], return_index=True)[1]]
    topics = np.full(tree.num_passages, -1, np.int64)
    topics[passages[first]] = nodes[first]
    return topics
