"""Means over seeds by backbone, set and arm, and intervals of the differences of `topic` to other arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common.bootstrap import interval_over_sets
from benchmarks.topics.figures import Figures
from benchmarks.topics.runs import CHOSEN_BY, METRICS, PROTOCOLS

WITHOUT_SEEDS = ("bm25", "none")  # arms that are not trained


def summarise(figures: Figures) -> dict[str, Any]:
    """Returns the summary of the runs on test splits: under "BACKBONE PROTOCOL", arms by set, and `topic_minus`.

    A protocol without runs is left out.
    """
    runs = [record["run"] for record in figures.document["runs"].values() if record["run"]["split"] == "test"]
    sets = list(dict.fromkeys(run["data"] for run in runs))
    models = list(dict.fromkeys(run["model"] for run in runs if run["model"]))
    summary = {}
    for model in models:
        with_runs = [run["protocol"] for run in runs if run["model"] == model and run["protocol"] is not None]
        for protocol in dict.fromkeys(with_runs or PROTOCOLS[:1]):
            summary[f"{model} {protocol}"] = summarise_protocol(figures, model, protocol, sets)
    return summary


def summarise_protocol(figures: Figures, model: str, protocol: str, sets: Sequence[str]) -> dict[str, Any]:
    """Returns the means of each arm with a backbone by set, and intervals of `topic` less each other arm.

    Args:
        figures: The figures.
        model: The backbone.
        protocol: The protocol; arms without topics are in the summaries of both.
        sets: The sets.
    """
    arms: dict[str, dict[str, Any]] = {}
    differences: dict[str, dict[str, np.ndarray]] = {}
    for data in sets:
        names = names_by_arm(figures, model, data, protocol)
        arms[data] = {arm: means_of(figures, list(by_seed.values())) for arm, by_seed in names.items()}
        for arm in names:
            if (difference := topic_minus(figures, names, arm)) is not None:
                differences.setdefault(arm, {})[data] = difference
    return {"arms": arms, "topic_minus": {arm: intervals(by_set) for arm, by_set in differences.items()}}


def names_by_arm(figures: Figures, model: str, data: str, protocol: str) -> dict[str, dict[int, str]]:
    """Returns the names of the runs on the test split of a set by arm and seed, those of arms without topics too."""
    names: dict[str, dict[int, str]] = {}
    for record in figures.document["runs"].values():
        run = record["run"]
        is_on_set = run["split"] == "test" and run["data"] == data
        if is_on_set and run["model"] in (model, "") and run["protocol"] in (protocol, None):
            names.setdefault(run["arm"], {})[run["seed"]] = run["name"]
    return names


def means_of(figures: Figures, names: Sequence[str]) -> dict[str, Any]:
    """Returns the means of metrics and of measures of vectors over some runs.

    If there are several, `deviation` is the standard deviation of MAP@50, with n - 1.
    """
    records = [figures.document["runs"][name] for name in names]
    means: dict[str, Any] = {
        metric: float(np.mean([record["metrics"][metric] for record in records])) for metric in METRICS
    }
    means["seeds"] = len(records)
    if len(records) > 1:
        means["deviation"] = float(np.std([record["metrics"][CHOSEN_BY] for record in records], ddof=1))
    if all(record["vectors"] for record in records):
        means["vectors"] = {
            measure: float(np.mean([record["vectors"][measure] for record in records]))
            for measure in records[0]["vectors"]
        }
    return means


def topic_minus(figures: Figures, names: Mapping[str, Mapping[int, str]], arm: str) -> np.ndarray | None:
    """Returns MAP@50 of each query by `topic` less that by another arm, means over the seeds that both have.

    An arm that is not trained is compared with all seeds of `topic`.

    Args:
        figures: The figures.
        names: The names of the runs on a set by arm and seed.
        arm: The other arm.

    Returns:
        float64 [queries]; None for `topic` itself, and without a common seed.
    """
    if arm == "topic" or "topic" not in names:
        return None
    topic, other = names["topic"], names[arm]
    if arm in WITHOUT_SEEDS:
        seeds, others = list(topic), list(other.values())
    else:
        seeds = [seed for seed in topic if seed in other]
        others = [other[seed] for seed in seeds]
    if not seeds:
        return None
    difference: np.ndarray = mean_per_query(figures, [topic[seed] for seed in seeds]) - mean_per_query(figures, others)
    return difference


def mean_per_query(figures: Figures, names: Sequence[str]) -> np.ndarray:
    """Returns MAP@50 of each query, the mean over some runs: float64 [queries]."""
    mean: np.ndarray = np.mean([figures.queries[name][CHOSEN_BY] for name in names], axis=0)
    return mean


def intervals(differences: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Returns the mean difference with its interval by set, and over all sets if there are several."""
    by_set = {data: interval_over_sets([values]) for data, values in differences.items()}
    if len(differences) > 1:
        by_set["all sets"] = interval_over_sets(list(differences.values()))
    return by_set
