"""Reads the quality and the rate of runs from results files of `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from riptide.base.errors import InputError
from riptide.base.text_files import read_small_text
from riptide.base.wording import Parameter, list_first, shown
from riptide.indexing.training.named_values import parse_named_value
from riptide.jobs.pictures.rate_chart import RatePoint
from riptide.retriever.model.json_fields import parse_json

MAX_RATE, MAX_QUALITY = 1e9, 1e9  # maximum values; the smallest rate is 1 / MAX_RATE
MAX_POINTS = 1_000  # maximum number of retrievers in a picture


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Parses queries per second given as `RUN=NUMBER`. Raises InputError for another form."""
    rates = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not name or not _is_rate(rate):
            raise InputError(f"{Parameter('rate', repr(text))}: expected RUN=NUMBER, queries per second above 0")
        rates[name] = rate
    return rates


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Parses labels given as `RUN=TEXT`. Raises InputError for another form."""
    return dict(parse_named_value(text, f"{Parameter('label', repr(text))}: expected RUN=TEXT") for text in texts)


def read_points(
    files: Sequence[str], metric: str | None, rates: Mapping[str, float], labels: Mapping[str, str]
) -> tuple[str, list[RatePoint]]:
    """Returns the metric, and a point for each label of the runs in results files of `evaluate`.

    Runs with the same label, for example of several query sets, are one point: the mean of their qualities, and the
    harmonic mean of their rates, which is the rate of a mix with as many queries of each.

    Args:
        files: The files.
        metric: The metric; None: the first one of the first file.
        rates: Queries per second by run, in place of those of the files.
        labels: Names in the picture by run; other runs have their own.

    Raises:
        InputError: If a file is none of `evaluate`, lacks the metric or the rate of a run, or if `rates` or `labels`
            name a run that no file has.
    """
    measured: dict[str, list[tuple[float, float]]] = {}
    runs: set[str] = set()
    for file in files:
        document = _read_evaluation(file)
        for run, means in document["mean"].items():
            metric = metric or next(iter(means), None)
            if metric is None or metric not in means:
                have = list_first(means, 20) or "none"
                raise InputError(
                    f"{file}: {shown(run)} has no {metric or 'metric'}, it has {have}; name one of them with "
                    f"{Parameter('metric')}, or evaluate the run again"
                )
            rate = rates.get(run) or document.get("rates", {}).get(run, {}).get("queries_per_s")
            if rate is None:
                raise InputError(
                    f"{file}: {shown(run)} has no rate; evaluate its source with {Parameter('rate_queries')}, or give "
                    f"the rate as {Parameter('rate', run)}=NUMBER"
                )
            runs.add(run)
            measured.setdefault(labels.get(run, run), []).append((rate, float(means[metric])))
    for parameter, named in (("rate", rates), ("label", labels)):
        if unknown := [run for run in named if run not in runs]:
            raise InputError(
                f"{Parameter(parameter, unknown[0])}: no file has such a run; there are: {list_first(sorted(runs), 20)}"
            )
    assert metric is not None
    points = []
    for label, values in measured.items():
        rate = len(values) / sum(1 / rate for rate, _ in values)
        points.append(RatePoint(shown(label), rate, sum(quality for _, quality in values) / len(values)))
    if len(points) > MAX_POINTS:
        raise InputError(f"{', '.join(files)}: found {len(points):,} runs, expected at most {MAX_POINTS:,}")
    return shown(metric), points


def _is_rate(value: float) -> bool:
    return 1 / MAX_RATE <= value <= MAX_RATE


def _read_evaluation(file: str) -> dict[str, Any]:
    """Reads a results file of `evaluate`. Raises InputError if it has no metrics of runs."""
    try:
        document = parse_json(read_small_text(file, "expected a file of evaluate"))
        means = document["mean"]
        values = [value for metrics in means.values() for value in metrics.values()]
        are_numbers = all(isinstance(value, float) and abs(value) <= MAX_QUALITY for value in values)
        rates = document.get("rates", {})
        are_rates = all(_is_rate(rate["queries_per_s"]) for rate in rates.values())
    except FileNotFoundError as error:
        raise InputError(f"{file}: {error.strerror}; expected a file of evaluate") from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        are_numbers = are_rates = False
    if not are_numbers or not are_rates or not means:
        raise InputError(
            f"{file}: not a file of evaluate with runs; name one that evaluate {Parameter('run')} or "
            f"{Parameter('source')} has made"
        )
    content: dict[str, Any] = document
    return content
