"""Writes an HTML report on mined negatives: overlap of sources, pairs that denoising removes, and examples."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.figures import escape_math, new_figure, png_bytes
from riptide.base.html_page import STYLE, html_page, html_picture, html_table
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.pools import sources_of
from riptide.indexing.store.result_files import write_files

THRESHOLDS = (0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 10)))
PROBABILITY_BINS = 50
PROBABILITY_EDGES = [number / PROBABILITY_BINS for number in range(PROBABILITY_BINS + 1)]
_MAX_BINS = 64  # maximum number of bins of a histogram whose range is unknown in advance
_COMBINATIONS = 12  # maximum number of combinations of sources in the chart; the table has all


@dataclass(frozen=True)
class ShownNegative:
    """The data of a mined negative that the report shows."""

    title: str
    text: str
    ranks: Mapping[str, int | None]  # source -> rank from 1; None: the source did not find the passage
    probability: float | None  # the re-ranker's probability of relevance; None: not scored
    denoised: bool


@dataclass(frozen=True)
class ShownQuery:
    """A query with the texts of its positives, and its negatives."""

    question: str
    positives: Sequence[str]
    negatives: Sequence[ShownNegative]


class Histogram:
    """A histogram of values whose range is unknown in advance, with at most _MAX_BINS bins of equal width.

    The width is the smallest power of two, at least `min_width`, that covers the values so far; edges are multiples of
    it. So the result does not depend on the order of the values.
    """

    def __init__(self, min_width: float = 2.0**-20):
        self.width = min_width
        self._counts: Counter[int] = Counter()

    def add(self, values: np.ndarray) -> None:
        """Counts finite values, [n], in their bins."""
        values = np.asarray(values, np.float64)
        if len(values):
            self._extend_to(float(values.min()), float(values.max()))
            numbers, counts = np.unique(np.floor(values / self.width).astype(np.int64), return_counts=True)
            self._counts.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def _extend_to(self, low: float, high: float) -> None:
        """Widens the bins until they cover `low`, `high` and the values so far."""
        if self._counts:
            low, high = min(low, min(self._counts) * self.width), max(high, max(self._counts) * self.width)
        width = self.width
        # Values far from 0 need wider bins, so that a float64 holds the number of a bin exactly.
        while (last := math.floor(high / width)) - (first := math.floor(low / width)) >= _MAX_BINS or (
            max(-first, last) > 2**50
        ):
            width *= 2
        counts: Counter[int] = Counter()
        for number, count in self._counts.items():
            counts[math.floor(number * self.width / width)] += count
        self._counts, self.width = counts, width

    def bins(self) -> tuple[list[float], list[int]]:
        """Returns (edges, counts): edges ascending, one more than counts; two empty lists if there are no values."""
        if not self._counts:
            return [], []
        first, last = min(self._counts), max(self._counts)
        edges = [number * self.width for number in range(first, last + 2)]
        return edges, [self._counts[number] for number in range(first, last + 1)]


class PoolStatistics:
    """Statistics of a pool and its scores, collected part by part, in any order."""

    def __init__(self) -> None:
        self.questions = self.candidates = self.scored = 0
        self.overlap: Counter[tuple[str, ...]] = Counter()
        self.ranks: dict[str, Histogram] = {}
        self.scores: dict[str, Histogram] = {}
        self.probabilities = np.zeros(PROBABILITY_BINS, np.int64)
        self.removed = np.zeros(len(THRESHOLDS), np.int64)
        self.dropped: Counter[str] = Counter()

    def add(self, table: pa.Table, probabilities: np.ndarray | None = None) -> None:
        """Adds the statistics of a part of a pool (`pools.pool_hits`) with its re-ranker probabilities.

        Args:
            table: The part.
            probabilities: float32 [pairs], NaN for pairs without a score; None if there are no scores.

        Raises:
            InputError: If the part has other sources than the parts before it.
        """
        sources = sources_of(table)
        if self.ranks and sources != list(self.ranks):
            raise InputError(f"found a part with the sources {', '.join(sources)}, expected {', '.join(self.ranks)}")
        self.questions += len(table["query"].unique())
        self.candidates += len(table)
        kinds = np.zeros(len(table), np.int64)  # a bit per source, as np.unique is slow on rows of bools
        for number, source in enumerate(sources):
            column = table[f"rank:{source}"]
            kinds |= np.asarray(column.is_valid()).astype(np.int64) << number
            ranks = np.asarray(column.drop_null(), np.float64) - 1  # from 0, as bins begin at multiples of their width
            self.ranks.setdefault(source, Histogram(1.0)).add(ranks)
            self.scores.setdefault(source, Histogram()).add(np.asarray(table[f"score:{source}"].drop_null()))
        for kind, count in zip(*(each.tolist() for each in np.unique(kinds, return_counts=True)), strict=True):
            self.overlap[tuple(source for number, source in enumerate(sources) if kind >> number & 1)] += count
        if probabilities is not None:
            known_probabilities = probabilities[~np.isnan(probabilities)]
            self.scored += len(known_probabilities)
            self.probabilities += np.histogram(known_probabilities, PROBABILITY_BINS, (0, 1))[0]
            # The negated comparison is that of mining.
            self.removed += [int((~(known_probabilities < threshold)).sum()) for threshold in THRESHOLDS]

    def add_dropped(self, table: pa.Table) -> None:
        """Counts the reasons why candidates were dropped, from a table of negatives (`sample_negatives`)."""
        self.dropped.update(table["dropped_by"].combine_chunks().flatten().to_pylist())

    def numbers(self) -> dict[str, Any]:
        """Returns all statistics as a JSON-able dictionary. Shares are fractions of 1; bins, also of ranks, are
        [start, end)."""
        sources = {}
        for source in self.ranks:
            sources[source] = {
                "found": sum(count for kind, count in self.overlap.items() if source in kind),
                "found_alone": self.overlap[(source,)],
                "ranks": _bins_as_lists(self.ranks[source], 1),
                "scores": _bins_as_lists(self.scores[source], 0),
            }
        ordered = sorted(self.overlap.items(), key=lambda item: (-item[1], item[0]))
        shares = [
            {"threshold": t, "pairs": n, "share": n / self.scored if self.scored else None}
            for t, n in zip(THRESHOLDS, self.removed.tolist(), strict=True)
        ]
        return {
            "questions": self.questions,
            "candidates": self.candidates,
            "scored": self.scored,
            "sources": sources,
            "overlap": [{"sources": list(kind), "candidates": count} for kind, count in ordered],
            "probabilities": {"edges": PROBABILITY_EDGES, "counts": self.probabilities.tolist()},
            "removed": shares,
            "dropped": [
                {"limit": reason.partition(":")[0], "scorer": reason.partition(":")[2], "candidates": count}
                for reason, count in sorted(self.dropped.items())
            ],
        }


def _bins_as_lists(histogram: Histogram, shift: int) -> dict[str, list]:
    edges, counts = histogram.bins()
    return {"edges": [edge + shift for edge in edges], "counts": counts}


def read_examples(table: pa.Table, questions: Mapping[str, str], corpus: Corpus, count: int) -> list[ShownQuery]:
    """Returns the first `count` queries that have negatives, from a table of negatives (`sample_negatives`)."""
    sources = sources_of(table)
    examples = []
    for fields in table.filter(pc.list_value_length(pc.field("negatives")) > 0).slice(0, count).to_pylist():
        negatives = [
            ShownNegative(
                passage.title,
                passage.text,
                {source: fields[f"rank:{source}"][place] for source in sources},
                fields["probability"][place],
                fields["is_denoised"][place],
            )
            for place, passage in enumerate(corpus.passages(fields["negatives"]))
        ]
        positives = [f"{p.title} {p.text}" if p.title else p.text for p in corpus.passages(fields["positives"])]
        examples.append(ShownQuery(questions[fields["query_id"]], positives, negatives))
    return examples


def write_report(
    folder: str, statistics: PoolStatistics, examples: Sequence[ShownQuery], *, title: str, overwrite: bool = False
) -> Path:
    """Writes report.html, with embedded charts, and report.json, with the numbers; returns the path of the page.

    Raises InputError if the folder cannot be made, or holds another report (unless `overwrite`).
    """
    page, numbers = Path(folder) / "report.html", statistics.numbers()
    files: list[tuple[str, str | bytes]] = [
        (str(page), _render_page(numbers, examples, title)),
        (str(page.with_suffix(".json")), orjson.dumps(numbers, option=orjson.OPT_INDENT_2)),
    ]
    write_files(files, overwrite=overwrite)
    return page


_STYLE = f"{STYLE}\n.positive {{ border-left: 4px solid #2a2; padding-left: 1em }}"


def _render_page(numbers: dict[str, Any], examples: Sequence[ShownQuery], title: str) -> str:
    candidates, scored = numbers["candidates"], numbers["scored"]
    sources = [(name, f"{found['found']:,}", f"{found['found_alone']:,}") for name, found in numbers["sources"].items()]
    overlap = [
        (_sources_label(kind["sources"]), f"{kind['candidates']:,}", f"{kind['candidates'] / candidates:.1%}")
        for kind in numbers["overlap"]
    ]
    pieces = [
        f"<p>{numbers['questions']:,} queries have {candidates:,} candidates; {scored:,} of them were scored.</p>",
        "<h2>Sources</h2>",
        html_table(("source", "candidates", "found by it alone"), sources),
        html_table(("found by", "candidates", "of all"), overlap),
        *_render_charts(numbers),
    ]
    if scored:
        pieces += [
            "<h2>Denoising</h2><p>Removed is a scored pair whose probability is not below the threshold. Where not "
            "all pairs were scored, queries of which much is removed were scored further and weigh more.</p>",
            html_table(
                ("threshold", "removed", "of the scored"),
                [(f"{row['threshold']}", f"{row['pairs']:,}", f"{row['share']:.1%}") for row in numbers["removed"]],
            ),
        ]
    if numbers["dropped"]:
        rows = [
            (row["limit"], row["scorer"], f"{row['candidates']:,}", f"{row['candidates'] / candidates:.1%}")
            for row in numbers["dropped"]
        ]
        pieces += [
            "<h2>Margins</h2><p>Candidates that exceed a limit on the score of negatives are dropped before negatives "
            "are sampled. A candidate that exceeds several limits counts for the first one.</p>",
            html_table(("limit", "scores of", "dropped", "of all candidates"), rows),
        ]
    return html_page(title, (f"<h1>{html.escape(title)}</h1>", *pieces, *map(_render_example, examples)), _STYLE)


def _sources_label(sources: Sequence[str]) -> str:
    return " + ".join(sources) + ("" if len(sources) > 1 else " alone")


def _render_example(example: ShownQuery) -> str:
    sources = list(dict.fromkeys(source for negative in example.negatives for source in negative.ranks))
    rows = []
    for negative in example.negatives:
        ranks = ["–" if negative.ranks.get(source) is None else str(negative.ranks[source]) for source in sources]
        probability = "not scored" if negative.probability is None else f"{negative.probability:.4f}"
        text = f"{negative.title}: {negative.text}" if negative.title else negative.text
        rows.append((*ranks, probability, "yes" if negative.denoised else "no", text))
    positives = "".join(f"<p class='positive'>{html.escape(text)}</p>" for text in example.positives)
    head = (*(f"rank, {source}" for source in sources), "probability", "denoised", "negative")
    return f"<h2>{html.escape(example.question)}</h2>{positives}{html_table(head, rows)}"


def _render_charts(numbers: dict[str, Any]) -> list[str]:
    """Draws the charts and returns them as HTML: <img> elements with embedded PNGs."""
    pictures = []

    def draw(name: str, columns: int = 1, height: float = 3.2) -> list[Any]:
        figure = new_figure(9, height)
        figure.suptitle(name)
        pictures.append((name, figure))
        return list(figure.subplots(1, columns, squeeze=False)[0])

    shown = numbers["overlap"][:_COMBINATIONS][::-1]
    [axes] = draw("Candidates by the sources that found them", height=1.2 + 0.3 * len(shown))
    axes.barh([escape_math(_sources_label(kind["sources"])) for kind in shown], [kind["candidates"] for kind in shown])
    for what, unit in (("ranks", "rank"), ("scores", "score")):
        plots = draw(f"Candidates' {what} in each source", max(1, len(numbers["sources"])))
        for axes, (source, found) in zip(plots, numbers["sources"].items(), strict=False):
            if found[what]["counts"]:
                axes.stairs(found[what]["counts"], found[what]["edges"], fill=True)
            axes.set(title=escape_math(source), xlabel=unit)
    if numbers["scored"]:
        left, right = draw("Denoising", 2)
        left.stairs(numbers["probabilities"]["counts"], numbers["probabilities"]["edges"], fill=True)
        left.set(yscale="symlog", xlabel="probability", ylabel="scored pairs")
        right.plot([row["threshold"] for row in numbers["removed"]], [row["share"] for row in numbers["removed"]], "o-")
        right.set(xscale="log", ylim=(0, None), xlabel="threshold", ylabel="share removed")
    return [html_picture(name, png_bytes(figure)) for name, figure in pictures]
