"""Draws the charts of a comparison: recall by depth, differences by query, values of both runs, and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from riptide.jobs.comparison.printed_table import shorten_name
from riptide.jobs.comparison.svg import HEIGHT, WIDTH, Axes, element, label, picture, tooltip
from riptide.jobs.comparison.values import ComparedRuns

_MAX_BARS = 1_000  # maximum number of bars in the chart of differences; of more queries, every n-th has a bar
_NAME = 22  # maximum number of characters in a run's name
_MAX_POINTS = 240  # maximum number of points of a curve
_GRID_CELLS = (200, 50)  # cells per axis of the fine and the coarse grid on which pairs of values are counted
_MAX_CELLS = 1_000  # number of circles above which the coarse grid is used
_RADII = (3.0, 20.0)  # smallest and largest radius of a circle
_FEW = 50  # minimum number of queries at which a circle has the largest radius
_WIDE = 90.0  # minimum width of the range of equal values that gets a label, in units of the picture
RANKS = (1, 3, 10, 100)  # the last rank of each group of ranks
_SIDES = ("first", "equal", "second")  # CSS classes: the run that is better for a query


def draw_recall(comparison: ComparedRuns) -> str:
    """Returns an SVG chart of the recall of both runs by depth, on a logarithmic axis."""
    curves = {"first": comparison.recall_first, "second": comparison.recall_second}
    names = {"first": comparison.first, "second": comparison.second}
    deepest = max(2, *(len(curve) for curve in curves.values()))
    lowest = min((curve[0] for curve in curves.values() if curve), default=0.0)
    axes = Axes((1.0, float(deepest)), (int(lowest * 10) / 10, 1.0), is_log=True)
    content = list(axes.frame("number of hits (logarithmic)", "recall"))
    for side, curve in curves.items():
        depths = _curve_depths(len(curve))
        points = " ".join(f"{axes.x(depth):.2f},{axes.y(curve[depth - 1]):.2f}" for depth in depths)
        content.append(element("polyline", points=points, class_=f"curve {side}"))
        for depth in (depth for depth in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if depth <= len(curve)):
            shown = tooltip(f"{names[side]}: recall@{depth:,} {curve[depth - 1]:.4f}")
            at = {"cx": axes.x(depth), "cy": axes.y(curve[depth - 1])}
            content.append(element("circle", shown, **at, r=3.5, class_=f"dot {side}"))
    content += _legend_lines([(side, names[side]) for side in curves])
    return picture(f"Recall of {comparison.first} and {comparison.second} by the number of hits", content)


def draw_differences(comparison: ComparedRuns) -> str:
    """Returns an SVG bar chart of the differences by query, in descending order; of many queries, every n-th."""
    differences = [row.difference for row in comparison.rows]
    number = len(differences)
    largest = max(1e-9, *map(abs, differences))
    axes = Axes((0.0, float(number)), (-largest, largest))
    content = list(axes.frame("queries, by falling difference", f"difference in {comparison.metric}"))
    step = -(-number // _MAX_BARS)
    for at in range(0, number, step):
        value, width = differences[at], min(step, number - at)
        if value:
            ends = sorted((axes.y(0.0), axes.y(value)))
            shown = tooltip(f"{comparison.rows[at].text[:80]}: {value:+.4f}") if step == 1 else ""
            sizes = {"x": axes.x(float(at)), "width": axes.x(float(at + width)) - axes.x(float(at))}
            side = "second" if value > 0 else "first"
            content.append(element("rect", shown, **sizes, y=ends[0], height=ends[1] - ends[0], class_=f"bar {side}"))
    zero = axes.y(0.0)
    content.append(element("line", x1=axes.x(0.0), x2=axes.x(float(number)), y1=zero, y2=zero, class_="zero"))
    counts = comparison.metrics[0]
    content.append(label(f"{counts.won:,} won", axes.x(0.0) + 6, zero + 18, class_="note second"))
    first, last = axes.x(float(counts.won)), axes.x(float(counts.won + counts.equal))
    if last - first >= _WIDE:
        middle, text = (first + last) / 2, f"{counts.equal:,} equal"
        content.append(label(text, middle, zero - 8, text_anchor="middle", class_="note"))
    right = axes.x(float(number)) - 6
    content.append(label(f"{counts.lost:,} lost", right, zero - 8, text_anchor="end", class_="note first"))
    return picture(f"Differences of {number:,} queries in {comparison.metric}, sorted", content)


def draw_values(comparison: ComparedRuns) -> str:
    """Returns an SVG scatter plot of both runs' values per query; circles are larger where several queries coincide."""
    metric = comparison.metric
    pairs = [(row.first.values[metric], row.second.values[metric]) for row in comparison.rows]
    low, high = min(0.0, *map(min, pairs)), max(1.0, *map(max, pairs))
    margin = 0.04 * (high - low)
    axes = Axes((low - margin, high + margin), (low - margin, high + margin))
    names = [shorten_name(name, _NAME) for name in (comparison.first, comparison.second)]
    content = list(axes.frame(f"{metric}, {names[0]}", f"{metric}, {names[1]}"))
    ends = {"x1": axes.x(low), "y1": axes.y(low), "x2": axes.x(high), "y2": axes.y(high)}
    content.append(element("line", "", **ends, class_="zero"))
    unit, cells = _count_cells(pairs, high - low)
    most = max(_FEW, *cells.values())
    for (x, y), count in sorted(cells.items(), key=lambda entry: -entry[1]):  # small circles are drawn over large ones
        shown = f"{comparison.first} {x * unit:.2f}, {comparison.second} {y * unit:.2f}: {count:,} queries"
        radius = _RADII[0] + (_RADII[1] - _RADII[0]) * (count / most) ** 0.5
        side = _SIDES[1 + (y > x) - (y < x)]
        at = {"cx": axes.x(x * unit), "cy": axes.y(y * unit)}
        content.append(element("circle", tooltip(shown), **at, r=radius, class_=f"point {side}"))
    return picture(f"{metric} of each query, {comparison.first} and {comparison.second}", content)


def draw_ranks(comparison: ComparedRuns) -> str:
    """Returns an SVG table of the ranks of the first relevant hit in both runs, with the number of queries per cell."""
    names = _rank_groups(comparison)
    groups = range(len(names))
    cells = Counter(
        (_group_number(row.first.relevant_rank, names), _group_number(row.second.relevant_rank, names))
        for row in comparison.rows
    )
    largest = max(cells.values(), default=1)
    left, top, right, bottom = 116.0, 44.0, WIDTH - 14.0, HEIGHT - 14.0
    width, height = (right - left) / len(names), (bottom - top) / len(names)
    content = [
        label(
            f"rank in {shorten_name(comparison.second, _NAME)}",
            (left + right) / 2,
            14.0,
            class_="axis",
            text_anchor="middle",
        )
    ]
    middle = (top + bottom) / 2
    turned = {"text_anchor": "middle", "transform": f"rotate(-90 14 {middle:g})"}
    content.append(label(f"rank in {shorten_name(comparison.first, _NAME)}", 14.0, middle, class_="axis", **turned))
    for group in groups:
        content.append(label(names[group], left + (group + 0.5) * width, top - 10, class_="tick", text_anchor="middle"))
        at = top + (group + 0.5) * height
        content.append(label(names[group], left - 10, at + 4, class_="tick", text_anchor="end"))
    for first in groups:
        for second in groups:
            count, x, y = cells[first, second], left + second * width, top + first * height
            side = _SIDES[1 + (first > second) - (first < second)]
            shown = tooltip(
                f"{comparison.first}: {names[first]}, {comparison.second}: {names[second]}: {count:,} queries"
            )
            size = {"x": x + 1, "y": y + 1, "width": width - 2, "height": height - 2}
            shade = 0.06 + 0.64 * (count / largest) ** 0.5 if count else 0.0
            content.append(element("rect", shown, **size, class_=f"cell {side}", fill_opacity=shade))
            number = f"{count:,}" if count else "·"
            content.append(label(number, x + width / 2, y + height / 2 + 5, class_="count", text_anchor="middle"))
    return picture(f"Ranks of the first relevant hit in {comparison.first} and {comparison.second}", content)


def _count_cells(pairs: Sequence[tuple[float, float]], span: float) -> tuple[float, Counter[tuple[int, int]]]:
    """Returns the width of a grid cell and the number of pairs per cell; many cells are merged by a coarse grid."""
    for steps in _GRID_CELLS:
        unit = span / steps
        cells = Counter((round(x / unit), round(y / unit)) for x, y in pairs)
        if len(cells) <= _MAX_CELLS:
            break
    return unit, cells


def _rank_groups(comparison: ComparedRuns) -> list[str]:
    """Returns the names of the groups of ranks down to the deepest hit: 1, 2–3, 4–10, 11–100, not found."""
    deepest = max(len(comparison.recall_first), len(comparison.recall_second), 1)
    ends = [end for end in RANKS if end < deepest] + [deepest]
    starts = [1, *(end + 1 for end in ends[:-1])]
    names = [f"{start:,}" if start == end else f"{start:,}–{end:,}" for start, end in zip(starts, ends, strict=True)]
    return [*names, "not found"]


def _group_number(rank: int | None, names: Sequence[str]) -> int:
    """Returns the index of the group that holds a rank."""
    if rank is None:
        return len(names) - 1
    return min(sum(rank > end for end in RANKS), len(names) - 2)


def _curve_depths(number: int) -> list[int]:
    """Returns the depths at which a curve has points: all from 1 to `number`, or _MAX_POINTS of them at most."""
    if number <= _MAX_POINTS:
        return list(range(1, number + 1))
    return sorted({round(number ** (step / (_MAX_POINTS - 1))) for step in range(_MAX_POINTS)})


def _legend_lines(entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields the SVG elements of the legend, top left: one entry for each CSS class and its name."""
    for number, (side, name) in enumerate(entries):
        y = 28.0 + 20.0 * number
        yield element("line", x1=72.0, x2=98.0, y1=y, y2=y, class_=f"curve {side}")
        yield label(shorten_name(name, _NAME), 106.0, y + 4, class_="note")
