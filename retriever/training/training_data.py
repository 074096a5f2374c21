"""Training data of re-rankers and dual encoders: queries and passages, and the content of each step's batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from riptide.retriever.options.tuning import NegativeDraw, PositiveDraw
from riptide.retriever.training.mixture_schedule import SetMixture


class BatchSettings(Protocol):
    """Options that determine the content of a batch: queries per step, negatives per query, and a seed."""

    @property
    def batch(self) -> int: ...
    @property
    def negatives_per_query(self) -> int: ...
    @property
    def seed(self) -> int: ...


class TeacherScores(NamedTuple):
    """A re-ranker's probabilities of the pairs of TrainingData.

    Attributes:
        positives: The probabilities of the positives of each query, in their order, float32 [any].
        negatives: Those of the mined negatives of each query, in their order, float32 [any].
    """

    positives: list[np.ndarray]
    negatives: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class CategoryTable:
    """The categories of each passage row, in compressed sparse rows (CSR).

    Attributes:
        names: The names of the categories by number, in the order of the alphabet.
        offsets: The categories of row r are `values[offsets[r] : offsets[r + 1]]`: int64 [rows + 1].
        values: Numbers of categories, rising within a row, each once: int32 [any].
    """

    names: tuple[str, ...]
    offsets: np.ndarray
    values: np.ndarray

    @property
    def num_rows(self) -> int:
        """The number of rows, including those without categories."""
        return len(self.offsets) - 1

    def of_row(self, row: int) -> np.ndarray:
        """Returns the categories of a row, int32 [any]."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def multi_hot(self, rows: np.ndarray) -> np.ndarray:
        """Returns a mask of the categories of each requested row: bool [n, c].

        The columns are the c categories that at least one of these rows has, in the order of their numbers.

        Args:
            rows: int64 [n]; a row may come several times.
        """
        of_rows = [self.of_row(row) for row in rows.tolist()]
        places = np.repeat(np.arange(len(rows)), [len(each) for each in of_rows])
        categories, columns = np.unique(np.concatenate([*of_rows, np.empty(0, np.int32)]), return_inverse=True)
        result = np.zeros((len(rows), len(categories)), bool)
        result[places, columns] = True
        return result


@dataclass(frozen=True)
class TrainingData:
    """Training queries with their positives, negatives and passages.

    Attributes:
        queries: Texts of the queries.
        positives: Corpus rows of the positives of each query, int64 [any], in the order of the judgements.
        negatives: Corpus rows of the mined negatives of each query, int64 [any].
        num_passages: Number of passages of the corpus: its rows are 0 to num_passages - 1. Several corpora are numbered
            one after the other.
        passages: Returns the titles and the texts of rows int64 [n].
        deleted: Rows that are never drawn, int64, ascending.
        copies: Rows of other passages with the text of a positive of each query, or of its document, int64 [any]: they
            are never drawn, and are no negatives in a batch; None: there are none.
        teacher: The scores for distillation; None: there are none.
        weights: Sampling weights of the positives of each query, more than 0, float64 [any]; None: not known.
        mixture: The mixture of the training sets that the queries come from; None: they are one set.
        corpora: The first row of the corpus of each training set, and the row after its last: int64 [sets, 2]; None:
            there is one corpus.
        categories: The categories of the passages by row, at least of the positives; None: not known.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    negatives: Sequence[np.ndarray]
    num_passages: int
    passages: Callable[[np.ndarray], tuple[list[str], list[str]]]
    deleted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    copies: Sequence[np.ndarray] | None = None
    teacher: TeacherScores | None = None
    weights: Sequence[np.ndarray] | None = None
    mixture: SetMixture | None = None
    corpora: np.ndarray | None = None
    categories: CategoryTable | None = None

    def corpus_range_of(self, query: int) -> tuple[int, int]:
        """Returns the row range [first, end) of the corpus that a query is for."""
        if self.corpora is None or self.mixture is None:
            return 0, self.num_passages
        first, end = self.corpora[self.mixture.sets_of(np.array([query]))[0]]
        return int(first), int(end)

    def task_names(self) -> tuple[str, ...]:
        """Returns the names of the tasks by task number; empty if there is a single training set.

        Training sets of one name are one task.
        """
        return () if self.mixture is None else tuple(sorted(set(self.mixture.tasks)))

    def task_numbers_of(self, queries: np.ndarray) -> np.ndarray:
        """Returns the task number of each query: int64 [n] both."""
        if self.mixture is None:
            return np.zeros(len(queries), np.int64)
        names = self.task_names()
        numbers = np.array([names.index(task) for task in self.mixture.tasks], np.int64)
        return numbers[self.mixture.sets_of(queries)]

    def relevant_rows(self, query: int) -> np.ndarray:
        """Returns the rows that cannot be negatives of a query: its positives and their copies."""
        if self.copies is None:
            return self.positives[query]
        return np.concatenate([self.positives[query], self.copies[query]])

    def teacher_scores(self, query: int, group: np.ndarray) -> np.ndarray:
        """Returns the teacher's probabilities of the passages that `batch_at` draws for a query.

        Args:
            query: The number of the query.
            group: Corpus rows int64 [1 + negatives], the positive first.

        Returns:
            float32 [1 + negatives], NaN for random passages, which are drawn for a query with few mined negatives.
        """
        assert self.teacher is not None
        rows = np.concatenate([self.positives[query], self.negatives[query]])
        scores = np.concatenate([self.teacher.positives[query], self.teacher.negatives[query]])
        known = dict(zip(rows.tolist(), scores.tolist(), strict=True))
        num_drawn = 1 + min(len(group) - 1, len(self.negatives[query]))
        result = np.full(len(group), np.nan, np.float32)
        result[:num_drawn] = [known[row] for row in group[:num_drawn].tolist()]
        return result


def batch_at(
    data: TrainingData,
    options: BatchSettings,
    step: int,
    *,
    draw_positive: PositiveDraw = "random",
    draw_negatives: NegativeDraw = "random",
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the content of the batch of a step, as a function of (seed, step, batch).

    Epochs are permutations of the queries, one after the other; the mixture of several sets decides otherwise. If a
    query has fewer mined negatives than requested, random passages of its corpus that are neither relevant nor deleted
    are added.

    Args:
        data: The training data.
        options: Size and seed of the batch.
        step: The step, from 0.
        draw_positive: "random" draws a positive from (seed, epoch, query), "weighted" with probabilities in proportion
            to the weights; "first" takes the first one.
        draw_negatives: "random" draws negatives from (seed, epoch, query), without repetition. "windows" shuffles a
            query's negatives once, from (seed, query), and takes the next ones in each epoch, from the start again
            after the last one.

    Returns:
        Numbers of queries int64 [batch], and corpus rows int64 [batch, 1 + negatives], the positive first.
    """
    if data.mixture is not None:
        queries, epochs = data.mixture.queries_at(options.seed, step, options.batch)
    else:
        positions = step * options.batch + np.arange(options.batch)
        epochs, places = np.divmod(positions, len(data.queries))
        orders = {epoch: _permutation(options.seed, epoch, len(data.queries)) for epoch in np.unique(epochs)}
        queries = np.array([orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)], np.int64)
    rows = [
        _draw_passages(data, options, int(epoch), int(query), draw_positive, draw_negatives)
        for epoch, query in zip(epochs, queries, strict=True)
    ]
    return queries, np.stack(rows)


def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, 0, int(epoch)]).permutation(size)


def _draw_passages(
    data: TrainingData,
    options: BatchSettings,
    epoch: int,
    query: int,
    draw_positive: PositiveDraw,
    draw_negatives: NegativeDraw,
) -> np.ndarray:
    """Draws a positive and the negatives of a query: int64 [1 + negatives]."""
    rng = np.random.default_rng([options.seed, 1, epoch, query])
    positives, negatives = data.positives[query], data.negatives[query]
    wanted = options.negatives_per_query
    count = min(wanted, len(negatives))
    if draw_positive == "first":
        positive = positives[0]
    elif draw_positive == "weighted":
        assert data.weights is not None, "positives are drawn by weights that the data lacks"
        positive = rng.choice(positives, p=data.weights[query] / data.weights[query].sum())
    else:
        positive = rng.choice(positives)
    if draw_negatives == "windows" and count:
        order = np.random.default_rng([options.seed, 2, query]).permutation(negatives)
        mined = order[(epoch * wanted + np.arange(count)) % len(order)]
    else:
        mined = rng.choice(negatives, count, replace=False)
    chosen, relevant = [positive, *mined], data.relevant_rows(query)
    first, end = data.corpus_range_of(query)
    while len(chosen) <= wanted:
        row = first + rng.integers(end - first)
        place = np.searchsorted(data.deleted, row)
        is_deleted = place < len(data.deleted) and data.deleted[place] == row
        if row not in relevant and not is_deleted:
            chosen.append(row)
    return np.array(chosen, np.int64)
