"""Topics fitted by tomotopy: planted topics are found, the tree is consistent, the same seed gives the same tree."""

from dataclasses import replace

import numpy as np
import pytest
from planted_topics import SMALL, planted_texts, purity

from riptide.base.errors import InputError
from riptide.indexing.topics.fitting import (
    MIN_DOCUMENTS,
    FittedTree,
    choose_vocabulary,
    fit_tree,
    main_topic_per_passage,
    top_ancestors,
)
from riptide.indexing.topics.topic_options import FitOptions
from riptide.retriever.topics.words import topic_words

LDA = replace(SMALL, method="lda", topics=3)
DEEP = replace(SMALL, depth=4)


def fitted(options: FitOptions, count: int = 90) -> tuple[FittedTree, np.ndarray]:
    texts, truth = planted_texts(count)
    return fit_tree([topic_words(text) for text in texts], options), truth


@pytest.mark.parametrize("options", [SMALL, DEEP, LDA], ids=["hlda", "deep", "lda"])
def test_planted_topics_are_found_again_with_the_same_seed(options: FitOptions) -> None:
    tree, truth = fitted(options)
    topics = main_topic_per_passage(tree)
    assert purity(topics, truth) > 0.9
    again, _ = fitted(options)
    for name in ("token_passages", "words", "nodes", "parents", "levels", "passages_per_node"):
        assert np.array_equal(getattr(tree, name), getattr(again, name)), name
    other, _ = fitted(replace(options, seed=options.seed + 1))
    assert not np.array_equal(tree.nodes, other.nodes)


@pytest.mark.parametrize("options", [SMALL, DEEP], ids=["hlda", "deep"])
def test_the_tokens_of_a_passage_are_on_one_path(options: FitOptions) -> None:
    tree, _ = fitted(options)
    assert tree.levels.max() == options.depth - 1
    assert np.flatnonzero(tree.parents < 0).tolist() == np.flatnonzero(tree.levels == 0).tolist()
    deep = tree.levels > 0
    assert np.array_equal(tree.levels[tree.parents[deep]], tree.levels[deep] - 1)
    for document in range(tree.num_passages):
        nodes = set(tree.nodes[tree.token_passages == document].tolist())
        node = max(nodes, key=lambda node: tree.levels[node])
        path = set()
        while node >= 0:
            path.add(node)
            node = int(tree.parents[node])
        assert nodes <= path
    for level in range(options.depth):
        assert tree.passages_per_node[tree.levels == level].sum() == tree.num_passages
    tops = top_ancestors(tree)
    assert np.array_equal(tops[tree.levels == 1], np.flatnonzero(tree.levels == 1))
    topics = main_topic_per_passage(tree)  # -1 for a passage whose words are all of the root
    counts = np.bincount(topics[topics >= 0], minlength=len(tops))
    assert (counts[tree.levels == 1] <= tree.passages_per_node[tree.levels == 1]).all()
    assert counts.sum() + (topics < 0).sum() == tree.num_passages
    assert (topics < 0).sum() < 30


def test_the_words_of_the_passages_are_kept() -> None:
    texts, _ = planted_texts(60)
    tree = fit_tree([[], *map(topic_words, texts)], SMALL)
    for number, text in enumerate(["", *texts]):
        words = [tree.vocabulary[word] for word in tree.words[tree.token_passages == number]]
        assert sorted(words) == sorted(word for word in topic_words(text) if word in tree.vocabulary)
    assert tree.num_passages == 61
    assert main_topic_per_passage(tree)[0] == -1


def test_progress_counts_iterations() -> None:
    counts: list[int] = []
    texts, _ = planted_texts(60)
    fit_tree([topic_words(text) for text in texts], replace(SMALL, iterations=4), counts.append)
    assert counts == [1, 2, 3, 4]


def test_words_that_count() -> None:
    documents = [["b", "a", "a"], ["b", "c"], ["a", "c", "c", "c"], ["d", "d", "d", "d"]]
    assert choose_vocabulary(documents, 1, 0) == ("a", "b", "c", "d")
    assert choose_vocabulary(documents, 2, 0) == ("a", "b", "c")
    assert choose_vocabulary(documents, 2, 1) == ("a", "b")  # c: 4 occurrences
    assert choose_vocabulary(documents, 1, 1) == ("a", "b", "d")  # c and d: 4 occurrences each
    assert choose_vocabulary(documents, 5, 0) == ()


def test_a_corpus_that_is_too_small_is_refused() -> None:
    texts, _ = planted_texts(MIN_DOCUMENTS - 1)
    words = [topic_words(text) for text in texts]
    with pytest.raises(InputError, match=r"^49 of 53 passages have words that count, expected at least 50: the corpus"):
        fit_tree([*words, [], [], [], ["unique"]], SMALL)
    with pytest.raises(InputError, match=r"^49 of 49 passages .* expected at least 70"):
        fit_tree(words, replace(LDA, topics=70))
    with pytest.raises(InputError, match=r"^none of the words of 49 passages is in at least 50 of them, without the 2"):
        fit_tree(words, replace(SMALL, min_passages=50))


def test_options_out_of_range_are_refused() -> None:
    for change, message in (
        ({"method": "nmf"}, "parameter method 'nmf': expected one of hlda, lda"),
        ({"method": "lda"}, "parameter topics None: expected the number of topics of LDA, at least 2"),
        ({"topics": 5}, "parameter topics 5: the number of topics of hierarchical LDA is its outcome"),
        ({"depth": 1}, "parameter depth 1: expected at least 2"),
        ({"iterations": 0}, "parameter iterations 0: expected at least 1"),
        ({"seed": -1}, "parameter seed -1: expected at least 0"),
        ({"gamma": 0.0}, "parameter gamma 0.0: expected a number from 1e-06 to 1e+06"),
        ({"gamma": 1e39}, "parameter gamma 1e+39: expected a number from 1e-06 to 1e+06"),
        ({"eta": float("nan")}, "parameter eta nan: expected a number from"),
        ({"alpha": float("inf")}, "parameter alpha inf: expected a number from"),
        ({"alpha": 1e-50}, "parameter alpha 1e-50: expected a number from"),
        ({"depth": 11}, "parameter depth 11: expected at most 10"),
        ({"seed": 2**63}, "parameter seed 9223372036854775808: expected at most 9223372036854775807"),
        ({"method": "lda", "topics": 2, "depth": 3}, "parameter depth 3, parameter gamma 1: LDA has no tree"),
        ({"merge_below": 0.5}, "parameter merge_below 0.5: expected a share from 0 to below 0.5"),
    ):
        with pytest.raises(InputError) as error:
            FitOptions(**change)
        assert str(error.value).startswith(message)
