"""Records a training run: TensorBoard events at each step, curves as JSON and PNG at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from riptide.base.figures import escape_math, new_figure, png_bytes
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.retriever.training.hooks import StepDone

Curve = Sequence[Sequence[float | None]]  # [step, loss, learning rate, quality or None] for each recorded step
FLUSH_S = 10  # maximum seconds before events are written to disk


class CurveWriter:
    """Writes the loss, learning rate and quality of training steps into a folder.

    Args:
        folder: The folder; it is made if it is missing.
        title: Title of the picture.
        quality: Name of the measure of quality.
    """

    def __init__(self, folder: Path, *, title: str, quality: str):
        self.folder, self.title, self.quality = folder, title, quality
        self._steps: list[list[float | None]] = []
        self._events: Any = None

    def add(self, done: StepDone) -> None:
        """Writes the TensorBoard events of a step."""
        from torch.utils.tensorboard import SummaryWriter

        with explain_disk_errors(self.folder):
            if self._events is None:  # purges later steps of an earlier run, which are repeated
                self._events = SummaryWriter(str(self.folder), purge_step=done.step, flush_secs=FLUSH_S)
            for name, value in (("loss", done.loss), ("learning rate", done.lr), (self.quality, done.quality)):
                if value is not None:
                    self._events.add_scalar(name, value, done.step)
        self._steps.append([done.step, done.loss, done.lr, done.quality])

    def close(self) -> None:
        """Closes the TensorBoard writer, which writes the remaining events to disk."""
        if self._events is not None:
            self._events.close()

    def draw_added(self) -> None:
        """Writes the curves of the steps so far, for a run that failed."""
        self.draw(self._steps)

    def draw(self, curve: Curve) -> Path | None:
        """Writes curves.json and curves.png; returns the path of curves.png, or None if there are no steps."""
        if not curve:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        steps, losses, rates, qualities = zip(*curve, strict=True)
        measured = [(step, value) for step, value in zip(steps, qualities, strict=True) if value is not None]
        with explain_disk_errors(self.folder):
            (self.folder / "curves.json").write_text(json.dumps([*map(list, curve)]) + "\n")
            figure = new_figure(8, 7)
            axes = figure.subplots(3 if measured else 2, 1, sharex=True)
            for axis, values, label in zip(axes, (losses, rates), ("loss", "learning rate"), strict=False):
                axis.plot(steps, values, linewidth=0.8)
                axis.set_ylabel(label)
            if measured:
                axes[2].plot(*zip(*measured, strict=True), marker="o")
                axes[2].set_ylabel(self.quality)
            axes[-1].set_xlabel("step")
            axes[0].set_title(escape_math(self.title))
            (self.folder / "curves.png").write_bytes(png_bytes(figure))
        return self.folder / "curves.png"
