"""Makes the rows of a comparison: the results of both runs for each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.comparison.shown_passages import ShownTexts
from riptide.jobs.comparison.values import ComparedQuery, RunResult
from riptide.jobs.evaluation.document_runs import best_passages


@dataclass(frozen=True)
class Judgements:
    """The relevance judgements of the compared queries.

    Attributes:
        grades: The grade of each judged passage, by query.
        level: The grade from which a passage is relevant.
    """

    grades: Mapping[str, Mapping[str, int]]
    level: int

    @classmethod
    def from_qrels(cls, qrels: pa.Table, level: int) -> Judgements:
        """Reads the judgements in a table with the columns query_id, corpus_id, score."""
        grades: dict[str, dict[str, int]] = {}
        columns = (qrels[name].to_pylist() for name in ("query_id", "corpus_id", "score"))
        for query, passage, grade in zip(*columns, strict=True):
            grades.setdefault(query, {})[passage] = grade
        return cls(grades, level)

    def relevant(self, query: str) -> list[str]:
        """Returns the relevant passages of a query, by descending grade, then by id."""
        grades = self.grades[query]
        ids = [id for id, grade in grades.items() if grade >= self.level]
        return sorted(ids, key=lambda id: (-grades[id], id))


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its values per query, its hits and the ranks of its relevant hits.

    Attributes:
        values: The value of each query, in the order of ids, by metric.
        hits: The ids of the hits of each query, best first.
        ranks: The ranks of the relevant hits of each query, from 1, ascending.
        top_passages: The passage of the first hit of each query that has hits; another id than that of the hit if hits
            are documents.
    """

    values: Mapping[str, np.ndarray]
    hits: Mapping[str, Sequence[str]]
    ranks: Mapping[str, Sequence[int]]
    top_passages: Mapping[str, str]

    @classmethod
    def from_table(cls, table: pa.Table, values: Mapping[str, np.ndarray], judgements: Judgements) -> MeasuredRun:
        """Makes a run from the table that `read_checked_run` returns."""
        hits = ranked_hits(table, sorted(judgements.grades))
        ranks = {}
        for query, ids in hits.items():
            relevant = set(judgements.relevant(query))
            ranks[query] = [rank for rank, id in enumerate(ids, 1) if id in relevant]
        top_passages = {query: ids[0] for query, ids in hits.items() if ids}
        best = best_passages(table)
        top_passages = {query: best.get((query, id), id) for query, id in top_passages.items()}
        return cls(values, hits, ranks, top_passages)

    def recall(self, judgements: Judgements) -> tuple[float, ...]:
        """Returns the mean recall at each depth from 1 to the largest number of hits of a query.

        As in trec_eval, a query without a relevant passage counts as 0.
        """
        gains = np.zeros(max(map(len, self.hits.values()), default=0))
        for query, ranks in self.ranks.items():
            gains[np.array(ranks, np.int64) - 1] += 1 / max(1, len(judgements.relevant(query)))
        return tuple((np.cumsum(gains) / max(1, len(self.hits))).tolist())


def make_rows(
    store: Store, texts: Mapping[str, str], first: MeasuredRun, second: MeasuredRun, judgements: Judgements
) -> tuple[ComparedQuery, ...]:
    """Returns a row per query, by descending difference. Warns of passages that the corpus lacks.

    Args:
        store: The store.
        texts: The texts of the queries, by id.
        first: The first run.
        second: The second run.
        judgements: The judgements.
    """
    relevant = {query: judgements.relevant(query) for query in sorted(judgements.grades)}
    shown = {id for ids in relevant.values() for id in ids}
    shown.update(first.top_passages.values(), second.top_passages.values())
    passages = ShownTexts(Corpus.open(store), shown)
    if passages.missing:
        say(f"warning: {passages.missing_message(store.url)}")
    metric = next(iter(first.values))
    rows = []
    for number, (query, ids) in enumerate(relevant.items()):
        grades = judgements.grades[query]
        results = [_result_of_query(run, query, number, grades, passages) for run in (first, second)]
        difference = results[1].values[metric] - results[0].values[metric]
        judged = tuple(passages.shown_passage(id, grades) for id in ids)
        rows.append(ComparedQuery(query, texts[query], difference, results[0], results[1], judged))
    return tuple(sorted(rows, key=lambda row: (-row.difference, row.id)))


def _result_of_query(
    run: MeasuredRun, query: str, number: int, grades: Mapping[str, int], passages: ShownTexts
) -> RunResult:
    """Returns the result of a run for a query. number: the position of the query in the values."""
    top = passages.shown_passage(run.hits[query][0], grades, run.top_passages[query]) if run.hits[query] else None
    values = {metric: float(of_queries[number]) for metric, of_queries in run.values.items()}
    return RunResult(values, next(iter(run.ranks[query]), None), top)
