"""What all jobs share: options from YAML and command line, progress lines, one clear line for bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import sys
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from indexing.storage import full_disk
from retriever.errors import InputError

# `python jobs/x.py` puts jobs/ first on the path, where search.py, evaluate.py … would hide packages of those names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

Options = TypeVar("Options", bound="Common")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every job."""

    store: str
    """Where the artifacts are: a local folder or s3://bucket/prefix."""
    plan: bool = False
    """Say what would be done (parts, rows, bytes, memory), and end."""
    limit: int | None = None
    """Only the first so many rows; part of the fingerprint, and of the name where there is one."""


def run(main: Callable[[Options], Any], options: type[Options], argv: list[str] | None = None) -> None:
    """Parse `--config FILE.yaml --key value …`, call main(options), and exit: 0 done, 1 bad input, 2 bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read when they are imported
    try:
        parsed = parse(options, arguments, main.__module__)
        if parsed.limit is not None and parsed.limit < 1:
            raise InputError(f"--limit {parsed.limit}: expected at least 1")
        with full_disk(Path(parsed.store)):
            main(parsed)
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to go on", 130)
    except BrokenPipeError:
        os._exit(141)
    except BaseException as error:
        cause = input_error(error)
        if cause is None:
            raise
        fail(str(cause), 1)


def parse(options: type[Options], arguments: list[str], module: str = "") -> Options:
    """Options from defaults, then the YAML file of --config, then the command line. Raises InputError, SystemExit.

    A job with an option `config` of its own reads that file itself.
    """
    import tyro

    recipe: list[str] = []
    arguments = [piece for a in arguments for piece in (a.split("=", 1) if a.startswith("--config=") else [a])]
    own = any(field.name == "config" for field in dataclasses.fields(options))
    if "--config" in arguments and not own:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise InputError("--config: expected a YAML file")
        recipe = read_recipe(arguments[at + 1], options, arguments)
        arguments = arguments[:at] + arguments[at + 2 :]
    description = sys.modules[module].__doc__ if module in sys.modules else None
    return tyro.cli(options, args=recipe + arguments, description=description)


def options_of(main: Callable[[Any], object]) -> type[Common]:
    """What a job's main is given."""
    found: type[Common] = typing.get_type_hints(main)["options"]
    return found


def read_recipe(path: str, options: type, given: Sequence[str] = ()) -> list[str]:
    """A YAML mapping as command-line arguments, so that one parser checks both; keys also `given` are left out.

    Raises InputError that names the file and the key for what is not a mapping of known options.
    """
    import tyro
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; --config expects a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(loaded).__name__}")
    known = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    flags = {a.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for a in given}
    arguments: list[str] = []
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
            raise InputError(f"{path}: unknown key {key!r}{hint}")
        if value is None or name in flags:
            continue
        flag = f"--{name.replace('_', '-')}"
        if hints[name] is bool:
            if not isinstance(value, bool):
                raise InputError(f"{path}: {key}: expected true or false, found {value!r}")
            arguments.append(flag if value else f"--no-{flag[2:]}")
            continue
        pieces = [x for pair in value.items() for x in pair] if isinstance(value, dict) else value
        words = [str(piece) for piece in (pieces if isinstance(pieces, list) else [pieces])]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                tyro.cli(hints[name], args=["--", *words], console_outputs=False)
        except SystemExit:
            kind = getattr(hints[name], "__name__", None) or str(hints[name]).replace("typing.", "")
            raise InputError(f"{path}: {key}: found {value!r}, expected {kind}") from None
        arguments += [flag, *words]
    return arguments


def input_error(error: BaseException) -> InputError | None:
    """The InputError behind an exception, through Ray's wrappers and causes; None where there is none."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "cause", None)  # Ray's wrapper is an InputError too, but tells the worker's whole trace
        if isinstance(error, InputError) and inner is None:
            return error
        inner = inner or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            return None
        error = inner
    return None


def fail(message: str, status: int) -> typing.NoReturn:
    """Print one line to stderr and exit."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(status)


def say(message: str) -> None:
    """A line for the person who runs the job."""
    print(message, flush=True)


def _rate(each: float) -> str:
    """Of a second, in words."""
    return f"{each:,.0f}/s" if each >= 10 else f"{each:.2g}/s"


class Stage:
    """One line of progress: `encode 12,000 of 20,958 passages, 310/s, 29 s left`; rewritten on a terminal."""

    def __init__(self, name: str, total: int | None = None, unit: str = "passages"):
        self.name, self.total, self.unit = name, total, unit
        self.remark = ""  # at the line's end
        self.done = self.kept = 0
        self.started = self._told = time.monotonic()
        self._open = False

    def count(self, amount: int, kept: bool = False) -> None:
        """So much more is done; `kept`: by an earlier run, so that it does not enter the rate."""
        if kept:
            self.kept += amount
            return
        self.done += amount
        now = time.monotonic()
        if now - self._told >= (0.5 if sys.stderr.isatty() else 10):
            self._told = now
            self._print(now)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._clear()
        if kind is None:
            seconds = time.monotonic() - self.started
            kept = f" ({self.kept:,} kept)" if self.kept else ""
            rate = f", {_rate(self.done / seconds)}" if self.done and seconds > 0.05 else ""
            say(f"{self.name}: {self.done + self.kept:,} {self.unit}{kept} in {seconds:,.1f} s{rate}")

    def say(self, line: str) -> None:
        """A line of its own, beside the progress."""
        self._clear()
        say(line)

    def _clear(self) -> None:
        """Take the progress off a terminal."""
        if self._open and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _print(self, now: float) -> None:
        rate = self.done / max(now - self.started, 1e-9)
        line = f"{self.name}: {self.done + self.kept:,}"
        if self.total:
            left = (self.total - self.done - self.kept) / max(rate, 1e-9)
            line += f" of {self.total:,}"
        line += f" {self.unit}, {_rate(rate)}"
        if self.total:
            line += f", {left:,.0f} s left"
        if self.remark:
            line += f", {self.remark}"
        end = "" if sys.stderr.isatty() else "\n"
        print(f"\r\033[K{line}" if not end else line, end=end, file=sys.stderr, flush=True)
        self._open = True


def human(size: float) -> str:
    """Bytes for people: `3.2 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError
