"""Elements and axes of SVG pictures, whose colours come from the style sheet of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 340  # size of a picture in its own units; the page scales it
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 46  # margins for ticks and labels
_MAX_STEPS = 6  # maximum number of steps on a linear axis


def element(tag: str, content: str = "", **attributes: object) -> str:
    """Returns an SVG element. `content` is SVG; attributes are escaped, and _ becomes - (`class_` becomes class)."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_attribute_text(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{named}>{content}</{tag}>"


def label(text: str, x: float, y: float, **attributes: object) -> str:
    """Returns an SVG text element; the text is escaped."""
    return element("text", html.escape(text), x=x, y=y, **attributes)


def tooltip(text: str) -> str:
    """Returns an SVG title element, which a browser shows as the tooltip of the parent element."""
    return element("title", html.escape(text))


def picture(description: str, content: Sequence[str]) -> str:
    """Returns an SVG picture with a description for screen readers."""
    return element(
        "svg",
        "\n".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=description,
    )


def _attribute_text(value: object) -> str:
    """Formats the value of an attribute; numbers get two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Axes:
    """The plot area of a picture; maps values to coordinates.

    Attributes:
        x_range: The first and the last value of the horizontal axis.
        y_range: The lowest and the highest value of the vertical axis.
        is_log: Whether the horizontal axis is logarithmic; its values are positive then.
    """

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    is_log: bool = False

    def x(self, value: float) -> float:
        """Returns the x coordinate of a value."""
        first, last = self.x_range
        if self.is_log:
            first, last, value = math.log(first), math.log(last), math.log(value)
        return _LEFT + (value - first) / ((last - first) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Returns the y coordinate of a value."""
        low, high = self.y_range
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _BOTTOM - _TOP)

    def frame(self, x_label: str, y_label: str) -> Iterator[str]:
        """Yields the SVG elements of the grid lines, ticks and axis labels.

        Args:
            x_label: Label of the horizontal axis.
            y_label: Label of the vertical axis.
        """
        left, right = float(_LEFT), float(WIDTH - _RIGHT)
        bottom, top = float(HEIGHT - _BOTTOM), float(_TOP)
        for value in ticks(*self.y_range):
            at = self.y(value)
            yield element("line", x1=left, x2=right, y1=at, y2=at, class_="grid")
            yield label(f"{value:,.6g}", left - 8, at + 4, class_="tick", text_anchor="end")
        for value in _log_ticks(*self.x_range) if self.is_log else ticks(*self.x_range):
            at = self.x(value)
            yield element("line", x1=at, x2=at, y1=bottom, y2=top, class_="grid")
            yield label(f"{value:,.6g}", at, bottom + 17, class_="tick", text_anchor="middle")
        yield label(x_label, (left + right) / 2, HEIGHT - 8.0, class_="axis", text_anchor="middle")
        middle = (top + bottom) / 2
        yield label(y_label, 14.0, middle, class_="axis", text_anchor="middle", transform=f"rotate(-90 14 {middle:g})")


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers from low to high, at most seven of them."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / _MAX_STEPS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= _MAX_STEPS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2, 5, 10, 20, … from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in values if low <= value <= high]
