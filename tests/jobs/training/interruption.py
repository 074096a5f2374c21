"""Ctrl-C and signals while a training job runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from riptide.indexing.store.model_artifacts import StoredCheckpoint
from riptide.indexing.training.worker import Trainer


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupts the next run when it has written the checkpoint of a step, and no run after that.

    Args:
        patch: Undoes the interruption.
        step: The step. Checkpoints of the best weights do not count.
    """
    save, pending = StoredCheckpoint.save, [step]

    def interrupted(self: StoredCheckpoint, step: int, write: Callable) -> None:
        save(self, step, write)
        if step in pending and not self.name.endswith(".best"):
            pending.remove(step)
            raise KeyboardInterrupt

    patch.setattr(StoredCheckpoint, "save", interrupted)


def signal_in(patch: pytest.MonkeyPatch, method: str, call: int, ending: signal.Signals) -> None:
    """Sends a signal to this process at the start of a call of a method of Trainer.

    Args:
        patch: Undoes it.
        method: Name of the method.
        call: Number of the call, from 0.
        ending: The signal.
    """
    original, calls = getattr(Trainer, method), iter(range(1_000))

    def signalled(self: Trainer, *arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), ending)
        return original(self, *arguments)

    patch.setattr(Trainer, method, signalled)
