"""How this process was started, the form of commands in messages that follows from it, and how its start ends early.

A job runs as a file (`python jobs/search.py`), by the console script (`riptide search`), or by the module
(`python -m riptide search`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from riptide.base.wording import CommandWords, option_words
from riptide.process.memory import describe_lack_of_memory

PACKAGE = sys.modules["riptide"].__path__[0]
JOBS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# The script of `python RIPTIDE JOB …`, which runs a job.
RIPTIDE = os.path.join(os.path.realpath(PACKAGE), "__main__.py")


class CommandLine(CommandWords):
    """Writes parameters as options, and commands in the form in which this process was started."""

    def command(self, job: str, words: Sequence[str], options: Mapping[str, str]) -> str:
        """Returns a command with its options, in the form in which this process was started."""
        return " ".join([command_of(job), *words, *option_words(options)])


COMMAND_LINE = CommandLine()


def command_of(job: str = "") -> str:
    """Returns the command of a job, in the form in which this process was started: `riptide build-index`.

    A program that calls jobs gets the form of the console script.
    """
    if _start_form() == "file":
        return f"python jobs/{job.replace('-', '_')}.py"
    return f"{'python -m riptide' if _start_form() == 'module' else 'riptide'} {job.replace('_', '-')}".rstrip()


def is_job(name: str) -> bool:
    """Returns whether a job has this name, with dashes or underscores."""
    return os.path.isfile(os.path.join(JOBS, f"{name.replace('-', '_')}.py"))


def job_name() -> str:
    """Returns the name of the job that this process runs, or of the program that calls jobs."""
    is_command = _start_form() in ("module", "script") and len(sys.argv) > 1
    return sys.argv[1].replace("-", "_") if is_command else os.path.splitext(os.path.basename(sys.argv[0]))[0]


def runs_one_job() -> bool:
    """Returns whether this process runs one job; False in a program that calls jobs."""
    return _start_form() != ""


def _start_form() -> str:
    """Returns the form in which a job was started: file, script or module; "" for a program that calls jobs."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return ""
    folder, name = os.path.split(os.path.realpath(file))
    forms = {"file": folder == JOBS, "module": os.path.join(folder, name) == RIPTIDE, "script": name == "riptide"}
    return next((form for form, is_form in forms.items() if is_form), "")


def handle_signals() -> None:
    """Makes SIGINT, SIGTERM and too little memory end a job with one line while it starts, if this process runs one.

    Ignored signals stay ignored. Standard streams that are closed are opened first, so that there is a line.
    """
    if runs_one_job():
        _open_closed_streams()
        sys.excepthook = _exit_without_memory
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _exit_at_once)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_at_once)


def _open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed.

    Otherwise the next file that is opened would take its number, and what a library prints would be written into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:  # the smallest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _exit_without_memory(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints one line for an error that means too little memory, for example in an import, otherwise the trace."""
    if (problem := describe_lack_of_memory(error)) is not None:
        os.write(2, f"error: {problem}\n".encode())
    else:
        sys.__excepthook__(kind, error, trace)


def finish() -> None:
    """Restores the default signal handlers once the job has started."""
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _exit_at_once:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_stdin() -> None:
    """Ends this process like SIGTERM when its stdin is closed, also because the parent process has ended."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _exit_at_once(number: int, _: object) -> None:
    """Signal handler that prints one line and ends the process at once.

    An exception could be lost in an import, or abort the process in a C++ library. Nothing is open yet that needs to be
    closed, and libraries may have started threads that an ordinary end would wait for.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    name = "interrupted" if number == signal.SIGINT else "terminated"
    try:
        os.write(2, f"error: {name} while it started; nothing was written\n".encode())
    finally:
        os._exit(128 + number)
