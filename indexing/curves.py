"""The course of a training: as it goes for TensorBoard, and at its end as a picture and as numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from indexing.storage import full_disk

Curve = Sequence[Sequence[float | None]]  # [step, loss, learning rate, quality or None] of steps
SECONDS = 10  # that events wait to be written


class Curves:
    """What a training tells of its steps goes into TensorBoard's events in `folder`; at its end it is drawn too."""

    def __init__(self, folder: Path, *, title: str, quality: str):
        self.folder, self.title, self.quality = folder, title, quality
        self._heard: list[list[float | None]] = []
        self._events: Any = None

    def note(self, message: Mapping[str, Any]) -> None:
        """Take in what is told of a step (see retriever.training.Hooks)."""
        from torch.utils.tensorboard import SummaryWriter

        step = message["step"]
        with full_disk(self.folder):
            if self._events is None:  # what an earlier run told of later steps is told again
                self._events = SummaryWriter(str(self.folder), purge_step=step, flush_secs=SECONDS)
            for name, value in (("loss", "loss"), ("learning rate", "lr"), (self.quality, "quality")):
                if message[value] is not None:
                    self._events.add_scalar(name, message[value], step)
        self._heard.append([step, message["loss"], message["lr"], message["quality"]])

    def close(self) -> None:
        """Write down what was heard."""
        if self._events is not None:
            self._events.close()

    def draw_heard(self) -> None:
        """Draw what was heard, where a training has ended before its end."""
        self.draw(self._heard)

    def draw(self, curve: Curve) -> Path | None:
        """Write curves.json and curves.png; the picture's path, None where there was no step."""
        if not curve:
            return None
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.folder.mkdir(parents=True, exist_ok=True)
        steps, losses, rates, qualities = zip(*curve, strict=True)
        judged = [(step, value) for step, value in zip(steps, qualities, strict=True) if value is not None]
        with full_disk(self.folder):
            (self.folder / "curves.json").write_text(json.dumps([*map(list, curve)]) + "\n")
            figure, axes = pyplot.subplots(3 if judged else 2, 1, sharex=True, figsize=(8, 7))
            for axis, values, label in zip(axes, (losses, rates), ("loss", "learning rate"), strict=False):
                axis.plot(steps, values, linewidth=0.8)
                axis.set_ylabel(label)
            if judged:
                axes[2].plot(*zip(*judged, strict=True), marker="o")
                axes[2].set_ylabel(self.quality)
            axes[-1].set_xlabel("step")
            axes[0].set_title(self.title)
            figure.tight_layout()
            figure.savefig(self.folder / "curves.png", dpi=110)
            pyplot.close(figure)
        return self.folder / "curves.png"
