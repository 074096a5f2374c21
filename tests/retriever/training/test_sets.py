"""Joined training sets: each query keeps its passages; positives are drawn by their weights; bad sets are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reranker_cases import make_pairs
from tiny import save_bert
from training_cases import dual_system, make_data

from riptide.base.errors import InputError
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.mixture_sets import TrainingSet, join_training_sets
from riptide.retriever.training.training_data import batch_at

OPTIONS = TuneOptions(batch=6, negatives_per_query=2, seed=1)


def test_queries_of_a_batch_keep_their_passages() -> None:
    one = make_data()
    positives = [rows + 1 for rows in one.positives[:10]]
    other = replace(
        one,
        queries=[f"other {query}" for query in one.queries[:10]],
        positives=positives,
        negatives=[np.setdiff1d(rows, [*own, 7]) for rows, own in zip(one.negatives, positives, strict=False)],
        copies=[np.array([7])] * 10,
    )
    data = join_training_sets([TrainingSet("one", one), TrainingSet("other", other, weight=12.0)])
    assert (len(data.queries), data.mixture.tasks) == (130, ("one", "other"))
    assert data.relevant_rows(125).tolist() == [*other.positives[5], 7]
    assert data.relevant_rows(3).tolist() == one.positives[3].tolist()
    counts: Counter[int] = Counter()
    for step in range(20):
        queries, rows = batch_at(data, OPTIONS, step)
        counts.update(data.mixture.sets_of(queries).tolist())
        for query, line in zip(queries, rows, strict=True):
            assert line[0] in data.positives[query]
            assert not {*line[1:].tolist()} & {*data.relevant_rows(query).tolist()}
    assert counts == {0: 60, 1: 60}


def test_queries_of_two_corpora_draw_passages_of_their_own() -> None:
    """Rows of the second corpus come after those of the first; random negatives are of the query's own corpus."""
    one, other = make_data(), make_data(40)
    other = replace(
        other,
        negatives=[rows[:0] for rows in other.negatives],
        deleted=np.array([3]),
        passages=lambda rows: (["other"] * len(rows), [f"passage {row}" for row in rows]),
    )
    sets = [TrainingSet("a", one, corpus="a"), TrainingSet("b", other, corpus="b"), TrainingSet("c", one, corpus="a")]
    data = join_training_sets(sets)
    assert data.num_passages == one.num_passages + 40
    assert data.deleted.tolist() == [one.num_passages + 3]
    assert data.corpora.tolist() == [[0, 60], [60, 100], [0, 60]]
    drawn: set[int] = set()
    for step in range(60):
        for query, rows in zip(*batch_at(data, OPTIONS, step), strict=True):
            first, end = data.corpus_range_of(query)
            assert (first, end) == ((60, 100) if data.mixture.sets_of([query])[0] == 1 else (0, 60))
            assert ((rows >= first) & (rows < end)).all()
            drawn |= set(rows[1:].tolist())
    assert drawn == set(range(100)) - {63}
    titles, texts = data.passages(np.array([61, 5, 99, 0]))
    assert [titles[0], titles[2]] == ["other", "other"]
    assert [texts[0], texts[2]] == ["passage 1", "passage 39"]
    assert [titles[1], titles[3]] == one.passages(np.array([5, 0]))[0]


def test_one_set_is_what_it_is() -> None:
    data = make_data()
    assert join_training_sets([TrainingSet("one", data)]) is data


def test_a_mixture_trains(tmp_path: Path) -> None:
    """The system needs no change for several sets."""
    system = dual_system(save_bert(tmp_path / "bert"), dropout=0.0)
    sets = [TrainingSet("a", make_data()), TrainingSet("b", make_data(), 2.0)]
    system.data = join_training_sets(sets, "one-task")
    trainer = Trainer(system, LoopOptions(steps=3, lr=1e-2), device=system.device, dtype=system.dtype)
    assert all(np.isfinite(trainer.step(step)) for step in range(3))


def test_positives_are_drawn_in_proportion_to_their_weights() -> None:
    pairs = make_pairs(answers=2)
    data = replace(pairs, weights=[np.array([1.0, 3.0])] * len(pairs.queries))
    drawn = [batch_at(data, OPTIONS, step, draw_positive="weighted") for step in range(400)]
    first = sum(
        int(row[0] == data.positives[query][0])
        for queries, rows in drawn
        for query, row in zip(queries, rows, strict=True)
    )
    assert first / 2400 == pytest.approx(1 / 4, abs=0.03)
    again = batch_at(data, OPTIONS, 7, draw_positive="weighted")
    assert again[1].tolist() == drawn[7][1].tolist()
    joined = join_training_sets([TrainingSet("a", data), TrainingSet("b", data)])
    assert len(joined.weights) == 2 * len(pairs.queries)
    assert join_training_sets([TrainingSet("a", data), TrainingSet("b", pairs)]).weights is None


def test_queries_without_negatives_bring_their_positive_alone() -> None:
    pairs = make_pairs()
    data = replace(pairs, negatives=[np.empty(0, np.int64)] * len(pairs.queries))
    _, rows = batch_at(data, replace(OPTIONS, negatives_per_query=0), 0)
    assert rows.shape == (6, 1)


@pytest.mark.parametrize(
    ("change", "batches", "message"),
    [
        ({"weight": 0.0}, "mixed", "training set b: weight 0, expected more than 0"),
        ({"weight": float("inf")}, "mixed", "training set b: weight inf"),
        ({"data": make_data(40)}, "mixed", "a and b are of different states of a corpus .60 and 40 passages."),
        ({"data": replace(make_data(), deleted=np.array([3]))}, "one-task", "of different states of a corpus"),
        ({"similarity": "dot"}, "mixed", "a .similarity of the encoder. and b .dot. in one batch: expected one"),
    ],
)
def test_sets_that_do_not_fit_are_refused(change: dict, batches: str, message: str) -> None:
    second = replace(TrainingSet("b", make_data()), **change)
    with pytest.raises(InputError, match=message):
        join_training_sets([TrainingSet("a", make_data()), second], batches)  # type: ignore[arg-type]
    if "similarity" in change:
        assert join_training_sets([TrainingSet("a", make_data()), second], "one-task").mixture is not None
