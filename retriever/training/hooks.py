"""Messages and callbacks between a training worker and its caller: progress, checkpoints, stops, draining nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

SaveCheckpoint = Callable[[int, Callable[[Path], object]], object]
"""Stores a checkpoint: (step, a function that writes a file)."""


@dataclass
class TrainingProgress:
    """The progress of a training run: steps done, a curve of [step, loss, lr, quality or None], and the best quality.

    The curve of a run of more than 10,000 steps has only some of the steps.
    """

    steps: int
    curve: list[list[float | None]]
    best: float | None = None
    best_step: int = 0
    since: int = 0  # evaluations since the best quality
    start: float | None = None  # the quality before the first step; None: not measured
    cuts: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # counts of cut texts of all workers, by kind of text: `Cuts.to_dict`
    # Number of steps of the whole run, once the speed of the first steps has determined it.
    run_steps: int | None = None


@dataclass(frozen=True)
class RunResumed:
    """A message of rank 0: all workers resume after this step of an earlier run."""

    step: int


@dataclass(frozen=True)
class StartMeasured:
    """A message of rank 0: the quality on the dev split before the first step of a run."""

    quality: float


@dataclass(frozen=True)
class StepDone:
    """A message of rank 0: a step is done.

    Attributes:
        step: Number of the step, from 1.
        loss: Loss of the whole batch.
        lr: Learning rate.
        quality: Quality on the dev split; None if it was not measured.
        numerics: The numerics class.
        cuts: The counts of texts that were cut to a length limit, by the kind of text (`riptide.base.cuts.NOUNS`), up
            to the last checkpoint; of the last step, of all steps.
        run_steps: Number of steps of the run, once the time limit has decided it; None before, and without one.
    """

    step: int
    loss: float
    lr: float
    quality: float | None
    numerics: str
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)
    run_steps: int | None = None


@dataclass(frozen=True)
class NodeDraining:
    """A message of rank 0: a node of the workers is draining, so a checkpoint is saved now and then often.

    Attributes:
        step: Number of the step, from 1.
        checkpoint_s: Seconds between two checkpoints, from the duration of the last one.
    """

    step: int
    checkpoint_s: float


ProgressMessage = RunResumed | StartMeasured | StepDone | NodeDraining


class Stopped(Exception):
    """A stop request ended a run; its last step has a checkpoint, unless a time limit has not yet decided the steps."""


StopRequests = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""Returns a context manager around the steps of a run; its value is `must_stop()`: whether to stop after a step."""


@contextlib.contextmanager
def no_stop_requests() -> Iterator[Callable[[], bool]]:
    """Provides a stop check that never requests a stop."""
    yield lambda: False


def no_node_drains() -> bool:
    """Returns False: the `is_node_draining` of a run in one process."""
    return False


@dataclass(frozen=True)
class WorkerHooks:
    """Callbacks with which a worker loads and stores checkpoints and reports steps.

    Attributes:
        load: Returns a local file with the last checkpoint, which is removed after reading; None: there is no
            checkpoint.
        save: Stores the last checkpoint.
        load_best: As `load`, for the checkpoint with the best quality.
        save_best: As `save`, for the checkpoint with the best quality.
        report: Called on rank 0 with each step, and before the first one with the steps of an earlier run, or with the
            quality before training.
        stop_requests: Entered on rank 0 around the steps; `must_stop` is called before the first and after each step.
        is_node_draining: Whether a node of the workers is draining. All workers call it after the same steps and get
            the same value.
    """

    load: Callable[[], Path | None]
    save: SaveCheckpoint
    load_best: Callable[[], Path | None]
    save_best: SaveCheckpoint
    report: Callable[[ProgressMessage], object]
    stop_requests: StopRequests = no_stop_requests
    is_node_draining: Callable[[], bool] = no_node_drains
