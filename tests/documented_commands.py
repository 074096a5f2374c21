"""The commands in README.md and docs/, and why a job, a script or make would refuse one; nothing is run.

    python tests/documented_commands.py < commands.json     # a list of command lines of scripts; prints the refusals

Scripts are read in a separate process, with the checkout in PYTHONPATH, because their imports change settings of
libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

from riptide.base.errors import InputError
from riptide.jobs.commands import cli, command_line
from riptide.jobs.commands.console import COMPLETION, SHELLS, command_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("cluster/**/*.md")]
)
# Programs that are not of this project: they need a cluster, a cloud or a server, or belong to the system.
OTHER_PROGRAMS = {
    "ray": "a cluster; the job behind `ray job submit … --` is parsed",
    "kubectl": "a cluster of Kubernetes",
    **dict.fromkeys(["aws", "az", "gcloud"], "an account"),
    "sbatch": "a cluster of Slurm; the job behind cluster/slurm.sh is parsed",
    "docker": "a registry of images",
    "pip": "a package registry",
    "prometheus": "a cluster that runs",
    "grafana": "a cluster that runs",
    **dict.fromkeys(["apt-get", "cat", "cp", "curl", "export", "mkdir", "sed", "sha256sum"], "the system"),
    **dict.fromkeys(["source", "systemctl"], "the system"),
}
SHELL = re.compile(r" *([A-Z_]+=\S* )*(riptide|python|make|ray) ")  # begins a command where a block has no language
IN_SENTENCE = re.compile(r"^--?[a-z-]+( is required|: expected one value| [A-Z]+: expected )")  # may be so there
PLACEHOLDERS = ("JOB", "NAME", "COMMAND", "X", "…")  # they stand for any job
SHELL_WORDS = ("&&", "||", "|", ";")
ELLIPSIS = "…"
FOLDERS = ("benchmarks/", "cluster/", "examples/", "jobs/", "tests/")  # what a command names there exists


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        page: The page, from the root of the repository.
        line: Its line number there.
        text: The command, without comments.
        is_partial: Whether required options may be missing: it stands in a sentence, or has an ellipsis.
    """

    page: str
    line: int
    text: str
    is_partial: bool


class Parsed(Exception):
    """Ends a script as soon as its options are read."""


def commands_of(page: Path) -> Iterator[Command]:
    """Yields the commands of a page: those of blocks of code, and those in sentences that name a program or a job."""
    name = str(page.relative_to(ROOT))
    language: str | None = None  # of the open fenced block
    pending, first = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            language, pending = (line.strip("` \n") if language is None else None), ""
            continue
        is_code = language in ("", "bash") if language is not None else re.match(r" {4,}\S", line) is not None
        if not (is_code or pending):
            yield from (Command(name, number, text, True) for text in _in_sentence(line) if language is None)
            continue
        if not pending and language != "bash" and not SHELL.match(line):
            continue
        first = first if pending else number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            commands = list(_simple(pending))
        except ValueError:  # a quotation that continues in the next line
            continue
        yield from (Command(name, first, text, ELLIPSIS in text) for text in commands)
        pending = ""


def _in_sentence(line: str) -> list[str]:
    """Returns the commands between backticks of a line of text."""
    commands = []
    for text in re.findall(r"`([^`]+)`", line.replace("\\|", "|")):
        program, _, rest = text.partition(" ")
        if program in ("riptide", "python", "make") and rest:
            commands.append(text)
        elif program in command_names() and rest.startswith("--"):
            commands.append(f"riptide {text}")
    return commands


def _simple(line: str) -> Iterator[str]:
    """Yields the simple commands of a line of shell, without redirections, variables and comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    skip = False
    for word in [*lexer, ";"]:
        if word in SHELL_WORDS:
            yield from _submitted(words)
            words = []
        elif set(word) <= set("<>&"):
            skip = True
        elif skip:
            skip = False
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)


def _submitted(words: Sequence[str]) -> Iterator[str]:
    """Yields a command, and the job that `ray job submit` takes behind `--`, or `sbatch` behind its script."""
    if not words:
        return
    yield shlex.join(words)
    if words[0] == "ray" and "--" in words:
        yield shlex.join(words[words.index("--") + 1 :])
    if words[0] == "sbatch":
        yield shlex.join(["riptide", *words[words.index("cluster/slurm.sh") + 1 :]])


def refusal(command: Command) -> str:
    """Returns why a command of a job, pytest or make is refused; empty: it is accepted, or another program's."""
    words = [word for word in shlex.split(command.text) if word != ELLIPSIS]
    files = [word.partition("::")[0] for word in words if word.startswith(FOLDERS)]
    missing = [file for file in files if not (ROOT / file).exists()]
    return f"no {', '.join(missing)}; " if missing else program_refusal(command, *words)


def program_refusal(command: Command, program: str, *others: str) -> str:
    """Returns why a command, whose words are given without ellipses, is refused; its files exist."""
    words = [program, *others]
    if program == "riptide" or words[:3] == ["python", "-m", "riptide"]:
        return job_refusal(others if program == "riptide" else words[3:], is_partial=command.is_partial)
    if program == "python" and others and others[0].startswith("jobs/"):
        name = others[0].removeprefix("jobs/").removesuffix(".py").replace("_", "-")
        return job_refusal([name, *others[1:]], is_partial=command.is_partial)
    if words[:3] == ["python", "-m", "pytest"] or program == "pytest":
        return tests_refusal(others)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "".join(f"no target {word}; " for word in others if "=" not in word and word not in targets)
    if program == "python":
        is_script = bool(others) and (ROOT / others[0]).is_file()
        return "" if is_script else "no script of the repository; "
    return "" if program in OTHER_PROGRAMS else f"unknown program {program}; add it to OTHER_PROGRAMS; "


def job_refusal(words: Sequence[str], *, is_partial: bool) -> str:
    """Returns why `riptide WORDS` is refused."""
    if not words or words[0] in (*PLACEHOLDERS, "--help", "--version"):
        return ""
    name, *arguments = words
    if name == COMPLETION:
        return "" if arguments and arguments[0] in SHELLS else "no shell; "
    if name not in command_names():
        return f"no job {name}; "
    main = importlib.import_module(f"riptide.jobs.{name.replace('-', '_')}").main
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command_line.parse_arguments(cli.options_class_of(main), arguments)
    except SystemExit:
        return ""  # --help
    except InputError as error:
        return "" if is_partial and IN_SENTENCE.search(str(error)) else str(error)
    return ""


def tests_refusal(words: Sequence[str]) -> str:
    """Returns which tests of a command of pytest do not exist."""
    missing = ""
    for word in words:
        path, _, function = word.partition("::")
        if function and f"def {function}(" not in (ROOT / path).read_text():
            missing += f"no {word}; "
    return missing


def is_script(command: Command) -> bool:
    """Whether a command runs a script, whose options `script_refusal` reads."""
    words = shlex.split(command.text)
    return words[0] == "python" and len(words) > 1 and words[1].startswith(("benchmarks/", "examples/"))


def script_refusal(words: Sequence[str]) -> str:
    """Returns why `python WORDS` is refused: runs the script until its options are read."""

    def read(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        if unknown := known(parser)[1]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    def read_known(parser: argparse.ArgumentParser, *arguments: Any) -> Any:
        parsed = known(parser, *arguments)
        if isinstance(parser, command_line._Parser):
            return parsed
        raise Parsed

    def run(_: object, options: type) -> NoReturn:
        command_line.parse_arguments(options, sys.argv[1:])
        raise Parsed

    known, source = argparse.ArgumentParser.parse_known_args, (ROOT / words[0]).read_text()
    if "Parser(" not in source and "riptide.jobs.commands.cli import run" not in source:
        return "it takes no options; " if any(word.startswith("-") for word in words[1:]) else ""
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", read),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", read_known),
        mock.patch.object(cli, "run", run),
        mock.patch.object(sys, "argv", list(words)),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except Parsed:
            return ""
        except SystemExit as end:
            return (errors.getvalue().strip().splitlines() or [str(end)])[-1]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "it ended without reading options; "


if __name__ == "__main__":
    commands = [[word for word in shlex.split(text)[1:] if word != ELLIPSIS] for text in json.load(sys.stdin)]
    print(json.dumps([script_refusal(words) for words in commands]))
