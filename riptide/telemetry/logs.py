"""Log lines on stderr: text, or one JSON object per line with the time, the job, the artifact, the part and the node.

The format is chosen by `--log-format`, or by RIPTIDE_LOG_FORMAT, which spawned processes and workers on Ray inherit.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from typing import Literal, get_args

from riptide.base.errors import InputError
from riptide.base.wording import printable, shorten
from riptide.telemetry.submission import submission_id

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE, JOB_VARIABLE = "RIPTIDE_LOG_FORMAT", "RIPTIDE_LOG_JOB"

log = logging.getLogger("riptide.jobs")


class JsonHandler(logging.Handler):
    """Writes each log record to stderr as a JSON object in one line.

    Its keys are time (UTC), level, job, submission, artifact, part, node (host name of the process), message, and for
    an exception trace. A record has the artifact and the part of its `extra`; a key without a value is "".
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")  # one write, as other processes write to the same stream
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the JSON text of a record, in ASCII, since stderr may have any encoding."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "job": os.environ.get(JOB_VARIABLE, ""),
            "submission": submission_id(),
            "artifact": getattr(record, "artifact", ""),
            "part": getattr(record, "part", ""),
            "node": platform.node(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """Formats a log record as one printable line, below which the trace of an exception follows."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        line = shorten(" ".join(record.getMessage().split()))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a Python warning, mostly of another library, as one line: without its place in the code."""
    return f"warning: {shorten(' '.join(str(message).split()))}\n"


def is_json() -> bool:
    """Returns whether the log lines of this process are JSON."""
    return any(isinstance(handler, JsonHandler) for handler in logging.getLogger().handlers)


def start_json() -> None:
    """Makes the log lines of this process JSON, if the process that started it says so in the environment."""
    if os.environ.get(FORMAT_VARIABLE) == "json" and not is_json():
        logging.getLogger().addHandler(JsonHandler())
        logging.getLogger("riptide").setLevel(logging.INFO)


@contextlib.contextmanager
def log_lines(log_format: LogFormat, job: str) -> Iterator[None]:
    """Context in which the log lines of this process, and of processes that it starts, have a format.

    A log record and a Python warning are one line each, also those of other libraries.

    Args:
        log_format: The format; lines are also JSON if the environment says so.
        job: The name of the job, for JSON.

    Raises:
        InputError: If the environment has an unknown format.
    """
    inherited = os.environ.get(FORMAT_VARIABLE) or "text"
    if inherited not in get_args(LogFormat):
        raise InputError(f"{FORMAT_VARIABLE}: expected text or json, got {inherited!r}")
    if is_json() or "json" not in (log_format, inherited):
        with _text_lines():
            yield
        return
    before = {name: os.environ.get(name) for name in (FORMAT_VARIABLE, JOB_VARIABLE)}
    os.environ |= {FORMAT_VARIABLE: "json", JOB_VARIABLE: job}
    logger, root = logging.getLogger("riptide"), logging.getLogger()
    level = logger.level
    start_json()
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, JsonHandler)]
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _text_lines() -> Iterator[None]:
    """Context in which log records without a handler, and Python warnings, are written as lines of text."""
    handler = logging.lastResort
    before = warnings.formatwarning, handler.formatter if handler else None
    warnings.formatwarning = _format_warning
    if handler:
        handler.setFormatter(TextFormatter())
    try:
        yield
    finally:
        warnings.formatwarning = before[0]
        if handler:
            handler.setFormatter(before[1])


def format_line(message: str) -> str:
    """Returns a line of a job as JSON, for a signal handler, which may not take the locks of logging."""
    return JsonHandler().format(logging.makeLogRecord({"msg": message, "levelname": "INFO"}))


def write_line(message: str, level: int = logging.INFO, artifact: str = "") -> None:
    """Writes a line of a job to stderr: the message as text, or as JSON with its level and artifact."""
    if is_json():
        log.log(level, "%s", message, extra={"artifact": artifact})
    else:
        print(printable(message), file=sys.stderr, flush=True)
