"""The results of an evaluation: means, values per query and p-values, as tables, JSON values and data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.arguments import refuse_unknown_names
from riptide.jobs.evaluation.frames import import_frames, notebook_table

if TYPE_CHECKING:
    import pandas
    import polars

    from riptide.indexing.measures.lengths import PassageLength

RANDOM = "random ranking"  # name of the row of expected values in the table


@refuse_unknown_names
@dataclass(frozen=True)
class Evaluation:
    """The metrics of some runs on the same queries.

    Attributes:
        queries: Key of the query set.
        split: The split of the queries.
        query_ids: The measured queries, in the order of the values per query.
        metrics: Names of the metrics.
        per_query: The values of each run and metric, float64 [queries]; the first run is the baseline.
        p_values: For each metric and run but the first: the p-value of a two-sided paired randomisation test against
            the first run, adjusted for the number of runs (Holm).
        random_ranking: The expected values of a random order of the passages, by metric; empty unless passages are
            relevant by category.
        categories_field: The metadata field with the categories; None: passages are relevant as they are judged.
        median_lengths: The median length of the first passages, by run; empty unless it was requested.
    """

    queries: str
    split: str
    query_ids: list[str]
    metrics: list[str]
    per_query: dict[str, dict[str, np.ndarray]]
    p_values: dict[str, dict[str, float]]
    random_ranking: dict[str, float] = field(default_factory=dict)
    categories_field: str | None = None
    median_lengths: dict[str, PassageLength] = field(default_factory=dict)

    @property
    def runs(self) -> list[str]:
        """The names of the runs, in the order in which they were given."""
        return list(self.per_query)

    @property
    def mean(self) -> dict[str, dict[str, float]]:
        """The mean over the queries, by run and metric."""
        return {
            name: {metric: float(values.mean()) for metric, values in by_metric.items()}
            for name, by_metric in self.per_query.items()
        }

    def to_pandas(self, *, per_query: bool = False) -> pandas.DataFrame:
        """Returns the means as a pandas data frame: a row per run, a column per metric.

        Args:
            per_query: Return the values per query instead: a row per query, a column per run and metric.

        Raises:
            InputError: If pandas is not installed.
        """
        frames = import_frames("pandas")
        if not per_query:
            frame = frames.DataFrame.from_dict(self.mean, orient="index", columns=self.metrics)
            return frame.rename_axis(index="run")
        columns = {(name, metric): v for name, values in self.per_query.items() for metric, v in values.items()}
        frame = frames.DataFrame(columns, index=frames.Index(self.query_ids, name="query_id"))
        return frame.rename_axis(columns=["run", "metric"]) if columns else frame

    def to_polars(self, *, per_query: bool = False) -> polars.DataFrame:
        """Returns the means as a polars data frame: a row per run, with the column run and a column per metric.

        Args:
            per_query: Return the values per query instead: a row per run and query, with the further column query_id.

        Raises:
            InputError: If polars is not installed.
        """
        frames = import_frames("polars")
        if not per_query:
            means = self.mean
            columns = {metric: [means[run][metric] for run in self.runs] for metric in self.metrics}
            return frames.DataFrame({"run": self.runs, **columns})
        rows = {
            "run": [run for run in self.runs for _ in self.query_ids],
            "query_id": self.query_ids * len(self.runs),
        }
        values = {m: np.concatenate([self.per_query[run][m] for run in self.runs]) for m in self.metrics}
        return frames.DataFrame({**rows, **values})

    def _repr_html_(self) -> str:
        """Returns the means and the p-values as HTML tables, which a notebook shows."""
        names = [f"p of {metric}" for metric in self.p_values] if len(self.runs) > 1 else []
        rows = [
            (
                run,
                *(means[metric] for metric in self.metrics),
                *(self.p_values[metric].get(run) for metric in self.p_values if names),
            )
            for run, means in self.mean.items()
        ]
        title = f"{self.queries}, split {self.split}, {len(self.query_ids):,} queries"
        return notebook_table(title, ("run", *self.metrics, *names), rows)

    def document(self) -> dict[str, Any]:
        """Returns the results as JSON values, in the form of the file that the job `evaluate` writes."""
        document: dict[str, Any] = {
            "mean": self.mean,
            "p_against_first": self.p_values,
            "query_ids": self.query_ids,
            "per_query": {name: {m: v.tolist() for m, v in values.items()} for name, values in self.per_query.items()},
        }
        if self.categories_field is not None:
            document["relevance"] = {"category": self.categories_field}
            document["random_ranking"] = self.random_ranking
        if self.median_lengths:
            document["median_length"] = {name: asdict(length) for name, length in self.median_lengths.items()}
        return document

    def __str__(self) -> str:
        """Returns the tables of means and p-values, and a line for each median length."""
        lines = []
        if self.metrics:
            lines.append(format_table(self.mean | ({RANDOM: self.random_ranking} if self.random_ranking else {})))
            if len(self.runs) > 1:
                lines.append(format_tests(self.runs[0], self.p_values))
        for name, length in self.median_lengths.items():
            lines.append(
                f"{name}: median length {length.words:g} words, of the {length.passages:,} passages among the first "
                f"{length.depth} of each query"
            )
        return "\n".join(lines)


def format_table(means: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table of means with a line per run and a column per metric."""
    metrics = list(next(iter(means.values())))
    return _align_columns(
        "run", {name: [f"{values[m]:.4f}" for m in metrics] for name, values in means.items()}, metrics
    )


def format_tests(first_run: str, p_values: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table of p-values against the first run, with a line per run and a column per metric."""
    metrics = list(p_values)
    names = p_values[metrics[0]]
    rows = {name: [f"{p_values[metric][name]:.4f}" for metric in metrics] for name in names}
    corrected = ", adjusted for the number of tests in each column (Holm)" if len(names) > 1 else ""
    title = f"p-values against {first_run}: two-sided paired randomisation test over the queries{corrected}"
    return f"\n{title}\n{_align_columns('run', rows, metrics)}"


def _align_columns(title: str, rows: Mapping[str, Sequence[str]], headings: Sequence[str]) -> str:
    """Returns a table with aligned columns. rows: the cells of each line, by the name of the line."""
    width = max(map(len, [title, *rows]))
    widths = [max(len(heading), 6) for heading in headings]
    lines = {title: headings} | dict(rows)
    cells = ((name, zip(row, widths, strict=True)) for name, row in lines.items())
    return "\n".join(name.ljust(width) + "".join(f"  {cell:>{size}}" for cell, size in row) for name, row in cells)
