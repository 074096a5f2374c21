"""A page to look at: what the sources of a pool found together, what denoising removes, and examples to read."""

from __future__ import annotations

import base64
import html
import io
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

from indexing.corpus import Corpus
from indexing.exports import whole_file
from indexing.mining import sources_of
from retriever.errors import InputError

THRESHOLDS = (0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 10)))
PROBABILITY_BINS = 50
PROBABILITY_EDGES = [number / PROBABILITY_BINS for number in range(PROBABILITY_BINS + 1)]
_MOST_BINS = 64  # of a histogram whose range is not known beforehand
_COMBINATIONS = 12  # that the picture shows; the table has all


@dataclass(frozen=True)
class Negative:
    """A mined negative as a reader sees it."""

    title: str
    text: str
    ranks: Mapping[str, int | None]  # source -> rank from 1; None: it did not find the passage
    probability: float | None  # the re-ranker's; None: never scored
    denoised: bool


@dataclass(frozen=True)
class Example:
    """A question with its positives' texts and its negatives."""

    question: str
    positives: Sequence[str]
    negatives: Sequence[Negative]


class Histogram:
    """Counts of numbers whose range is not known beforehand, in at most _MOST_BINS bins of equal width.

    The width is the smallest power of two, at least `least`, that covers what came; edges are its multiples. So the
    result is the same whatever order the numbers come in.
    """

    def __init__(self, least: float = 2.0**-20):
        self.width = least
        self._counts: Counter[int] = Counter()

    def add(self, values: np.ndarray) -> None:
        """values: any finite numbers, [n]."""
        values = np.asarray(values, np.float64)
        if len(values):
            self._cover(float(values.min()), float(values.max()), self.width)
            numbers, counts = np.unique(np.floor(values / self.width).astype(np.int64), return_counts=True)
            self._counts.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def merge(self, other: Histogram) -> None:
        """Count what another one, of the same least width, has counted."""
        if other._counts:
            self._cover(min(other._counts) * other.width, max(other._counts) * other.width, other.width)
            self._take(other._counts, other.width)

    def _cover(self, low: float, high: float, width: float) -> None:
        """Make bins of at least this width that low and high fall into besides what came."""
        if self._counts:
            low, high = min(low, min(self._counts) * self.width), max(high, max(self._counts) * self.width)
        width = max(width, self.width)
        # Numbers far from 0 get wider bins, in which a float64 still counts exactly.
        while (last := math.floor(high / width)) - (first := math.floor(low / width)) >= _MOST_BINS or (
            max(-first, last) > 2**50
        ):
            width *= 2
        counts, narrow = self._counts, self.width
        self._counts, self.width = Counter(), width
        self._take(counts, narrow)

    def _take(self, counts: Counter[int], narrow: float) -> None:
        for number, count in counts.items():
            self._counts[math.floor(number * narrow / self.width)] += count

    def bins(self) -> tuple[list[float], list[int]]:
        """(edges, ascending, one more than counts; counts); two empty lists where nothing came."""
        if not self._counts:
            return [], []
        first, last = min(self._counts), max(self._counts)
        edges = [number * self.width for number in range(first, last + 2)]
        return edges, [self._counts[number] for number in range(first, last + 1)]


class Statistics:
    """Numbers about a pool and its scores, gathered part by part, in any order and in any number of pieces."""

    def __init__(self) -> None:
        self.questions = self.candidates = self.scored = 0
        self.overlap: Counter[tuple[str, ...]] = Counter()
        self.ranks: dict[str, Histogram] = {}
        self.scores: dict[str, Histogram] = {}
        self.probabilities = np.zeros(PROBABILITY_BINS, np.int64)
        self.removed = np.zeros(len(THRESHOLDS), np.int64)

    def add(self, table: pa.Table, probabilities: np.ndarray | None = None) -> None:
        """A part of a pool (mining.pool); probabilities: float32 [pairs], NaN for what is not scored, or None.

        Raises InputError where the part has other sources than those before it.
        """
        self._expect(sources := sources_of(table))
        self.questions += len(table["query"].unique())
        self.candidates += len(table)
        kinds = np.zeros(len(table), np.int64)  # a bit for each source: rows of bools are slow to sort
        for number, source in enumerate(sources):
            column = table[f"rank:{source}"]
            kinds |= np.asarray(column.is_valid()).astype(np.int64) << number
            ranks = np.asarray(column.drop_null(), np.float64) - 1  # bins start at a multiple of their width: at 0
            self.ranks.setdefault(source, Histogram(1.0)).add(ranks)
            self.scores.setdefault(source, Histogram()).add(np.asarray(table[f"score:{source}"].drop_null()))
        for kind, count in zip(*(each.tolist() for each in np.unique(kinds, return_counts=True)), strict=True):
            self.overlap[tuple(source for number, source in enumerate(sources) if kind >> number & 1)] += count
        if probabilities is not None:
            known = probabilities[~np.isnan(probabilities)]
            self.scored += len(known)
            self.probabilities += np.histogram(known, PROBABILITY_BINS, (0, 1))[0]
            self.removed += [int((~(known < threshold)).sum()) for threshold in THRESHOLDS]  # as mining compares

    def merge(self, other: Statistics) -> None:
        """Add what was gathered elsewhere. Raises InputError where it is of other sources."""
        self._expect(list(other.ranks or self.ranks))
        for name in ("questions", "candidates", "scored", "probabilities", "removed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.overlap.update(other.overlap)
        for mine, others in ((self.ranks, other.ranks), (self.scores, other.scores)):
            for source, histogram in others.items():
                mine.setdefault(source, Histogram(histogram.width)).merge(histogram)

    def _expect(self, sources: Sequence[str]) -> None:
        if self.ranks and list(sources) != list(self.ranks):
            raise InputError(f"a part with the sources {', '.join(sources)} after one with {', '.join(self.ranks)}")

    def numbers(self) -> dict[str, Any]:
        """All of it as plain values, for JSON. Shares are of 1; bins are [start, end), a rank's too."""
        sources = {}
        for source in self.ranks:
            sources[source] = {
                "found": sum(count for kind, count in self.overlap.items() if source in kind),
                "found_alone": self.overlap[(source,)],
                "ranks": _bins(self.ranks[source], 1),
                "scores": _bins(self.scores[source], 0),
            }
        ordered = sorted(self.overlap.items(), key=lambda item: (-item[1], item[0]))
        shares = [{"threshold": t, "pairs": n, "share": n / self.scored if self.scored else None}
                  for t, n in zip(THRESHOLDS, self.removed.tolist(), strict=True)]  # fmt: skip
        return {
            "questions": self.questions,
            "candidates": self.candidates,
            "scored": self.scored,
            "sources": sources,
            "overlap": [{"sources": list(kind), "candidates": count} for kind, count in ordered],
            "probabilities": {"edges": PROBABILITY_EDGES, "counts": self.probabilities.tolist()},
            "removed": shares,
        }


def _bins(histogram: Histogram, shift: int) -> dict[str, list]:
    edges, counts = histogram.bins()
    return {"edges": [edge + shift for edge in edges], "counts": counts}


def read_examples(table: pa.Table, questions: Mapping[str, str], corpus: Corpus, count: int) -> list[Example]:
    """The first `count` questions of a table of negatives (mining.sample) that have some."""
    sources = sources_of(table)
    examples = []
    for fields in table.filter(pc.list_value_length(pc.field("negatives")) > 0).slice(0, count).to_pylist():
        negatives = [
            Negative(passage.title, passage.text, {source: fields[f"rank:{source}"][place] for source in sources},
                     fields["probability"][place], fields["denoised"][place])
            for place, passage in enumerate(corpus.passages(fields["negatives"]))
        ]  # fmt: skip
        positives = [f"{p.title} {p.text}" if p.title else p.text for p in corpus.passages(fields["positives"])]
        examples.append(Example(questions[fields["query_id"]], positives, negatives))
    return examples


def write_report(folder: str, statistics: Statistics, examples: Sequence[Example], *, title: str) -> Path:
    """report.html, one page with its pictures inside, and report.json, its numbers, in `folder`; returns the page.

    Raises InputError where the folder cannot be made.
    """
    page, numbers = Path(folder) / "report.html", statistics.numbers()
    with whole_file(str(page)) as written, whole_file(str(page.with_suffix(".json"))) as beside:
        beside.write_bytes(orjson.dumps(numbers, option=orjson.OPT_INDENT_2))
        written.write_text(_page(numbers, examples, title), encoding="utf-8")
    return page


_STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: left; vertical-align: top;
border-bottom: 1px solid #ccc } img { max-width: 100% } .positive { border-left: 4px solid #2a2; padding-left: 1em }"""


def _page(numbers: dict[str, Any], examples: Sequence[Example], title: str) -> str:
    candidates, scored = numbers["candidates"], numbers["scored"]
    sources = [(name, f"{found['found']:,}", f"{found['found_alone']:,}") for name, found in numbers["sources"].items()]
    overlap = [(_label(kind["sources"]), f"{kind['candidates']:,}", f"{kind['candidates'] / candidates:.1%}")
               for kind in numbers["overlap"]]  # fmt: skip
    pieces = [
        f"<p>{numbers['questions']:,} questions have {candidates:,} candidates; {scored:,} of them were scored.</p>",
        "<h2>Sources</h2>",
        _table(("source", "candidates", "found by it alone"), sources),
        _table(("found by", "candidates", "of all"), overlap),
        *_pictures(numbers),
    ]
    if scored:
        pieces += [
            "<h2>Denoising</h2><p>Removed is a scored pair whose probability is not below the threshold. Where not "
            "all pairs were scored, questions of which much is removed were scored further and weigh more.</p>",
            _table(("threshold", "removed", "of the scored"),
                   [(f"{row['threshold']}", f"{row['pairs']:,}", f"{row['share']:.1%}") for row in numbers["removed"]]),
        ]  # fmt: skip
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join((f"<h1>{html.escape(title)}</h1>", *pieces, *map(_example, examples)))
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def _label(sources: Sequence[str]) -> str:
    return " + ".join(sources) + ("" if len(sources) > 1 else " alone")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text, and escaped here."""
    cells = [("th", head), *(("td", row) for row in rows)]
    lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in cells]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _example(example: Example) -> str:
    sources = list(dict.fromkeys(source for negative in example.negatives for source in negative.ranks))
    rows = []
    for negative in example.negatives:
        ranks = ["–" if negative.ranks.get(source) is None else str(negative.ranks[source]) for source in sources]
        probability = "not scored" if negative.probability is None else f"{negative.probability:.4f}"
        text = f"{negative.title}: {negative.text}" if negative.title else negative.text
        rows.append((*ranks, probability, "yes" if negative.denoised else "no", text))
    positives = "".join(f"<p class='positive'>{html.escape(text)}</p>" for text in example.positives)
    head = (*(f"rank, {source}" for source in sources), "probability", "denoised", "negative")
    return f"<h2>{html.escape(example.question)}</h2>{positives}{_table(head, rows)}"


def _pictures(numbers: dict[str, Any]) -> list[str]:
    """<img> elements with PNGs inside."""
    from matplotlib.figure import Figure  # lazily: half a second; without pyplot there is no backend to choose

    pictures = []

    def draw(name: str, columns: int = 1, height: float = 3.2) -> list[Any]:
        figure = Figure(figsize=(9, height), layout="constrained")
        figure.suptitle(name)
        pictures.append((name, figure))
        return list(figure.subplots(1, columns, squeeze=False)[0])

    shown = numbers["overlap"][:_COMBINATIONS][::-1]
    [axes] = draw("Candidates by the sources that found them", height=1.2 + 0.3 * len(shown))
    axes.barh([_plain(_label(kind["sources"])) for kind in shown], [kind["candidates"] for kind in shown])
    for what, unit in (("ranks", "rank"), ("scores", "score")):
        plots = draw(f"Candidates' {what} in each source", max(1, len(numbers["sources"])))
        for axes, (source, found) in zip(plots, numbers["sources"].items(), strict=False):
            if found[what]["counts"]:
                axes.stairs(found[what]["counts"], found[what]["edges"], fill=True)
            axes.set(title=_plain(source), xlabel=unit)
    if numbers["scored"]:
        left, right = draw("Denoising", 2)
        left.stairs(numbers["probabilities"]["counts"], numbers["probabilities"]["edges"], fill=True)
        left.set(yscale="symlog", xlabel="probability", ylabel="scored pairs")
        right.plot([row["threshold"] for row in numbers["removed"]], [row["share"] for row in numbers["removed"]], "o-")
        right.set(xscale="log", ylim=(0, None), xlabel="threshold", ylabel="share removed")
    elements = []
    for name, figure in pictures:
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
        elements.append(f"<p><img alt='{html.escape(name)}' src='{source}'></p>")
    return elements


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
