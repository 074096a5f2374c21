"""Reports a sweep as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from riptide.base.figures import escape_math, new_figure, png_bytes
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.jobs.training.sweep import SEED, SweepChoice, SweepOutcome


def table_lines(outcomes: Sequence[SweepOutcome], quality: str) -> list[str]:
    """Returns the lines of a table with each run's swept values, quality on the dev split, best step and artifact."""
    names = list(outcomes[0].settings)
    rows = [[*names, quality, "step", "artifact"]]
    for outcome in outcomes:
        measured = "diverged" if outcome.quality is None else f"{outcome.quality:.4f}"
        step = f"{outcome.step:,}" if outcome.artifact else ""
        rows.append([*(f"{outcome.settings[name]}" for name in names), measured, step, outcome.artifact])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def chosen_line(choice: SweepChoice, quality: str) -> str:
    """Returns a line that names the chosen run and its quality."""
    of_seeds = f", the best of {choice.seeds} seeds with a mean of {choice.mean:.4f}" if choice.seeds > 1 else ""
    return f"chosen: {choice.outcome.artifact}, {quality} {choice.outcome.quality:.4f}{of_seeds}"


def draw_sweep(outcomes: Sequence[SweepOutcome], choice: SweepChoice, folder: Path, title: str, quality: str) -> Path:
    """Writes sweep.json and sweep.png to a folder; returns the path of the picture.

    The first swept option apart from the seed is the horizontal axis; each combination of the others is a line over
    the means of its seeds, and each run is a point.
    """
    names = [name for name in outcomes[0].settings if name != SEED] or [SEED]
    axis_name, others = names[0], names[1:]
    values = list(dict.fromkeys(outcome.settings[axis_name] for outcome in outcomes))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    lines: dict[str, dict[int, list[float]]] = {}
    for outcome in outcomes:
        label = ", ".join(f"{name} {outcome.settings[name]}" for name in others)
        place = values.index(outcome.settings[axis_name])
        if outcome.quality is not None:
            lines.setdefault(label, {}).setdefault(place, []).append(outcome.quality)
    folder.mkdir(parents=True, exist_ok=True)
    with explain_disk_errors(folder):
        document = {"chosen": vars(choice.outcome), "runs": [vars(outcome) for outcome in outcomes]}
        (folder / "sweep.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        figure = new_figure(8, 5)
        axis = figure.subplots()
        for label, measured in lines.items():
            places = sorted(measured, key=lambda place: values[place] if numeric else place)
            across = [values[place] if numeric else place for place in places]
            means = [sum(measured[place]) / len(measured[place]) for place in places]
            [line] = axis.plot(across, means, label=label or None)
            for x, place in zip(across, places, strict=True):
                axis.plot([x] * len(measured[place]), measured[place], "o", color=line.get_color())
        if numeric and min(values) > 0 and max(values) >= 10 * min(values):
            axis.set_xscale("log")
        if not numeric:
            axis.set_xticks(range(len(values)), [str(value) for value in values])
        axis.set_xlabel(axis_name)
        axis.set_ylabel(quality)
        axis.set_title(escape_math(title))
        if others:
            axis.legend()
        (folder / "sweep.png").write_bytes(png_bytes(figure))
    return folder / "sweep.png"
