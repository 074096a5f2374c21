"""The result of a comparison of two runs: means, tests, and a row per query; as a document and as a data frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.indexing.store.result_files import write_files
from riptide.jobs.comparison.passages import ShownPassage
from riptide.jobs.evaluation.frames import html_table, import_frames

if TYPE_CHECKING:
    import pandas
    import polars


@dataclass(frozen=True)
class MetricComparison:
    """A metric of both runs, over all queries.

    Attributes:
        metric: Name of the metric.
        first: Mean of the first run.
        second: Mean of the second run.
        difference: Mean of the second run minus that of the first one.
        low: Lower end of the 95% bootstrap interval of the difference.
        high: Upper end of that interval.
        p_value: Two-sided p-value of a paired randomisation test.
        adjusted_p_value: The p-value adjusted for the number of compared metrics (Holm).
        won: Number of queries for which the second run has the higher value.
        equal: Number of queries with equal values.
        lost: Number of queries for which the first run has the higher value.
    """

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    adjusted_p_value: float
    won: int
    equal: int
    lost: int


@dataclass(frozen=True)
class RunResult:
    """The result of a run for a query.

    Attributes:
        values: The value of each metric.
        relevant_rank: Rank of the first relevant hit, from 1; None: no hit is relevant.
        top: The first hit; None: the run has no hit for the query.
    """

    values: Mapping[str, float]
    relevant_rank: int | None
    top: ShownPassage | None


@dataclass(frozen=True)
class ComparedQuery:
    """A query of a comparison.

    Attributes:
        id: Its id.
        text: Its text.
        difference: Value of the second run minus that of the first one, in the metric that orders the queries.
        first: The result of the first run.
        second: The result of the second run.
        relevant: The passages that are judged relevant, best grade first.
    """

    id: str
    text: str
    difference: float
    first: RunResult
    second: RunResult
    relevant: tuple[ShownPassage, ...]


@refuse_unknown_names
@dataclass(frozen=True)
class Comparison:
    """Two runs, compared for the queries of a split.

    Attributes:
        queries: Key of the query set.
        split: Its split.
        first: Name of the first run, the baseline.
        second: Name of the second run.
        metrics: The metrics; the first one orders the rows.
        rows: A row per query, by falling difference, then by id.
        recall_first: Recall of the first run at depths 1, 2, … up to its largest number of hits per query.
        recall_second: The same of the second run.
    """

    queries: str
    split: str
    first: str
    second: str
    metrics: tuple[MetricComparison, ...]
    rows: tuple[ComparedQuery, ...]
    recall_first: tuple[float, ...]
    recall_second: tuple[float, ...]

    @property
    def metric(self) -> str:
        """The metric that orders the rows."""
        return self.metrics[0].metric

    def won(self, count: int) -> tuple[ComparedQuery, ...]:
        """Returns the queries with the largest differences above 0, largest first."""
        return tuple(row for row in self.rows[:count] if row.difference > 0)

    def lost(self, count: int) -> tuple[ComparedQuery, ...]:
        """Returns the queries with the lowest differences below 0, lowest first."""
        return tuple(row for row in self.rows[::-1][:count] if row.difference < 0)

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row per query, by falling difference.

        The columns are text, difference, the values of each metric (`first nDCG@10`), first_rank and second_rank of the
        first relevant hit, the first hits (first_top, first_top_text) and `relevant`, a list of ids.

        Raises:
            InputError: If pandas is not installed.
        """
        frames = import_frames("pandas")
        ids = frames.Index([row.id for row in self.rows], name="query_id")
        frame = frames.DataFrame(list(map(_columns_of, self.rows)), index=ids)
        ranks = ["first_rank", "second_rank"]
        return frame.astype(dict.fromkeys(ranks, "Int64"))  # integers, of which some are missing

    def to_polars(self) -> polars.DataFrame:
        """Returns the columns of `to_pandas`, after a column query_id. Raises InputError if polars is not installed."""
        frames = import_frames("polars")
        types = {"first_rank": frames.Int64, "second_rank": frames.Int64, "relevant": frames.List(frames.String)}
        types |= dict.fromkeys(("first_top", "first_top_text", "second_top", "second_top_text"), frames.String)
        rows = [{"query_id": row.id, **_columns_of(row)} for row in self.rows]
        return frames.DataFrame(rows, schema_overrides=types, infer_schema_length=None)

    def _repr_html_(self) -> str:
        """Returns the metrics of both runs as a table, which a notebook shows."""
        columns = ("metric", self.first, self.second, "difference", "95% interval", "p", "won", "equal", "lost")
        rows = [
            (
                each.metric,
                each.first,
                each.second,
                each.difference,
                f"{each.low:+.4f} to {each.high:+.4f}",
                each.p_value,
                each.won,
                each.equal,
                each.lost,
            )
            for each in self.metrics
        ]
        return html_table(f"{self.queries}, split {self.split}, {len(self.rows):,} queries", columns, rows)

    def write_page(self, path: str, *, examples: int = 10, overwrite: bool = False) -> None:
        """Writes a page with charts, and with the most won and lost queries and their passages: one HTML file.

        Args:
            path: The file.
            examples: Number of the won queries, and of the lost ones.
            overwrite: Replace a file that has other content.

        Raises:
            InputError: If no file can be written there, if a file with other content exists, or if `examples` is
                below 1.
        """
        from riptide.jobs.comparison.page import render_page

        if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
            raise InputError(f"examples={examples!r}: expected an integer of at least 1")
        write_files([(path, render_page(self, examples))], overwrite=overwrite)

    def document(self) -> dict[str, Any]:
        """Returns all values as JSON values, without the texts of passages."""
        return {
            "queries": self.queries,
            "split": self.split,
            "num_queries": len(self.rows),
            "first": self.first,
            "second": self.second,
            "metrics": [asdict(each) for each in self.metrics],
            "recall": {"first": list(self.recall_first), "second": list(self.recall_second)},
            "per_query": list(map(_document_of, self.rows)),
        }


def _document_of(row: ComparedQuery) -> dict[str, Any]:
    """Returns a query as JSON values; passages are ids with grades, as the corpus has their texts."""
    document: dict[str, Any] = {"id": row.id, "text": row.text, "difference": row.difference}
    for name, result in (("first", row.first), ("second", row.second)):
        top = None if result.top is None else {"id": result.top.id, "grade": result.top.grade}
        document[name] = {"values": dict(result.values), "relevant_rank": result.relevant_rank, "top": top}
    return document | {"relevant": [{"id": each.id, "grade": each.grade} for each in row.relevant]}


def _columns_of(row: ComparedQuery) -> dict[str, Any]:
    """Returns the columns of a query in the data frame."""
    columns: dict[str, Any] = {"text": row.text, "difference": row.difference}
    results = {"first": row.first, "second": row.second}
    for metric in row.first.values:
        columns |= {f"{name} {metric}": result.values[metric] for name, result in results.items()}
    for name, result in results.items():
        columns[f"{name}_rank"] = result.relevant_rank
        columns[f"{name}_top"] = result.top.id if result.top else None
        columns[f"{name}_top_text"] = result.top.text if result.top else None
    return columns | {"relevant": [passage.id for passage in row.relevant]}
