"""Ctrl-C while a training job runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from indexing.models import Checkpoints


def interrupt_at(patch: pytest.MonkeyPatch, step: int, *, is_written: bool = True) -> None:
    """Interrupts the next run when it writes the checkpoint of a step, and no run after that.

    Args:
        patch: Undoes the interruption.
        step: The step. Checkpoints of the best weights do not count.
        is_written: Whether the checkpoint is written before the interruption.
    """
    save, pending = Checkpoints.save, [step]

    def interrupted(self: Checkpoints, step: int, write: Callable) -> None:
        is_now = step in pending and not self.name.endswith(".best")
        if is_now:
            pending.remove(step)
        if not is_now or is_written:
            save(self, step, write)
        if is_now:
            raise KeyboardInterrupt

    patch.setattr(Checkpoints, "save", interrupted)
