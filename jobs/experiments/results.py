"""The values of an experiment by set, arm and seed, with confidence intervals, paired tests and Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from riptide.indexing.measures.metrics import Interval, bootstrap_interval, paired_p_value

Masks = Mapping[str, Mapping[str, np.ndarray]]
"""Which queries belong to a subset, by set and subset: bool [queries]."""


@dataclass(frozen=True)
class RunValues:
    """The metrics per query and further figures of one run.

    Attributes:
        metrics: The values of each query by metric, float64 [queries].
        figures: Other figures by name.
    """

    metrics: dict[str, np.ndarray]
    figures: dict[str, float]


@dataclass
class Results:
    """Collects the values of an experiment.

    Attributes:
        values: By set, arm and seed.
        untrained: The arms without training runs, which are compared with all seeds of others.
    """

    untrained: set[str]
    values: dict[str, dict[str, dict[int, RunValues]]] = field(default_factory=dict)

    def add(self, set_name: str, arm: str, seed: int, values: RunValues) -> None:
        """Adds the values of an arm on a set, for one seed."""
        self.values.setdefault(set_name, {}).setdefault(arm, {})[seed] = values

    def mean(self, set_name: str, arm: str, metric: str, seeds: Sequence[int] | None = None) -> np.ndarray:
        """Returns the values of a metric per query, averaged over seeds of an arm (default: all): float64 [queries]."""
        by_seed = self.values[set_name][arm]
        mean: np.ndarray = np.mean([by_seed[seed].metrics[metric] for seed in seeds or by_seed], axis=0)
        return mean

    def pair(self, set_name: str, one: str, other: str, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the values of a metric per query for two arms, each averaged over the seeds that both have.

        If an arm is untrained, each is averaged over all its seeds. None: the set lacks an arm, or no seed is common.
        """
        if not {one, other} <= self.values.get(set_name, {}).keys():
            return None
        shared = [seed for seed in self.values[set_name][one] if seed in self.values[set_name][other]]
        seeds = None if {one, other} & self.untrained else shared
        if seeds == []:
            return None
        return self.mean(set_name, one, metric, seeds), self.mean(set_name, other, metric, seeds)


def summarise(results: Results, pairs: Sequence[tuple[str, str]], subsets: Masks) -> dict[str, Any]:
    """Returns the figures as JSON values: for each set and subset, and for the mean over the sets.

    Args:
        results: The values.
        pairs: Arms whose difference is reported.
        subsets: Which queries belong to each subset, apart from all queries, for the sets that have subsets.
    """
    document: dict[str, Any] = {}
    every: dict[str, np.ndarray] = {}
    for set_name, arms in results.values.items():
        first = next(iter(next(iter(arms.values())).values())).metrics
        metrics = [*first]
        every[set_name] = np.ones(len(first[metrics[0]]), bool)
        document[set_name] = {"by_seed": _by_seed(arms), "figures": _mean_figures(arms), "subsets": {}}
        for subset, mask in {"all": every[set_name], **subsets.get(set_name, {})}.items():
            document[set_name]["subsets"][subset] = {
                "queries": int(mask.sum()),
                "arms": {
                    arm: {metric: bootstrap_interval([results.mean(set_name, arm, metric)[mask]]) for metric in metrics}
                    for arm in arms
                },
                "differences": _compare_pairs(results, [set_name], metrics, pairs, {set_name: mask}),
            }
    if len(results.values) > 1:
        document["mean over sets"] = _compare_pairs(results, [*results.values], metrics, pairs, every)
    return document


def _by_seed(arms: Mapping[str, Mapping[int, RunValues]]) -> dict[str, list[dict[str, float]]]:
    """Returns the means of the metrics over the queries, for each arm and seed."""
    return {
        arm: [{metric: float(v.mean()) for metric, v in values.metrics.items()} for values in by_seed.values()]
        for arm, by_seed in arms.items()
    }


def _mean_figures(arms: Mapping[str, Mapping[int, RunValues]]) -> dict[str, dict[str, float]]:
    """Returns the figures that are no metrics, averaged over the seeds of each arm."""
    return {
        arm: {name: float(np.mean([v.figures[name] for v in by_seed.values()])) for name in runs[0].figures}
        for arm, by_seed in arms.items()
        if (runs := list(by_seed.values()))[0].figures
    }


def _compare_pairs(
    results: Results,
    sets: Sequence[str],
    metrics: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    masks: Mapping[str, np.ndarray],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the differences of pairs of arms that all sets have: confidence intervals, and p-values for one set."""
    document: dict[str, dict[str, dict[str, Any]]] = {}
    for one, other in pairs:
        for metric in metrics:
            values = [results.pair(set_name, one, other, metric) for set_name in sets]
            masked = [
                (v[0][masks[set_name]], v[1][masks[set_name]]) for set_name, v in zip(sets, values, strict=True) if v
            ]
            if len(masked) < len(sets):
                break
            interval = bootstrap_interval([a - b for a, b in masked])
            p = {"p": paired_p_value(masked[0][1], masked[0][0])} if len(sets) == 1 else {}
            document.setdefault(f"{one} - {other}", {})[metric] = {"interval": interval, **p}
    return document


def markdown_tables(document: Mapping[str, Any]) -> list[str]:
    """Returns the figures of `summarise` as lines of Markdown."""
    lines: list[str] = []
    for set_name, of_set in document.items():
        if set_name == "mean over sets":
            lines += ["", "Mean over the sets:", *_difference_table(of_set)] if of_set else []
            continue
        for subset, figures in of_set["subsets"].items():
            lines += ["", f"{' '.join(filter(None, (set_name, subset)))}: {figures['queries']:,} queries", ""]
            metrics = list(next(iter(figures["arms"].values())))
            lines += _table_header("arm", *metrics, f"{metrics[0]} by seed")
            for arm, intervals in figures["arms"].items():
                by_seed = ", ".join(f"{means[metrics[0]]:.4f}" for means in of_set["by_seed"][arm])
                lines.append(_table_row(arm, *(_interval_cell(interval) for interval in intervals.values()), by_seed))
            lines += _difference_table(figures["differences"])
        lines += _figure_lines(of_set["figures"])
    return lines[1:]


def _figure_lines(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns one Markdown line with the figures that are equal for all arms, and a table of the others."""
    names = dict.fromkeys(name for of_arm in figures.values() for name in of_arm)
    values = {name: {of_arm[name] for of_arm in figures.values() if name in of_arm} for name in names}
    shared = {name: of_arms.pop() for name, of_arms in values.items() if len(figures) > 1 and len(of_arms) == 1}
    lines = ["", "; ".join(f"{name} {value:,.4g}" for name, value in shared.items())] if shared else []
    if others := [name for name in names if name not in shared]:
        lines += ["", *_table_header("arm", *others)]
        for arm, of_arm in figures.items():
            if not of_arm.keys().isdisjoint(others):
                lines.append(_table_row(arm, *(f"{of_arm[name]:,.4g}" if name in of_arm else "" for name in others)))
    return lines


def _difference_table(differences: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns the Markdown table of differences; [] if there are none."""
    if not differences:
        return []
    lines = ["", *_table_header("difference", *next(iter(differences.values())))]
    for pair, by_metric in differences.items():
        tests = (f" (p = {each['p']:.2g})" if "p" in each else "" for each in by_metric.values())
        cells = (
            _interval_cell(each["interval"], "+") + test for each, test in zip(by_metric.values(), tests, strict=True)
        )
        lines.append(_table_row(pair, *cells))
    return lines


def _interval_cell(interval: Interval, sign: str = "") -> str:
    """Formats a mean and its confidence interval as a table cell."""
    mean, low, high = (f"{value:{sign}.4f}" for value in interval)
    return f"{mean} [{low}, {high}]"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return [*_table_header(*head), *(_table_row(*row) for row in rows)]


def _table_header(*titles: str) -> list[str]:
    """Returns the header row and the separator row of a Markdown table."""
    return [_table_row(*titles), "| --- " * len(titles) + "|"]


def _table_row(*cells: str) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
