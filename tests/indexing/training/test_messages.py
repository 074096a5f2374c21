"""The state of a run is a function of the messages of its workers, and of their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from riptide.indexing.training.messages import (
    MAX_WORKER_LOSSES,
    InvalidInput,
    Message,
    RunFinished,
    RunState,
    TrainingResult,
    WorkerFailed,
    WorkerStarted,
    from_json,
    receive,
    report_update,
    to_json,
)
from riptide.retriever.training.hooks import NodeDraining, RunResumed, StartMeasured, StepDone

START = WorkerStarted(0)
RESULT = TrainingResult(steps=3, workers=2, numerics="cpu", loss=0.5, curve=[], best=None, best_step=0)
END = RunFinished(RESULT)


def step(number: int) -> StepDone:
    return StepDone(number, 1 / number, 0.1, None, "cpu")


@dataclass
class Outcome:
    """The state after some messages, and everything that was reported.

    Attributes:
        steps: The steps that were shown; 0 for the quality before the first one.
        counted: The counted steps of this run.
        reused: The counted steps of an earlier run.
        starts: The number of starts.
    """

    state: RunState = field(default_factory=RunState)
    steps: list[int] = field(default_factory=list)
    counted: int = 0
    reused: int = 0
    starts: int = 0


def after(*messages: Message) -> Outcome:
    outcome = Outcome()

    def count(steps: int, is_reused: bool) -> None:
        if is_reused:
            outcome.reused += steps
        else:
            outcome.counted += steps

    for message in messages:
        outcome.state, update = receive(outcome.state, message)
        outcome.starts += update.is_start
        report_update(update, count, lambda done: outcome.steps.append(getattr(done, "step", 0)))
    return outcome


LOST = (START, RunResumed(1), step(2), WorkerFailed("OSError: no room"), WorkerFailed("closed by peer"))
TO_STEP = f"workers were lost {MAX_WORKER_LOSSES + 1} times on their way to step"


@pytest.mark.parametrize(
    ("messages", "steps", "counted", "reused", "error", "is_finished"),
    [
        pytest.param([], [], 0, 0, "", False, id="nothing"),
        pytest.param([START, step(1), step(2), step(3), END], [1, 2, 3], 3, 0, "", True, id="undisturbed"),
        pytest.param(
            [START, step(1), NodeDraining(1, 10.0), START, RunResumed(1), step(2), END],
            [1, 1, 2],
            2,
            0,
            "",
            True,
            id="a node that drains",
        ),
        pytest.param(
            [START, StartMeasured(0.5), step(1), WorkerFailed("x"), START, StartMeasured(0.5), step(1), step(2), END],
            [0, 1, 2],
            2,
            0,
            "",
            True,
            id="the quality before the first step is reported once",
        ),
        pytest.param([START, RunResumed(2), step(3), END], [3], 1, 2, "", True, id="resumed from an earlier run"),
        pytest.param([START, RunResumed(3), END], [], 0, 3, "", True, id="an earlier run made all steps"),
        pytest.param(
            [START, step(1), step(2), WorkerFailed("x"), START, RunResumed(1), step(2), step(3), END],
            [1, 2, 3],
            3,
            0,
            "",
            True,
            id="steps repeated after a loss are reported once",
        ),
        pytest.param(
            [message for number in range(1, 3 * MAX_WORKER_LOSSES) for message in (START, step(number))],
            [*range(1, 3 * MAX_WORKER_LOSSES)],
            3 * MAX_WORKER_LOSSES - 1,
            0,
            "",
            False,
            id="any number of losses with a step in between",
        ),
        pytest.param(LOST * (MAX_WORKER_LOSSES + 2), [2], 1, 1, "", False, id="as many losses as are tolerated"),
        pytest.param(
            LOST * (MAX_WORKER_LOSSES + 3),
            [2],
            1,
            1,
            f"{TO_STEP} 3 (OSError: no room); earlier steps are kept: fix the cause",
            False,
            id="too many losses before a step, with the first cause since the last start",
        ),
        pytest.param([START] * (MAX_WORKER_LOSSES + 1), [], 0, 0, "", False, id="tolerated losses without a word"),
        pytest.param(
            [START] * (MAX_WORKER_LOSSES + 2),
            [],
            0,
            0,
            f"{TO_STEP} 1; earlier steps",
            False,
            id="too many without a word",
        ),
        pytest.param(
            [START] * (MAX_WORKER_LOSSES + 4), [], 0, 0, f"{TO_STEP} 1; earlier steps are kept", False, id="and more"
        ),
        pytest.param(
            [WorkerStarted(0), WorkerStarted(1), WorkerStarted(2)] * (MAX_WORKER_LOSSES + 1),
            [],
            0,
            0,
            "",
            False,
            id="other ranks do not count",
        ),
        pytest.param(
            [*[START] * (MAX_WORKER_LOSSES + 2), step(1), START, step(2), END],
            [1, 2],
            2,
            0,
            "",
            True,
            id="workers that reach a new step after all continue",
        ),
        pytest.param([*[START] * (MAX_WORKER_LOSSES + 2), END], [], 0, 0, "", True, id="workers that finish after all"),
        pytest.param(
            [START, RunResumed(5), *[START, RunResumed(5)] * (MAX_WORKER_LOSSES + 1)],
            [],
            0,
            5,
            f"{TO_STEP} 6;",
            False,
            id="to resume is no new step",
        ),
        pytest.param([START, InvalidInput("a.json: bad")], [], 0, 0, "a.json: bad", False, id="bad input"),
        pytest.param(
            [START, InvalidInput("a.json: bad"), WorkerFailed("closed by peer"), START, InvalidInput("b.json: bad")],
            [],
            0,
            0,
            "a.json: bad",
            False,
            id="the first bad input is reported",
        ),
        pytest.param(
            [*[START] * (MAX_WORKER_LOSSES + 2), InvalidInput("a.json: bad")],
            [],
            0,
            0,
            "a.json: bad",
            False,
            id="bad input explains losses",
        ),
        pytest.param(
            [START, step(1), InvalidInput("a.json: bad"), step(2), END],
            [1, 2],
            2,
            0,
            "a.json: bad",
            True,
            id="bad input is final, whatever the others reach",
        ),
    ],
)
def test_receive(
    messages: list[Message], steps: list[int], counted: int, reused: int, error: str, is_finished: bool
) -> None:
    outcome = after(*messages)
    assert (outcome.steps, outcome.counted, outcome.reused) == (steps, counted, reused)
    assert outcome.state.error.startswith(error)
    assert outcome.state.must_stop == bool(error) == bool(outcome.state.error)
    assert outcome.state.result == (RESULT if is_finished else None)
    assert outcome.starts == messages.count(START)


def test_whether_a_run_has_diverged_is_known_from_its_error() -> None:
    assert after(START, InvalidInput("step 2: the loss is nan", diverged=True)).state.diverged
    state = after(START, InvalidInput("a.json: bad"), InvalidInput("step 2: the loss is nan", diverged=True)).state
    assert (state.error, state.diverged) == ("a.json: bad", False)


def test_the_cause_is_that_of_the_last_attempt() -> None:
    outcome = after(*[START, WorkerFailed("first")] * (MAX_WORKER_LOSSES + 1), START)
    assert "(first)" in outcome.state.losses
    outcome = after(START, WorkerFailed("first"), *[START] * (MAX_WORKER_LOSSES + 1))
    assert "(first)" not in outcome.state.losses


def test_notes_of_the_result() -> None:
    result = TrainingResult(
        steps=3,
        workers=2,
        numerics="cpu",
        loss=0.5,
        curve=[],
        best=None,
        best_step=0,
        cuts={"pairs": {}},
        judged={"order": 1},
    )
    assert result.notes() == {
        "steps": 3,
        "workers": 2,
        "numerics": "cpu",
        "loss": 0.5,
        "curve": [],
        "best": None,
        "best_step": 0,
        "start": None,
        "cuts": {"pairs": {}},
        "order": 1,
    }


@pytest.mark.parametrize(
    "message",
    [
        WorkerStarted(1),
        RunResumed(3),
        StartMeasured(0.1),
        NodeDraining(2, 10.0),
        StepDone(2, 1 / 3, 1e-3, None, "cpu", {"queries": {"texts": 1}}, 9),
        WorkerFailed("OSError: gone"),
        InvalidInput("a.json: bad", diverged=True),
        RunFinished(replace(RESULT, curve=[[1, 1 / 3, 1e-3, None]], judged={"temperature": 0.05})),
    ],
)
def test_a_message_leaves_its_process_as_json(message: Message) -> None:
    assert from_json(to_json(message)) == message
