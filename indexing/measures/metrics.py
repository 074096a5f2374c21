"""Metrics of ranked lists (by ir-measures), a paired test between runs, and confidence intervals of means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.arguments import closest_name
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, alternatives
from riptide.indexing.files.qrels import GRADE, MAX_GRADE
from riptide.indexing.measures.ranked_lists import ranked_hits

RESAMPLES = 9_999  # number of random sign patterns of the paired test
BATCH_NUMBERS = 1_000_000  # number of signs drawn at once, which bounds the memory of the paired test
BOOTSTRAP_DRAWS = 2_000
MAX_CUTOFF = 1_000_000_000  # pytrec_eval aborts the process at cutoff 0 and supports at most 63 bits
NO_PASSAGE = ""  # a placeholder that is no passage's id
_NAME = re.compile(r"[A-Za-z]\w*(\([^()@#\s]*\))?(@[\d.]+)?", re.ASCII)
_ALIASES = ("MAP", "MRR", "Precision", "Recall")  # aliases of ir-measures that an error suggests for a misspelt name
_MAX_NAME = 100  # maximum number of characters of a metric's name


def metrics_per_query(qrels: pa.Table, run: pa.Table, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Computes each metric for every judged query.

    Args:
        qrels: Columns query_id, corpus_id, score.
        run: Columns query_id, id, score, ranked by `ranked_hits`. Queries without judgements are ignored.
        metrics: Names as ir-measures has them, for example nDCG@10.

    Returns:
        float64 [queries] by metric, in the order of the judged queries' ids; a query without hits has 0.

    Raises:
        InputError: For another metric than `parse_metrics` allows, and for a score beyond MAX_GRADE.
    """
    measures = parse_metrics(metrics)
    judged: dict[str, dict[str, int]] = {}
    for query, passage, score in zip(*(qrels[c].to_pylist() for c in ("query_id", "corpus_id", "score")), strict=True):
        if abs(score) > MAX_GRADE:
            raise InputError(
                f"query {query!r}, passage {passage!r}: found score {score}, expected {GRADE}; import it again"
            )
        judged.setdefault(query, {})[passage] = score
    for grades in judged.values():
        if max(grades.values()) < 0:  # Bpref of pytrec_eval overruns a buffer without a grade of at least 0
            grades[NO_PASSAGE] = 0
    # The implementations order equal scores differently, so each hit gets a different score.
    ranked = ranked_hits(run, judged)
    scores = {query: dict(zip(ids, range(len(ids), 0, -1), strict=True)) for query, ids in ranked.items() if ids}
    queries = {query: number for number, query in enumerate(sorted(judged))}
    values = {name: np.zeros(len(queries)) for name in metrics}
    for judged_only in (False, True):  # separately: in one call, NumRet would randomly use either setting
        group = [measure for measure in measures if measure.params.get("judged_only", False) is judged_only]
        for metric in _metric_provider().iter_calc(group, judged, scores) if group else ():
            for name in measures[metric.measure]:
                values[name][queries[metric.query_id]] = metric.value
    return values


def parse_metrics(metrics: Sequence[str], other_forms: Sequence[str] = ()) -> dict[Any, list[str]]:
    """Parses names of metrics; returns the names by measure of ir-measures, as RR@10 and MRR@10 are one measure.

    Args:
        metrics: Names as ir-measures has them, for example nDCG@10 or AP(rel=2).
        other_forms: Forms of the caller's other metrics, such as Answer@K, which an error names too.

    Raises:
        InputError: For a metric that ir-measures does not have or cannot compute with these parameters.
    """
    measures: dict[Any, list[str]] = {}
    for name in metrics:
        measures.setdefault(_parse_metric(name, other_forms), []).append(name)
    return measures


def check_cutoff(metric: str, cutoff: object, parameter: str = "cutoff") -> None:
    """Raises InputError unless the cutoff, or another integer parameter of a metric, is from 1 to MAX_CUTOFF."""
    if type(cutoff) is not int or not 1 <= cutoff <= MAX_CUTOFF:
        raise InputError(f"{Parameter('metrics', repr(metric))}: {parameter} {cutoff!r}: expected 1 to {MAX_CUTOFF:,}")


def _parse_metric(name: str, other_forms: Sequence[str]) -> Any:
    """Parses the name of a metric as a measure of ir-measures. Raises InputError if it cannot be computed."""
    import ir_measures

    provider = _metric_provider()
    offered = sorted({measure.NAME for each in provider.providers for measure in each.SUPPORTED_MEASURES})
    try:
        if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
            raise ValueError(name)
        measure = ir_measures.parse_measure(name)
    except (ValueError, NameError) as error:
        shown = name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "..."
        base = re.split(r"[@(]", shown, maxsplit=1)[0]
        others = [form.removesuffix("@K") for form in other_forms]
        spellings = {each.lower(): each for each in (*offered, *_ALIASES, *others)}
        close = closest_name(base.lower(), spellings)
        meant = f"{spellings[close]}{shown[len(base) :]}" if close else shown
        rest = f", and not {alternatives(other_forms)}" if other_forms else ""
        rest += f"; did you mean {meant}?" if meant != shown else ""
        raise InputError(
            f"{Parameter('metrics', repr(shown))}: not one of ir-measures' (such as nDCG@10, R@100, RR@10, AP, "
            f"AP(rel=2))" + rest
        ) from error
    if measure.NAME not in offered:
        raise InputError(
            f"{Parameter('metrics', repr(name))}: {measure.NAME} is not offered; expected {', '.join(offered)}"
        )
    for parameter, value in measure.params.items():
        if parameter in ("cutoff", "rel"):
            check_cutoff(name, value, parameter)
        elif parameter == "recall" and not (type(value) is float and 0 <= value <= 1 and round(value, 2) == value):
            raise InputError(
                f"{Parameter('metrics', repr(name))}: recall {value!r}: expected 0.0 to 1.0, of two digits"
            )
        elif parameter not in ("recall", "judged_only"):
            raise InputError(
                f"{Parameter('metrics', repr(name))}: {parameter} is not offered; expected a cutoff, rel and "
                f"judged_only alone"
            )
    try:
        is_supported = provider.supports(measure)
    except AssertionError:  # ir-measures reports missing, unknown or mistyped parameters by AssertionError
        is_supported = False
    if not is_supported:
        known = measure.SUPPORTED_PARAMS.items()
        has = [f"{parameter} (required)" if each.required else parameter for parameter, each in known]
        raise InputError(
            f"{Parameter('metrics', repr(name))}: cannot be computed with these parameters; {measure.NAME} has "
            f"{', '.join(has) or 'none'}"
        )
    return measure


def _metric_provider() -> Any:
    """Returns an ir-measures provider that combines the supported implementations.

    Accuracy is left out, as it divides by 0, and so is gdeval, a Perl script that refuses most ids.
    """
    import ir_measures

    return ir_measures.providers.FallbackProvider(
        [ir_measures.pytrec_eval, ir_measures.compat, ir_measures.judged, ir_measures.msmarco]
    )


def paired_p_value(one: np.ndarray, other: np.ndarray, seed: int = 0) -> float:
    """Computes the two-sided p-value of a paired randomisation test of equal means (Smucker et al. 2007).

    Under the null hypothesis the sign of each difference is random. The sum of the differences is compared with those
    of RESAMPLES random sign patterns, as `scipy.stats.monte_carlo_test` does, whose import takes longer than the test.

    Args:
        one: A metric of the first run, float64 [queries].
        other: The same metric of the other run, for the same queries.
        seed: Seed of the random signs.
    """
    differences = other - one
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    random, total = np.random.default_rng(seed), differences.sum()
    num_bytes, at_once = -(-len(differences) // 8), max(1, BATCH_NUMBERS // len(differences))
    error = 100 * np.finfo(np.float64).eps * abs(total)  # tolerance: sums that differ by rounding alone count as equal
    num_less = num_greater = 1
    for first in range(0, RESAMPLES, at_once):
        num_patterns = min(at_once, RESAMPLES - first)
        packed = np.frombuffer(random.bytes(num_patterns * num_bytes), np.uint8).reshape(num_patterns, num_bytes)
        is_flipped = np.unpackbits(packed, axis=1, count=len(differences)).astype(np.float64)
        sums = total - 2 * (is_flipped @ differences)
        num_less += int((sums <= total + error).sum())
        num_greater += int((sums >= total - error).sum())
    return min(1.0, 2 * min(num_less, num_greater) / (RESAMPLES + 1))


def adjust_p_values(p_values: Mapping[str, float]) -> dict[str, float]:
    """Returns p-values by name, adjusted for multiple comparisons by Holm's method (1979)."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda entry: entry[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


class Interval(NamedTuple):
    """A mean with the bounds of its 95% confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(values_by_set: Sequence[np.ndarray], weights: Sequence[float] | None = None) -> Interval:
    """Returns the mean over sets of the mean over queries, with its 95% bootstrap confidence interval.

    The queries of each set are drawn again BOOTSTRAP_DRAWS times, with replacement.

    Args:
        values_by_set: For each set, a value of each query, for example the difference of two runs: float64 [queries].
        weights: The weight of each set in the mean, which sum to 1; None: equal weights.
    """
    random = np.random.default_rng(0)
    means = np.zeros(BOOTSTRAP_DRAWS)
    weights = weights or [1 / len(values_by_set)] * len(values_by_set)
    for weight, values in zip(weights, values_by_set, strict=True):
        resampled = (values[random.integers(0, len(values), len(values))].mean() for _ in range(BOOTSTRAP_DRAWS))
        means += np.fromiter(resampled, np.float64, BOOTSTRAP_DRAWS) * weight
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(
        float(np.average([values.mean() for values in values_by_set], weights=weights)), float(low), float(high)
    )
