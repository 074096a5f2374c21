"""Signals during the steps of a training run: the first one is deferred, the second one ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from signal import SIGINT, SIGTERM

import pytest

from riptide.base.errors import InputError
from riptide.jobs.commands.stopping import Terminated, deferred_signals, raise_on_sigterm
from riptide.retriever.training.hooks import Stopped


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("ending", "error"), [(SIGINT, KeyboardInterrupt), (SIGTERM, Terminated)])
@pytest.mark.parametrize("end", [Stopped, None])
def test_a_signal_takes_effect_at_the_end_of_the_steps(
    ending: signal.Signals, error: type[BaseException], end: type[Exception] | None
) -> None:
    """Also if they were the last ones, so that nothing stops them."""

    def train() -> None:
        with deferred_signals() as must_stop:
            assert not must_stop()
            os.kill(os.getpid(), ending)
            assert must_stop()
            steps.append(1)
            if end is not None:
                raise end

    steps: list[int] = []
    with raise_on_sigterm():
        with pytest.raises(error) as caught:
            train()
        assert type(caught.value) is error
        assert steps == [1]
        assert signal.getsignal(SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_signals")
def test_an_error_is_reported_and_not_the_signal() -> None:
    def train(error: Exception, endings: Sequence[signal.Signals]) -> None:
        with deferred_signals():
            for ending in endings:
                os.kill(os.getpid(), ending)
            raise error

    with pytest.raises(InputError, match="the loss is nan"):
        train(InputError("the loss is nan"), [SIGINT])
    with pytest.raises(Stopped):
        train(Stopped(), [])


@pytest.mark.usefixtures("default_signals")
def test_the_second_signal_of_a_program_raises_at_once() -> None:
    """A notebook that calls jobs is interrupted twice, and lives on."""

    def train() -> None:
        with deferred_signals() as must_stop:
            os.kill(os.getpid(), SIGINT)
            assert must_stop()
            steps.append(1)
            os.kill(os.getpid(), SIGINT)
            steps.append(2)

    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train()
    assert steps == [1]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGINT), (SIGINT, SIGINT)])
def test_the_second_signal_ends_the_process_of_a_job(
    first: signal.Signals, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riptide.jobs.commands.stopping.runs_one_job", lambda: True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), raise_on_sigterm(), deferred_signals():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), second)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == second


@pytest.mark.usefixtures("default_signals")
def test_signals_of_a_program_are_its_own() -> None:
    """One that it handles, one that its shell ignores, and all of them in another thread than the main one."""

    def handle(*_: object) -> None:
        received.append(SIGTERM)

    received: list[int] = []
    before = {SIGTERM: signal.signal(SIGTERM, handle), SIGINT: signal.signal(SIGINT, signal.SIG_IGN)}
    try:
        with deferred_signals() as must_stop:
            for ending in (SIGTERM, SIGINT):
                os.kill(os.getpid(), ending)
            assert not must_stop()
        assert received == [SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    def enter() -> None:
        with deferred_signals():
            handlers.append(signal.getsignal(SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
