"""The file of figures: what is measured of each run, by set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json


class Figures:
    """The file of figures, and the one with the metrics of each query.

    Attributes:
        document: The figures: shaping options, runs by name, chosen settings, divergence and summary.
        queries: The metrics of each query by run, set and metric.

    Args:
        file: The file of figures; the other one is in the same folder.
        shaping: The options that shape all figures.

    Raises:
        ValueError: If the file has figures of other options.
    """

    def __init__(self, file: Path, shaping: Mapping[str, Any]):
        self.file, self.queries_file = file, file.with_suffix(".queries.json")
        self.document: dict[str, Any] = {"shaping": dict(shaping), "runs": {}}
        self.queries: dict[str, dict[str, dict[str, list[float]]]] = {}
        if file.exists():
            self.document = json.loads(file.read_text())
        if self.document["shaping"] != shaping:
            raise ValueError(f"{file}: has figures of other options; name another file, and another --folder")
        if self.queries_file.exists():
            self.queries = json.loads(self.queries_file.read_text())

    def has(self, name: str) -> bool:
        """Returns whether the file holds a run."""
        return name in self.document["runs"]

    def add(self, name: str, values: Mapping[str, Mapping[str, list[float]]], seconds: float) -> None:
        """Adds a run, writes the files, and prints a line.

        Args:
            name: The run.
            values: The metrics of each query by set and metric.
            seconds: How long the run took.
        """
        self.queries[name] = {data: dict(by_metric) for data, by_metric in values.items()}
        means = {
            data: {metric: float(np.mean(of_queries)) for metric, of_queries in by_metric.items()}
            for data, by_metric in values.items()
        }
        self.document["runs"][name] = {"seconds": round(seconds, 1), "sets": means}
        self.save()
        line = "  ".join(f"{data} {by_metric['nDCG@10']:.4f}" for data, by_metric in means.items())
        print(f"{name:44} {seconds:6.1f} s  nDCG@10 {line}", flush=True)

    def save(self) -> None:
        """Writes both files."""
        write_json(self.queries_file, self.queries, indent=None)
        write_json(self.file, self.document)

    def mean(self, name: str) -> float:
        """Returns the mean nDCG@10 over the sets of a run."""
        return float(np.mean([by_metric["nDCG@10"] for by_metric in self.document["runs"][name]["sets"].values()]))

    def per_query(self, names: Iterable[str], data: str) -> np.ndarray:
        """Returns nDCG@10 of each query of a set, the mean over some runs: float64 [queries]."""
        mean: np.ndarray = np.mean([self.queries[name][data]["nDCG@10"] for name in names], axis=0)
        return mean
