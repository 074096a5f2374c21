"""The result of a comparison of two runs, and its conversion to JSON, a data frame, a table and an HTML page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.indexing.store.result_files import write_files
from riptide.jobs.comparison.values import ComparedQuery, ComparedRuns
from riptide.jobs.evaluation.frames import import_frames, notebook_table

if TYPE_CHECKING:
    import pandas
    import polars


@refuse_unknown_names
@dataclass(frozen=True)
class Comparison(ComparedRuns):
    """The result of a comparison of two runs on the queries of a split. `ComparedRuns` lists the attributes."""

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a data frame with a row per query, by descending difference.

        The columns are text, difference, the values of each metric (`first nDCG@10`), first_rank and second_rank of the
        first relevant hit, the first hits (first_top, first_top_text) and `relevant`, a list of ids.

        Raises:
            InputError: If pandas is not installed.
        """
        frames = import_frames("pandas")
        ids = frames.Index([row.id for row in self.rows], name="query_id")
        frame = frames.DataFrame(list(map(_columns_of, self.rows)), index=ids)
        ranks = ["first_rank", "second_rank"]
        # Nullable integers: a rank is missing without a relevant hit.
        return frame.astype(dict.fromkeys(ranks, "Int64"))

    def to_polars(self) -> polars.DataFrame:
        """Returns the columns of `to_pandas` after a column query_id. Raises InputError if polars is not installed."""
        frames = import_frames("polars")
        types = {"first_rank": frames.Int64, "second_rank": frames.Int64, "relevant": frames.List(frames.String)}
        types |= dict.fromkeys(("first_top", "first_top_text", "second_top", "second_top_text"), frames.String)
        rows = [{"query_id": row.id, **_columns_of(row)} for row in self.rows]
        return frames.DataFrame(rows, schema_overrides=types, infer_schema_length=None)

    def _repr_html_(self) -> str:
        """Returns the metrics of both runs as an HTML table, which a notebook shows."""
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
        return notebook_table(f"{self.queries}, split {self.split}, {len(self.rows):,} queries", columns, rows)

    def write_page(self, path: str, *, examples: int = 10, overwrite: bool = False) -> None:
        """Writes one HTML file with charts, the queries with the largest gains and losses, and their passages.

        Args:
            path: The file.
            examples: Number of the won queries, and of the lost ones.
            overwrite: Replace a file that has other content.

        Raises:
            InputError: If no file can be written there, if a file with other content exists, or if `examples` is
                below 1.
        """
        from riptide.jobs.comparison.comparison_page import render_page

        if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
            raise InputError(f"examples={examples!r}: expected an integer of at least 1")
        write_files([(path, render_page(self, examples))], overwrite=overwrite)

    def document(self) -> dict[str, Any]:
        """Returns the comparison as JSON values, without the texts of passages."""
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
    """Returns a query and its results as JSON values. Passages are ids with grades, as the corpus has their texts."""
    document: dict[str, Any] = {"id": row.id, "text": row.text, "difference": row.difference}
    for name, result in (("first", row.first), ("second", row.second)):
        top = None if result.top is None else {"id": result.top.id, "grade": result.top.grade}
        document[name] = {"values": dict(result.values), "relevant_rank": result.relevant_rank, "top": top}
    return document | {"relevant": [{"id": each.id, "grade": each.grade} for each in row.relevant]}


def _columns_of(row: ComparedQuery) -> dict[str, Any]:
    """Returns the columns of a query's row in the data frame."""
    columns: dict[str, Any] = {"text": row.text, "difference": row.difference}
    results = {"first": row.first, "second": row.second}
    for metric in row.first.values:
        columns |= {f"{name} {metric}": result.values[metric] for name, result in results.items()}
    for name, result in results.items():
        columns[f"{name}_rank"] = result.relevant_rank
        columns[f"{name}_top"] = result.top.id if result.top else None
        columns[f"{name}_top_text"] = result.top.text if result.top else None
    return columns | {"relevant": [passage.id for passage in row.relevant]}
