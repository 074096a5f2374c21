"""The file of figures: what is measured of each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.topics.runs import Run, Values


class Figures:
    """The file of figures, and the one with the metrics of each query.

    Attributes:
        document: The figures: options, cpu, topics of the sets, chosen settings, runs by name, summary and serve.
        queries: The metrics of each query by run and metric.

    Args:
        file: The file of figures; the other one is in the same folder.
        shaping: The options that shape all figures.
    """

    def __init__(self, file: Path, shaping: Mapping[str, Any]):
        self.file, self.queries_file = file, file.with_suffix(".queries.json")
        self.document: dict[str, Any] = {"options": dict(shaping), "cpu": cpu_name(), "runs": {}}
        self.queries: dict[str, dict[str, list[float]]] = {}
        if file.exists():
            self.document = json.loads(file.read_text())
            if (actual := self.document["options"]) != dict(shaping):
                raise SystemExit(f"--json {file}: has figures of other options, {actual}: name another file and folder")
        if self.queries_file.exists():
            self.queries = json.loads(self.queries_file.read_text())

    def has(self, run: Run) -> bool:
        """Returns whether the file holds a run. Ends the program if it was made with other settings."""
        record = self.document["runs"].get(run.name)
        if record is not None and record["run"] != asdict(run):
            raise SystemExit(
                f"{self.file}: the run {run.name} was made with {record['run']}, the options ask for {asdict(run)}: "
                "name another file and folder"
            )
        return record is not None

    def add(self, run: Run, values: Values, seconds: float) -> None:
        """Adds a run, writes the files, and prints a line."""
        means = {metric: float(of_queries.mean()) for metric, of_queries in values.metrics.items()}
        random_rankings = self.document.setdefault("random_ranking", {})
        random_rankings.setdefault(f"{run.data} {run.split}", values.random_ranking)
        self.queries[run.name] = {
            metric: np.round(of_queries, 6).tolist() for metric, of_queries in values.metrics.items()
        }
        self.document["runs"][run.name] = {
            "run": asdict(run),
            "seconds": round(seconds, 1),
            "metrics": means,
            "vectors": values.vectors,
        }
        self.save()
        line = "  ".join(f"{metric} {mean:.4f}" for metric, mean in means.items())
        print(f"{run.name:56} {seconds:6.1f} s  {line}", flush=True)

    def save(self) -> None:
        """Writes both files."""
        write_json(self.queries_file, self.queries)
        write_json(self.file, self.document)
