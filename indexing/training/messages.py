"""Messages of training workers, and the state of a run, a pure function of the messages so far."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, get_args

from riptide.retriever.training.hooks import NodeDraining, ProgressMessage, RunResumed, StartMeasured, StepDone
from riptide.telemetry.phases import add_measures

MAX_WORKER_LOSSES = 5  # maximum number of worker losses without a new step between them


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training run.

    Attributes:
        steps: Number of steps, those of earlier runs included.
        workers: Number of workers at the end.
        numerics: The numerics class.
        loss: The last loss; None if the curve is empty.
        curve: [step, loss, learning rate, quality or None] of the recorded steps.
        best: The best quality; None without an evaluation.
        best_step: The step with the best quality.
        start: The quality before the first step; None without an evaluation.
        cuts: The counts of texts that were cut to a length limit, by the kind of text (`riptide.base.cuts.NOUNS`).
        judged: The results of a JudgingMaker.
    """

    steps: int
    workers: int
    numerics: str
    loss: float | None
    curve: list[list[float | None]]
    best: float | None
    best_step: int
    start: float | None = None
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)
    judged: dict[str, Any] = field(default_factory=dict)

    def notes(self) -> dict[str, Any]:
        """Returns the result as notes of the artifact's manifest."""
        notes = dict(vars(self))
        return notes | notes.pop("judged")


@dataclass(frozen=True)
class WorkerStarted:
    """The message that a worker has started, for the first time or after a loss."""

    rank: int


@dataclass(frozen=True)
class WorkerFailed:
    """The message that a worker ends with an exception, after which Ray Train restarts the workers."""

    cause: str


@dataclass(frozen=True)
class InvalidInput:
    """The message that a worker has found invalid input, which ends the run.

    Attributes:
        problem: The error.
        diverged: Whether the run has diverged (`riptide.base.errors.DivergedError`).
    """

    problem: str
    diverged: bool = False


@dataclass(frozen=True)
class SecondsSpent:
    """The message of the seconds that a worker has spent since the last one, by phase (`riptide.telemetry.phases`)."""

    seconds: dict[str, float]


@dataclass(frozen=True)
class RunFinished:
    """The message of rank 0 that the model is committed."""

    result: TrainingResult


Message = WorkerStarted | ProgressMessage | SecondsSpent | WorkerFailed | InvalidInput | RunFinished
MESSAGES: dict[str, type[Message]] = {each.__name__: each for each in get_args(Message)}
Shown = StartMeasured | StepDone | NodeDraining
Show = Callable[[Shown], object]  # displays a message to the user


def to_json(message: Message) -> str:
    """Serialises a message as JSON."""
    return json.dumps({"message": type(message).__name__, **asdict(message)})


def from_json(text: str) -> Message:
    """Parses a message that `to_json` has serialised."""
    values = json.loads(text)
    message = MESSAGES[values.pop("message")]
    if message is RunFinished:
        values["result"] = TrainingResult(**values["result"])
    return message(**values)


@dataclass(frozen=True)
class RunState:
    """The state of a training run, as far as the messages have reported it.

    Attributes:
        last_step: The last step that was reported as done.
        is_start_measured: Whether the quality before the first step was reported.
        attempts: Number of starts of rank 0 since the last new step.
        cause: The first failure since rank 0 started, "" if none was reported.
        losses: The error for too many losses, "" as long as there are few.
        problem: The bad input; empty if the input is good.
        diverged: Whether the problem is that the run has diverged.
        result: The result; None until the model is committed.
    """

    last_step: int = 0
    is_start_measured: bool = False
    attempts: int = 0
    cause: str = ""
    losses: str = ""
    problem: str = ""
    diverged: bool = False
    result: TrainingResult | None = None

    @property
    def error(self) -> str:
        """The error message that ends the run; "" while no error ends it."""
        return self.problem or self.losses

    @property
    def must_stop(self) -> bool:
        """Whether workers that start now must end at once; running workers may still reach a new step."""
        return bool(self.error)


class ProgressUpdate(NamedTuple):
    """The progress to show to the user after a message.

    Attributes:
        is_start: Rank 0 has started.
        steps: Number of steps to count.
        is_reused: An earlier run made these steps.
        shown: A message for the user: a step, or the quality before the first one, that was not reported before, or a
            draining node.
        seconds: Seconds of a worker by phase; None: the message has none.
    """

    is_start: bool = False
    steps: int = 0
    is_reused: bool = False
    shown: Shown | None = None
    seconds: dict[str, float] | None = None


def receive(state: RunState, message: Message) -> tuple[RunState, ProgressUpdate]:
    """Returns (state after a message, progress to report).

    Bad input ends the run. It also ends if rank 0 starts for the (MAX_WORKER_LOSSES + 2)th time without a new step,
    unless running workers reach a new step, or the end, after all. Steps that are repeated after a loss are reported
    once.
    """
    match message:
        case WorkerStarted(rank=0):
            attempts = state.attempts + 1
            losses = _lost_workers_error(state) if attempts == MAX_WORKER_LOSSES + 2 else state.losses
            return replace(state, attempts=attempts, losses=losses, cause=""), ProgressUpdate(is_start=True)
        case RunResumed(step) if step > state.last_step:
            return replace(state, last_step=step), ProgressUpdate(steps=step - state.last_step, is_reused=True)
        case StartMeasured() if not state.is_start_measured:
            return replace(state, is_start_measured=True), ProgressUpdate(shown=message)
        case StepDone(step) if step > state.last_step:
            update = ProgressUpdate(steps=step - state.last_step, shown=message)
            return replace(state, last_step=step, attempts=0, losses=""), update
        case NodeDraining():
            return state, ProgressUpdate(shown=message)
        case SecondsSpent(seconds):
            return state, ProgressUpdate(seconds=seconds)
        case WorkerFailed(cause):
            return replace(state, cause=state.cause or cause), ProgressUpdate()
        case InvalidInput(problem, diverged) if not state.problem:
            return replace(state, problem=problem, diverged=diverged), ProgressUpdate()
        case RunFinished(result):
            return replace(state, attempts=0, losses="", result=result), ProgressUpdate()
        case _:  # a start of another rank, a repeated step, or further bad input
            return state, ProgressUpdate()


def _lost_workers_error(state: RunState) -> str:
    """Returns the error message for workers that were lost too often without a new step."""
    cause = f" ({state.cause})" if state.cause else ""
    return (
        f"workers were lost {MAX_WORKER_LOSSES + 1} times on their way to step {state.last_step + 1:,}{cause}; earlier "
        "steps are kept: fix the cause and run the command again"
    )


def report_update(update: ProgressUpdate, count: Callable[[int, bool], object], show: Show) -> None:
    """Reports an update by calling `count` and `show`, and adds the seconds of a worker to those of this process.

    Args:
        update: The update.
        count: Called as count(steps, is_reused).
        show: Called with each message for the user.
    """
    if update.seconds is not None:
        add_measures(update.seconds)
    if update.shown is not None:
        show(update.shown)
    if update.steps:
        count(update.steps, update.is_reused)
