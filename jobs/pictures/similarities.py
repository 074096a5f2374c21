"""Draws the similarities of query sets as a matrix (HYPER, Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from riptide.base.figures import FONT, escape_math, new_figure, png_bytes

_COLOUR_MAP = "viridis"
_DARK = 0.6  # fraction of the colour range up to which digits are white
_MAX_DIGITS = 4


def draw_similarities(similarities: np.ndarray, labels: Sequence[str], *, title: str, measure: str) -> bytes:
    """Draws a similarity matrix as a PNG image, with a number in each cell.

    The colours range from the smallest to the largest similarity.

    Args:
        similarities: float [n, n], symmetric.
        labels: The names of the rows, which are also those of the columns.
        title: The title.
        measure: What the numbers are, beside the colour bar.
    """
    num = len(labels)
    longest = max(map(len, labels))
    side = max(3.0, 0.85 * num)
    figure = new_figure(side + 2.0 + 0.09 * longest, side + 0.9 + 0.06 * longest)
    axes = figure.add_subplot()
    low, high = float(similarities.min()), float(similarities.max())
    low = min(low, high - 10.0**-_MAX_DIGITS)  # differences below the printed digits get one colour
    image = axes.imshow(similarities, cmap=_COLOUR_MAP, vmin=low, vmax=high)
    names = [escape_math(label) for label in labels]
    axes.set_xticks(range(num), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=FONT)
    axes.set_yticks(range(num), names, fontsize=FONT)
    digits = _num_digits(high - low)
    for (row, column), value in np.ndenumerate(similarities):
        colour = "white" if value < low + _DARK * (high - low) else "black"
        axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", color=colour, fontsize=FONT)
    axes.set_title(escape_math(title), fontsize=FONT + 2)
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.ax.tick_params(labelsize=FONT)
    bar.ax.ticklabel_format(useOffset=False)
    bar.set_label(measure, fontsize=FONT)
    return png_bytes(figure)


def _num_digits(spread: float) -> int:
    """Returns the number of decimals that distinguish numbers with a given spread."""
    return int(np.clip(np.ceil(-np.log10(spread)) + 1, 2, _MAX_DIGITS))
