"""Joins training sets of several tasks, over one or several corpora, into the training data of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.training.mixture_schedule import Batches, SetMixture
from riptide.retriever.training.training_data import TeacherScores, TrainingData

_Item = TypeVar("_Item")
_SIZE_SEED = 0

Passages = tuple[list[str], list[str]]
"""Titles and texts."""


@dataclass(frozen=True)
class TrainingSet:
    """The training queries of one task.

    Attributes:
        task: The name of the task.
        data: The queries with their passages.
        weight: How often a query comes, relative to queries of other sets.
        similarity: The similarity that the task is trained for; None: that of the encoder.
        corpus: The name of the corpus of the passages. Sets with the same name are over the same passages.
    """

    task: str
    data: TrainingData
    weight: float = 1.0
    similarity: Literal["cosine", "dot"] | None = None
    corpus: str = ""


def join_training_sets(sets: Sequence[TrainingSet], batches: Batches = "mixed") -> TrainingData:
    """Joins the queries of all sets, one set after the other, with the mixture that determines batches.

    A single set is returned as it is. The rows of several corpora are numbered one corpus after the other, in the order
    in which the sets name them.

    Args:
        sets: The training sets, at least one.
        batches: "mixed": each batch holds queries of all sets; "one-task": queries of one set.

    Raises:
        InputError: If sets of one corpus have different passages, if a weight is not positive, or if tasks of different
            similarities would share a batch.
    """
    corpora: dict[str, TrainingSet] = {}
    for each in sets:
        if not (each.weight > 0 and math.isfinite(each.weight)):
            raise InputError(f"training set {each.task}: weight {each.weight:g}, expected more than 0")
        other = corpora.setdefault(each.corpus, each)
        own, others = each.data, other.data
        if own.num_passages != others.num_passages or not np.array_equal(own.deleted, others.deleted):
            raise InputError(
                f"training sets {other.task} and {each.task} are of different states of a corpus "
                f"({others.num_passages:,} and {own.num_passages:,} passages): train on sets of one state"
            )
        if batches == "mixed" and each.similarity != sets[0].similarity:
            raise InputError(
                f"training sets {sets[0].task} (similarity {sets[0].similarity or 'of the encoder'}) and {each.task} "
                f"({each.similarity or 'of the encoder'}) in one batch: expected one similarity; use "
                f"{Parameter('batches', 'one-task')}, or leave a set out"
            )
    if len(sets) == 1:
        return sets[0].data
    ends = np.cumsum([each.data.num_passages for each in corpora.values()])
    firsts = {name: int(end) - each.data.num_passages for (name, each), end in zip(corpora.items(), ends, strict=True)}
    all_data = [_shifted(each.data, firsts[each.corpus]) for each in sets]
    weights = [data.weights for data in all_data]
    teachers = [data.teacher for data in all_data if data.teacher is not None]
    return TrainingData(
        [query for data in all_data for query in data.queries],
        [rows for data in all_data for rows in data.positives],
        [rows for data in all_data for rows in data.negatives],
        int(ends[-1]),
        sets[0].data.passages if len(corpora) == 1 else _passages_of([each.data for each in corpora.values()], ends),
        deleted=np.concatenate([each.data.deleted + firsts[name] for name, each in corpora.items()]),
        copies=[rows for data in all_data for rows in data.copies or [np.empty(0, np.int64)] * len(data.queries)],
        teacher=None
        if len(teachers) < len(sets)
        else TeacherScores(
            [scores for own in teachers for scores in own.positives],
            [scores for own in teachers for scores in own.negatives],
        ),
        weights=None if None in weights else [each for own in weights for each in own or ()],
        mixture=SetMixture(
            tuple(each.task for each in sets),
            tuple(len(data.queries) for data in all_data),
            tuple(float(each.weight) for each in sets),
            batches,
        ),
        corpora=None
        if len(corpora) == 1
        else np.array([(firsts[each.corpus], firsts[each.corpus] + each.data.num_passages) for each in sets], np.int64),
    )


def draw_queries(data: TrainingData, size: int | None) -> TrainingData:
    """Returns a training set with at most `size` of its queries, drawn at random, in their original order.

    The same queries are drawn in every run, regardless of its seed, so that runs of several seeds train on one set.

    Args:
        data: The training set.
        size: Maximum number of queries; None: all queries stay.

    Raises:
        InputError: If `size` is not positive.
    """
    if size is not None and size < 1:
        raise InputError(f"size {size} of a training set: expected at least 1 query")
    if size is None or size >= len(data.queries):
        return data
    chosen = np.sort(np.random.default_rng(_SIZE_SEED).choice(len(data.queries), size, replace=False)).tolist()

    def select_chosen(lists: Sequence[_Item]) -> list[_Item]:
        return [lists[number] for number in chosen]

    return replace(
        data,
        queries=select_chosen(data.queries),
        positives=select_chosen(data.positives),
        negatives=select_chosen(data.negatives),
        copies=None if data.copies is None else select_chosen(data.copies),
        teacher=None if data.teacher is None else TeacherScores(*map(select_chosen, data.teacher)),
        weights=None if data.weights is None else select_chosen(data.weights),
    )


def _shifted(data: TrainingData, first: int) -> TrainingData:
    """Adds `first` to all corpus rows of training data."""
    if not first:
        return data
    return replace(
        data,
        positives=[rows + first for rows in data.positives],
        negatives=[rows + first for rows in data.negatives],
        copies=None if data.copies is None else [rows + first for rows in data.copies],
    )


def _passages_of(all_data: Sequence[TrainingData], ends: np.ndarray) -> Callable[[np.ndarray], Passages]:
    """Returns a function that maps rows, int64 [n], of several corpora to n titles and n texts.

    Args:
        all_data: Training data of each corpus, with its own numbers of rows.
        ends: The row after the last one of each corpus, int64 [corpora].
    """

    def passages(rows: np.ndarray) -> Passages:
        titles, texts = [""] * len(rows), [""] * len(rows)
        numbers = np.searchsorted(ends, rows, side="right")
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            data = all_data[number]
            passages_of_corpus = data.passages(rows[places] - (ends[number] - data.num_passages))
            for place, title, text in zip(places.tolist(), *passages_of_corpus, strict=True):
                titles[place], texts[place] = title, text
        return titles, texts

    return passages
