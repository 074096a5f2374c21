"""Draws the quality of retrievers against their queries per second (HYPER, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from riptide.base.figures import COLOURS, FONT, escape_math, legend_label, new_figure, png_bytes

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WIDE = 3  # minimum ratio of the largest to the smallest rate at which the axis is logarithmic


@dataclass(frozen=True)
class RatePoint:
    """A retriever in the picture, with its rate and quality.

    Attributes:
        label: Its name.
        queries_per_s: Its rate.
        quality: The mean of a metric.
    """

    label: str
    queries_per_s: float
    quality: float


def draw_rates(points: Sequence[RatePoint], *, metric: str, title: str) -> bytes:
    """Draws retrievers by rate and quality as a PNG image.

    Each has its own colour and marker, and stands in the legend in the order of falling quality. The axis of the rate
    is logarithmic if rates differ by a factor of 3 or more.

    Args:
        points: The retrievers, at least one.
        metric: The name of the metric.
        title: The title.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = new_figure(8.0 + 0.06 * max(len(point.label) for point in points), 4.8)
    axes = figure.add_subplot()
    by_quality = sorted(range(len(points)), key=lambda number: -points[number].quality)
    for number in by_quality:
        point = points[number]
        label = f"{legend_label(point.label)}\n{point.quality:.4f}, {point.queries_per_s:,.4g}/s"
        axes.plot(
            [point.queries_per_s],
            [point.quality],
            linestyle="none",
            color=COLOURS[number % len(COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=10,
            markeredgecolor="white",
            markeredgewidth=0.5,
            label=label,
        )
    rates = [point.queries_per_s for point in points]
    if max(rates) >= _WIDE * min(rates):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(0.1)
    axes.grid(visible=True, alpha=0.3)
    axes.tick_params(labelsize=FONT)
    axes.set_xlabel("queries per second", fontsize=FONT)
    axes.set_ylabel(escape_math(metric), fontsize=FONT)
    axes.set_title(escape_math(title), fontsize=FONT + 2)
    figure.legend(loc="outside right upper", fontsize=FONT, labelspacing=0.9, frameon=False)
    return png_bytes(figure)
