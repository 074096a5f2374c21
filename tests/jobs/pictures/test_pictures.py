"""Pictures as PNG files: the same bytes for the same numbers, and colours at the places that the numbers say."""

from __future__ import annotations

import io

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.base.figures import COLOURS
from riptide.jobs.pictures.points import Panel, draw_points, tsne_positions
from riptide.jobs.pictures.rate_chart import RatePoint, draw_rates
from riptide.jobs.pictures.similarities import draw_similarities


def pixels(png: bytes) -> np.ndarray:
    """Returns the colours of a PNG file, float [rows, columns, 3]."""
    from matplotlib.image import imread

    return imread(io.BytesIO(png), format="png")[:, :, :3]


def places_of(picture: np.ndarray, colour: str) -> np.ndarray:
    """Returns the pixels of a colour #RRGGBB, int64 [n, 2] of row and column."""
    wanted = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return np.argwhere(np.abs(picture - wanted).max(axis=2) < 0.01)


def marker(places: np.ndarray) -> np.ndarray:
    """Returns the middle of the leftmost marker among the pixels of a colour; another one is in the legend."""
    return places[places[:, 1] < places[:, 1].min() + 40].mean(axis=0)


SIMILARITIES = np.array([[1.0, 0.9, 0.2], [0.9, 1.0, 0.3], [0.2, 0.3, 1.0]])


def test_the_same_numbers_give_the_same_bytes() -> None:
    pictures = [draw_similarities(SIMILARITIES, ["a", "b", "$c_1"], title="t", measure="cosine") for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert pictures[0] != draw_similarities(SIMILARITIES**2, ["a", "b", "$c_1"], title="t", measure="cosine")
    points = [RatePoint("one", 10, 0.5), RatePoint("two", 40, 0.4)]
    pictures = [draw_rates(points, metric="RR@10", title="t") for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")


def test_a_cell_has_the_colour_of_its_number() -> None:
    """The smallest number has the darkest end of viridis, and the largest one its brightest."""
    picture = pixels(draw_similarities(SIMILARITIES, ["a", "b", "c"], title="t", measure="cosine"))
    dark, bright = places_of(picture, "#440154"), places_of(picture, "#FDE725")
    width = 0.85 * 3 * 150  # pixels of the matrix, at least
    square = bright[bright[:, 1] < bright[:, 1].min() + 1.5 * width]
    low, high = square.min(axis=0), square.max(axis=0)
    cell = (high - low + 1) / 3

    def share(places: np.ndarray, row: int, column: int) -> float:
        inside = (places >= low + cell * [row, column]) & (places < low + cell * [row + 1, column + 1])
        return inside.all(axis=1).sum() / cell.prod()

    for number in range(3):
        assert share(bright, number, number) > 0.7
    assert share(dark, 0, 2) > 0.7
    assert share(dark, 2, 0) > 0.7
    assert share(dark, 1, 2) < 0.1
    assert share(bright, 0, 1) < 0.1


@pytest.mark.parametrize("rates", [(10.0, 12.0), (10.0, 400.0)], ids=["linear", "logarithmic"])
def test_a_point_is_where_its_rate_and_quality_are(rates: tuple[float, float]) -> None:
    """The second retriever is faster and worse: its marker is to the right and below."""
    points = [RatePoint("good", rates[0], 0.6), RatePoint("fast", rates[1], 0.2)]
    picture = pixels(draw_rates(points, metric="nDCG@10", title="t"))
    one, other = (marker(places_of(picture, colour)) for colour in COLOURS[:2])
    assert one[0] + 200 < other[0]
    assert one[1] + 200 < other[1]


def test_tsne_keeps_clusters_together_and_gives_the_same_positions() -> None:
    """Three clusters of 20 directions, with lengths that do not count: each point's neighbour is of its cluster."""
    draw = np.random.default_rng(0)
    clusters = np.repeat(np.arange(3), 20)
    directions = np.eye(3)[clusters] + 0.1 * draw.normal(size=(60, 3))
    vectors = (directions * draw.uniform(0.5, 20, (60, 1))).astype(np.float16)
    positions = tsne_positions(vectors, perplexity=8, seed=1)
    assert positions.shape == (60, 2)
    np.testing.assert_array_equal(positions, tsne_positions(vectors, perplexity=8, seed=1))
    distances = ((positions[:, None] - positions) ** 2).sum(2) + np.diag(np.full(60, np.inf))
    assert (clusters[distances.argmin(1)] == clusters).all()
    with pytest.raises(InputError, match="perplexity 60: 60 points, expected at least 1 and less than"):
        tsne_positions(vectors, perplexity=60)


def test_points_have_the_colours_of_their_groups() -> None:
    """The largest group is left, the second one right, and a point without a group below; one panel for each."""
    positions = np.array([[0, 1], [0.1, 1], [0.2, 1], [9, 1], [9.1, 1], [5, -5]])
    groups = ["first", "first", "first", "second", "second", ""]
    panels = [Panel("by topic", groups), Panel("by category", ["x"] * 6)]
    png = draw_points(positions, panels, title="t")
    assert png == draw_points(positions, panels, title="t")
    picture = pixels(png)[:1000]  # without the legends
    first = picture[:, : picture.shape[1] // 2]
    one, other = (marker(places_of(first, colour)) for colour in COLOURS[:2])
    assert one[1] + 400 < other[1]
    assert abs(one[0] - other[0]) < 5
    grey = places_of(first, "#C4C4C4")
    assert np.median(grey[:, 0]) > one[0] + 300  # the edges of letters are grey too
    assert not len(places_of(picture[:, picture.shape[1] // 2 :], COLOURS[1]))  # one group in the other panel


def test_names_that_begin_with_an_underscore_are_in_the_legend() -> None:
    """A legend of matplotlib leaves out such labels. The colour of a point is then in the legend too."""
    positions = np.array([[0.0, 1.0], [9.0, 1.0]])
    named = draw_points(positions, [Panel("p", ["_first", "second"])], title="t")
    assert len(places_of(pixels(named)[1000:], COLOURS[0])) > 20
    points = [RatePoint("_first", 10, 0.5), RatePoint("second", 40, 0.4)]
    picture = pixels(draw_rates(points, metric="RR@10", title="t"))
    places = places_of(picture, COLOURS[0])
    assert np.ptp(places[:, 1]) > 400  # its marker, and that of the legend at the right


def test_only_the_ten_largest_groups_have_a_colour() -> None:
    positions = np.random.default_rng(0).normal(size=(25, 2))
    many = [f"g{number}" for number in range(12)] * 2 + ["g11"]
    few = [group if group in ("g11", *(f"g{n}" for n in (0, 1, 2, 3, 4, 5, 6, 10))) else "" for group in many]
    few = [group or ("g7" if full == "g7" else "") for group, full in zip(few, many, strict=True)]
    # g8 and g9 are the last of equal size in the order of the alphabet, so they are grey, as if they had no group.
    assert draw_points(positions, [Panel("p", many)], title="t") == draw_points(positions, [Panel("p", few)], title="t")
