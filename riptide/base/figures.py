"""matplotlib figures of results: fonts, colours, and export as PNG. No display is opened."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = 11  # points; readable at 150 dots per inch on a page of the picture's width
_DPI = 150
# Colours that colour-blind readers can distinguish (Okabe and Ito), without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure with a size in inches.

    Args:
        width: Inches.
        height: Inches.
    """
    # The import takes half a second, so it is here; without pyplot no display is opened.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png_bytes(figure: Figure) -> bytes:
    """Renders a figure as the bytes of a PNG file; the same figure gives the same bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)
    return png.getvalue()


def legend_label(text: str) -> str:
    """Escapes a legend label: formulas, and a leading underscore, with which a legend omits the label."""
    return escape_math(f" {text}" if text.startswith("_") else text)


def escape_math(text: str) -> str:
    """Escapes text so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")
