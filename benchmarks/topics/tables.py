"""The figures as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import header, interval_text, row
from benchmarks.topics.runs import METRICS


def tables(document: Mapping[str, Any], num_tasks: int) -> str:
    """Returns the figures as tables in Markdown.

    Args:
        document: The figures.
        num_tasks: Number of tasks of each kind in the measurement of serving.
    """
    lines = [f"{document['cpu']}.", "", *topic_lines(document.get("topics", {}))]
    for title, summary in document.get("summary", {}).items():
        for data, arms in summary["arms"].items():
            differences = {arm: by_set.get(data) for arm, by_set in summary["topic_minus"].items()}
            random_ranking = document.get("random_ranking", {}).get(f"{data} test", {})
            lines += ["", f"{title}, {data}:", "", *metric_table(arms, differences, random_ranking)]
            lines += ["", *vector_table(arms)]
        over_all = [
            f"{arm} {interval_text(by_set['all sets'], 4)}"
            for arm, by_set in summary["topic_minus"].items()
            if "all sets" in by_set
        ]
        if over_all:
            lines += ["", f"{title}, `topic` less another arm, MAP@50, mean over the sets: {'; '.join(over_all)}."]
    if "serve" in document:
        lines += ["", *serving_table(document["serve"], num_tasks)]
    return "\n".join(lines) + "\n"


def topic_lines(topics: Mapping[str, Any]) -> list[str]:
    """Returns a line for the topics of each set, by each method."""
    lines = []
    for data, by_name in topics.items():
        for name, figures in by_name.items():
            agreement = ", ".join(f"{split} {share:.2f}" for split, share in figures["agreement"].items())
            lines.append(
                f"{data}, {name}: {figures['topics']} topics with {figures['sizes']} passages; agreement {agreement}."
            )
    return lines


def metric_table(
    arms: Mapping[str, Any], differences: Mapping[str, Any], random_ranking: Mapping[str, float]
) -> list[str]:
    """Returns the lines of the table of metrics on a set.

    Args:
        arms: The means of each arm.
        differences: The interval of `topic` less each arm; None or missing if there is nothing to compare.
        random_ranking: The expected values of a random ranking by metric.
    """
    lines = header("arm", "seeds", *METRICS, "topic less it, MAP@50")
    lines.append(row("random ranking", "", *(f"{random_ranking.get(name, float('nan')):.4f}" for name in METRICS), ""))
    for arm, means in arms.items():
        interval = differences.get(arm)
        values = [f"{means[metric]:.4f}" for metric in METRICS]
        lines.append(row(arm, means["seeds"], *values, interval_text(interval, 4) if interval else ""))
    return lines


def vector_table(arms: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table of the measures of vectors on a set, from the means of each arm."""
    lines = header("arm", "alignment", "uniformity queries / passages", "cosine relevant / other")
    for arm, means in arms.items():
        if (vectors := means.get("vectors")) is not None:
            uniformity = f"{vectors['uniformity_queries']:.3f} / {vectors['uniformity_passages']:.3f}"
            cosine = f"{vectors['cosine_relevant']:.3f} / {vectors['cosine_other']:.3f}"
            lines.append(row(arm, f"{vectors['alignment']:.3f}", uniformity, cosine))
    return lines


def serving_table(served: Mapping[str, Any], num_tasks: int) -> list[str]:
    """Returns the lines of the table of mixed batches; the arguments are the figures, and that of `tables`."""
    lines = header(f"{num_tasks} tasks of each kind", "queries/s", "of no prompts", "of fixed")
    for kind, figures in served["traffic"].items():
        shares = f"{figures['share_of_none']:.2f}", f"{figures['share_of_fixed']:.2f}"
        lines.append(row(kind, f"{figures['queries_per_s']:,.0f}", *shares))
    differences = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in served["largest_difference"].items())
    lines += ["", f"Largest difference between vectors of a mixed batch and of single-task calls: {differences}."]
    return lines
