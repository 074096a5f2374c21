"""The outcome of a job that a test runs."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The exit status and the output of a job."""

    status: int
    out: str
    err: str
