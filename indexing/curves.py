"""The course of a training as a picture, as numbers, and for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from indexing.storage import full_disk


def write_curves(folder: Path, curve: Sequence[Sequence[float | None]], *, title: str, quality: str) -> Path:
    """curve: [step, loss, learning rate, quality or None] of each step. Returns the picture's path.

    Beside curves.png lie curves.json and TensorBoard's events.
    """
    import matplotlib
    from torch.utils.tensorboard import SummaryWriter

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    steps, losses, rates, qualities = zip(*curve, strict=True)
    judged = [(step, value) for step, value in zip(steps, qualities, strict=True) if value is not None]
    with full_disk(folder):
        (folder / "curves.json").write_text(json.dumps([*map(list, curve)]) + "\n")
        for old in folder.glob("events.out.tfevents.*"):  # of the same training, told again
            old.unlink()
        with SummaryWriter(str(folder)) as writer:
            for step, loss, rate, value in curve:
                writer.add_scalar("loss", loss, step)
                writer.add_scalar("learning rate", rate, step)
                if value is not None:
                    writer.add_scalar(quality, value, step)
        figure, axes = pyplot.subplots(3 if judged else 2, 1, sharex=True, figsize=(8, 7))
        for axis, values, label in zip(axes, (losses, rates), ("loss", "learning rate"), strict=False):
            axis.plot(steps, values, linewidth=0.8)
            axis.set_ylabel(label)
        if judged:
            axes[2].plot(*zip(*judged, strict=True), marker="o")
            axes[2].set_ylabel(quality)
        axes[-1].set_xlabel("step")
        axes[0].set_title(title)
        figure.tight_layout()
        figure.savefig(folder / "curves.png", dpi=110)
        pyplot.close(figure)
    return folder / "curves.png"
