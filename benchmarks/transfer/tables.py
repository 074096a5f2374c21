"""Intervals of the differences between arms, and the figures as tables in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common.bootstrap import interval_over_sets
from benchmarks.common.markdown import header, interval_text, row
from benchmarks.transfer.figures import Figures
from benchmarks.transfer.runs import ARMS

PARTS = ("zero-shot", "in-domain")  # parts with a table of sets
FEW_SHOT = "few-shot"
PAIRS = (  # arms whose difference is reported
    ("shared", "minilm"),
    ("per-task", "minilm"),
    ("hyper", "minilm"),
    ("hyper", "shared"),
    ("hyper", "per-task"),
    ("hyper", "hyper-uniform"),
    ("hyper", "hyper-free"),
    ("fine-tune", "minilm"),
    ("fine-tune", "shared"),
    ("fine-tune", "hyper"),
    ("fine-tune", "hyper-free"),
)


def summarise(figures: Figures, sets: Sequence[str]) -> dict[str, Any]:
    """Returns nDCG@10 and intervals of the differences between arms: of zero-shot, in-domain and few-shot runs.

    For zero-shot and in-domain, arms that are not measured on all sets are left out.
    """
    summary: dict[str, Any] = {}
    for part in PARTS:
        values: dict[str, dict[str, np.ndarray]] = {}
        for arm in ("minilm", *ARMS, "fine-tune"):
            names = {data: names_of(figures, part, arm, data) for data in sets}
            if all(names.values()):
                values[arm] = {data: figures.per_query(names[data], data) for data in sets}
        summary[part] = {
            "nDCG@10": {
                arm: {data: float(of_set.mean()) for data, of_set in by_set.items()} for arm, by_set in values.items()
            },
            "differences": {
                f"{one} - {other}": difference(values[one], values[other])
                for one, other in PAIRS
                if one in values and other in values
            },
        }
    summary[FEW_SHOT] = summarise_few_shot(figures)
    return summary


def summarise_few_shot(figures: Figures) -> list[dict[str, Any]]:
    """Returns, for each set and number of its training queries, nDCG@10 of `shared` and `hyper`, and the difference."""
    pattern = r"few-(?P<data>.+)-(?P<size>\d+)-hyper"
    matches = [match for name in figures.document["runs"] if (match := re.fullmatch(pattern, name))]
    rows: list[dict[str, Any]] = []
    for data, size in sorted((match["data"], int(match["size"])) for match in matches):
        names = {arm: f"few-{data}-{size}-{arm}" for arm in ("shared", "hyper")}
        if not all(figures.has(name) for name in names.values()):
            continue
        values = {arm: figures.per_query([name], data) for arm, name in names.items()}
        means = {arm: float(of_arm.mean()) for arm, of_arm in values.items()}
        rows.append(
            {
                "set": data,
                "queries": size,
                **means,
                "difference": interval_over_sets([values["hyper"] - values["shared"]]),
            }
        )
    return rows


def names_of(figures: Figures, part: str, arm: str, data: str) -> list[str]:
    """Returns the names of the runs of an arm that were measured on the test split of a set, one for each seed.

    Args:
        figures: The figures.
        part: zero-shot or in-domain.
        arm: The arm; minilm: the backbone without a prompt.
        data: The set.
    """
    if arm == "minilm":
        pattern = f"minilm-{data}"
    elif part == "zero-shot":
        pattern = rf"zero-{data}-{arm}-\d+"
    else:
        pattern = rf"all-{arm}-\d+"
    return [name for name in figures.document["runs"] if re.fullmatch(pattern, name)]


def difference(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Returns the difference of two arms with its interval by set, and its mean over the sets."""
    differences = {data: one[data] - other[data] for data in one}
    by_set = {data: interval_over_sets([values]) for data, values in differences.items()}
    return {**by_set, "mean": interval_over_sets(list(differences.values()))}


def tables(document: Mapping[str, Any], sets: Sequence[str]) -> str:
    """Returns the figures as tables in Markdown."""
    lines = [f"{document['cpu']}. Chosen: {json.dumps(document['chosen'])}"]
    for part in PARTS:
        summary = document["summary"][part]
        lines += ["", *header(f"{part}, nDCG@10", *sets, "mean")]
        for arm, by_set in summary["nDCG@10"].items():
            means = [by_set[data] for data in sets]
            lines.append(row(arm, *(f"{mean:.3f}" for mean in [*means, np.mean(means)])))
        lines += ["", *header(f"{part}, difference", *sets, "mean")]
        for pair, intervals in summary["differences"].items():
            lines.append(row(pair, *(interval_text(interval, 3) for interval in intervals.values())))
    if rows := document["summary"].get(FEW_SHOT):
        lines += ["", *header("few-shot, nDCG@10", "training queries", "shared", "hyper", "hyper - shared")]
        for of in rows:
            means = f"{of['shared']:.3f}", f"{of['hyper']:.3f}"
            lines.append(row(of["set"], of["queries"], *means, interval_text(of["difference"], 3)))
    if divergence := document.get("divergence"):
        titles = "divergence of weights, nats", "within a set", "between sets", "effective basic prompts"
        lines += ["", *header(*titles)]
        for name, figures in divergence.items():
            of_queries = f"{figures['within']:.2g}", f"{figures['between']:.2g}"
            lines.append(row(name, *of_queries, f"{figures['effective_prompts']:.1f}"))
    return "\n".join(lines) + "\n"
