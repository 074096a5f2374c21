"""Draws vectors as points in the plane by t-SNE, coloured by group (Topic-DPR, Fig. 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.figures import COLOURS, FONT, escape_math, legend_label, new_figure, png_bytes
from riptide.base.wording import Parameter
from riptide.indexing.measures.vectors import unit_vectors
from riptide.process.extras import require

OTHER = "other"  # name of the group that replaces all but the largest groups
_GREY = "#C4C4C4"
_COLOURS = (*COLOURS, "#882255", "#999933", "#332288")
_LABEL = 30  # maximum number of characters of a label in the legend, which has two columns below its panel
_SIDE, _GAP = 6.4, 0.5  # width of a panel and of the gap between panels, in inches
_EDGE = 0.04  # width of the margin around the points, as a fraction of a panel


@dataclass(frozen=True)
class Panel:
    """A panel of the picture, in which the same points are coloured by one kind of group.

    Attributes:
        title: The title.
        groups: The group of each point; "": it has none, and is grey.
    """

    title: str
    groups: Sequence[str]


def tsne_positions(vectors: np.ndarray, *, perplexity: float = 30.0, seed: int = 0) -> np.ndarray:
    """Computes the positions of vectors in the plane by t-SNE of their directions (van der Maaten and Hinton 2008).

    The start is the first two principal components, and one thread computes, so that the same vectors have the same
    positions.

    Args:
        vectors: float [n, dim], n larger than the perplexity.
        perplexity: About how many neighbours of a point are kept near to it.
        seed: Seed of the optimisation.

    Returns:
        float64 [n, 2].

    Raises:
        InputError: If scikit-learn is not installed, or if there are too few vectors.
    """
    if not 1 <= perplexity < len(vectors):
        raise InputError(
            f"{Parameter('perplexity', f'{perplexity:g}')}: {len(vectors):,} points, expected at least 1 and less than "
            "the number of points; lower it, or draw more points"
        )
    require("t-SNE", "sklearn")
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        positions = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(unit_vectors(vectors))
    return np.asarray(positions, np.float64)


def draw_points(positions: np.ndarray, panels: Sequence[Panel], *, title: str) -> bytes:
    """Draws points as a PNG image, with a panel for each kind of group.

    The ten largest groups of a panel have a colour; the points of all others are grey.

    Args:
        positions: float [n, 2].
        panels: The panels, from left to right.
        title: The title.
    """
    width, height = len(panels) * (_SIDE + _GAP) - _GAP, _SIDE + 0.7
    figure = new_figure(width, height)
    figure.set_layout_engine("none")  # panels have a fixed size, independent of the legends
    figure.suptitle(escape_math(title), fontsize=FONT + 2)
    middle, reach = (positions.max(0) + positions.min(0)) / 2, np.ptp(positions, axis=0).max() / (2 - 4 * _EDGE)
    for number, panel in enumerate(panels):
        axes = figure.add_axes((number * (_SIDE + _GAP) / width, 0, _SIDE / width, _SIDE / height))
        groups = np.array(panel.groups, object)
        largest = _largest_groups(panel.groups)
        rest = ~np.isin(groups, largest)
        layers = [(OTHER, rest, _GREY)] if rest.any() else []
        layers += [(name, groups == name, colour) for name, colour in zip(largest, _COLOURS, strict=False)]
        for name, chosen, colour in layers:
            label = f"{_shorten_label(name)} ({int(chosen.sum()):,})"
            axes.scatter(
                positions[chosen, 0], positions[chosen, 1], s=9, color=colour, linewidths=0, label=legend_label(label)
            )
        (left, bottom), (right, top) = middle - reach, middle + reach
        axes.set(xticks=[], yticks=[], xlim=(left, right), ylim=(bottom, top))
        axes.set_title(escape_math(panel.title), fontsize=FONT + 1)
        handles, labels = axes.get_legend_handles_labels()
        first = len(layers) - len(largest)  # grey points are drawn first and come last in the legend
        order = [*range(first, len(layers)), *range(first)]
        axes.legend(
            [handles[number] for number in order],
            [labels[number] for number in order],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.01),
            ncols=2,
            fontsize=FONT - 1,
            markerscale=2.5,
            frameon=False,
            handletextpad=0.2,
        )
    return png_bytes(figure)


def _largest_groups(groups: Sequence[str]) -> list[str]:
    """Returns the groups that get a colour, by descending size; groups of equal size in alphabetical order."""
    counts = Counter(group for group in groups if group)
    return sorted(counts, key=lambda group: (-counts[group], group))[: len(_COLOURS)]


def _shorten_label(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"
