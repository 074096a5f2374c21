"""The command `riptide`: lists the jobs, runs one of them, and prints scripts for shell completion.

Only the module of the job that runs is imported, so that the list and mistakes take no time.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from riptide.base.wording import shorten, shown
from riptide.jobs.common.standard_output import print_line
from riptide.jobs.common.starting import JOBS, command_of

# All jobs in the order in which a new user needs them, by group of `riptide --help`.
GROUPS = {
    "prepare data": ("import-corpus", "import-queries"),
    "encode and index": ("encode-corpus", "build-index", "build-bm25", "fit-topics"),
    "search and evaluate": ("search", "evaluate", "compare", "judge", "replay", "draw"),
    "train": (
        "mine-negatives",
        "train-retriever",
        "tune-prompts",
        "train-reranker",
        "pretrain-rip",
        "convert-prompts",
    ),
    "serve": ("serve-search", "migrate"),
    "look after the store": ("store", "verify"),
    "run a chain of jobs": ("pipeline", "reproduce"),
}
COMPLETION = "completion"
SHELLS = ("bash", "zsh", "fish")
FILES = ("FILE", "FOLDER", "PATH", "STORE")  # placeholders in --help of values that may be files or folders


def command_names() -> list[str]:
    """Returns the names of all jobs as commands."""
    return [name for names in GROUPS.values() for name in names]


def run_command(arguments: Sequence[str], version: str) -> None:
    """Runs the command line `riptide ARGUMENTS`.

    Args:
        arguments: The command line behind `riptide`.
        version: What --version prints.

    Raises:
        SystemExit: With status 1 if stdout is full, with status 2 for an unknown command, and as
            `riptide.jobs.commands.cli.run` does.
    """
    try:
        _run_command(arguments, version)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as in `riptide | head`
        os._exit(141)


def _run_command(arguments: Sequence[str], version: str) -> None:
    """Runs the command line `riptide ARGUMENTS`, without handling a closed pipe."""
    name, *others = arguments or ["--help"]
    if name in ("-h", "--help"):
        _print(overview_of_jobs())
    elif name == "--version":
        _print(f"riptide {version}")
    elif name == COMPLETION:
        print_completion(others)
    elif (job := name.replace("_", "-")) in command_names():
        from riptide.jobs.commands.cli import options_class_of, run

        main = importlib.import_module(f"riptide.jobs.{job.replace('-', '_')}").main
        run(main, options_class_of(main), others)
    else:
        _refuse_command(name)


def overview_of_jobs() -> str:
    """Returns the text of `riptide --help`: each job with the first line of its docstring."""
    program = command_of("").strip()
    width = max(map(len, command_names()))
    lines = [f"usage: {program} COMMAND --store STORE [OPTIONS]", "", f"`{program} COMMAND --help` lists the options."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:{width}}  {summary(name)}" for name in names)]
    lines += ["", "others:", f"  {COMPLETION:{width}}  Print a completion script: {', '.join(SHELLS)}."]
    lines += [f"  {'--version':{width}}  Print the version."]
    return "\n".join(lines)


def summary(name: str) -> str:
    """Reads the first line of a job's docstring without importing the job."""
    with open(os.path.join(JOBS, f"{name.replace('-', '_')}.py"), encoding="utf-8") as file:
        return file.readline().strip().lstrip("r").strip('"')


def print_completion(arguments: Sequence[str]) -> None:
    """Prints the completion script of a shell; it imports every job, which takes seconds."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        _exit_with_error(f"{' '.join([COMPLETION, *arguments])}: expected one shell: {', '.join(SHELLS)}")
    from riptide.jobs.commands.cli import options_class_of

    import argparse

    import shtab

    from riptide.jobs.commands.command_line import make_parser
    from riptide.jobs.common.flat_options import Option, choices_of, metavar_of

    def complete(action: argparse.Action, option: Option) -> None:
        """Makes the shell complete the choices of an option, or names of files."""
        action.choices = choices_of(option.type) or None
        if metavar_of(option) in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]

    parser = argparse.ArgumentParser("riptide", description="Dense retrieval on one machine or a Ray cluster.")
    commands = parser.add_subparsers()
    for name in command_names():
        module = importlib.import_module(f"riptide.jobs.{name.replace('-', '_')}")
        job_parser = make_parser(options_class_of(module.main), module.__name__, complete)
        commands.add_parser(name, help=summary(name), parents=[job_parser], add_help=False)
    commands.add_parser(COMPLETION, help="Print a completion script.").add_argument("shell", choices=SHELLS)
    _print(shtab.complete(parser, arguments[0]))


def _print(text: str) -> None:
    """Prints a text to stdout; exits with one line if it cannot be written."""
    try:
        print_line(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        _exit_with_error(f"{error.filename}: {error.strerror}: check where the output goes", 1)


def _refuse_command(name: str) -> None:
    """Exits with a usage error that names similar commands."""
    if name.startswith("-"):
        _exit_with_error(f"{shown(name)}: expected a command before the options; --help lists them")
    name, known = name.replace("_", "-"), [*command_names(), COMPLETION]
    near = [each for each in known if len(name) > 2 and name in each] or difflib.get_close_matches(name, known, 3, 0.5)
    _exit_with_error(
        f"{shown(name)}: unknown command; " + (f"did you mean {' or '.join(near)}?" if near else "--help lists them")
    )


def _exit_with_error(message: str, status: int = 2) -> None:
    """Exits with a one-line message; status 2 means wrong usage."""
    print(shorten(f"error: {message}"), file=sys.stderr)
    sys.exit(status)
