"""Background loops of a service."""

from __future__ import annotations

import asyncio
import logging

import pytest

from riptide.base.errors import InputError
from riptide.serve.service.loops import repeat_forever


def test_a_loop_goes_on_after_errors_and_logs_each_once(caplog: pytest.LogCaptureFixture) -> None:
    errors = [InputError("corpus is missing"), InputError("corpus is missing"), KeyError("x"), None, KeyError("x")]
    pending = list(errors)

    async def step() -> None:
        if not pending:
            raise asyncio.CancelledError
        if (error := pending.pop(0)) is not None:
            raise error

    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        asyncio.run(repeat_forever(step, 0.0, "a look fails"))
    lines = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    assert lines == [("a look fails: corpus is missing", False)] + [("a look fails: 'x'", True)] * 2
