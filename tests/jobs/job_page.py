"""Writes docs/jobs.md: each job with its examples and options, from the declarations that --help prints."""

from __future__ import annotations

from riptide.jobs.commands.cli import options_class_of

import importlib
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from riptide.jobs.commands.command_line import CONFIG_HELP
from riptide.jobs.commands.console import GROUPS, command_names
from riptide.jobs.common.flat_options import Option, choices_of, metavar_of, options_by_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "jobs.md"
EVERY_JOB = "every job"  # the last heading of --help
SHARED_BY = 3  # an option that at least this number of jobs has is listed once
CODE = (" ", "riptide ", "python ", "ray ")  # begin an indented or a commented command of a docstring
HEADER = "| option | values | default | meaning |\n| --- | --- | --- | --- |"
Row = tuple[str, str, str, str]  # option, values, default, help
Heading = tuple[str, bool]  # a group of shared options, and whether all their jobs train


def written_page() -> str:
    """Returns the page: its beginning is written by hand, the rest is generated."""
    jobs = {name: options_class_of(module_of(name).main) for name in command_names()}
    shared = shared_rows(jobs)
    by_hand, contents_title, _ = PAGE.read_text().partition("## Contents\n")
    lines = [by_hand + contents_title, *contents(shared), ""]
    for names in GROUPS.values():
        for name in names:
            lines += [f"## {name}", "", *description(name), *options_of_job(name, jobs, shared)]
    lines += ["## Options of several jobs", "", "Listed once; the section of a job names those that it has.", ""]
    for heading in shared_headings(shared):
        lines += [f"### {title(heading)}", "", HEADER]
        lines += [*(line(row) for row, place in shared.items() if place == heading), ""]
    return "\n".join(lines).rstrip() + "\n"


def module_of(name: str) -> Any:
    return importlib.import_module(f"riptide.jobs.{name.replace('-', '_')}")


def contents(shared: Mapping[Row, Heading]) -> list[str]:
    """Returns the links to the jobs, by groups as in `riptide --help`, and to the options of several jobs."""
    lines = [f"- {group}: " + ", ".join(f"[{name}](#{name})" for name in names) for group, names in GROUPS.items()]
    links = (f"[{title(each).lower()}](#{title(each).lower().replace(' ', '-')})" for each in shared_headings(shared))
    return [*lines, f"- options of several jobs: {', '.join(links)}"]


def description(name: str) -> list[str]:
    """Returns the docstring of a job: its first line, its examples and the rest."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(module_of(name).__doc__).split("\n\n"):
        if paragraph.startswith(CODE):
            text = textwrap.dedent(paragraph).rstrip()
            lines += ["```bash" if text.startswith(CODE) else "```text", text, "```", ""]
        elif paragraph:
            lines += [escaped(paragraph), ""]
    return lines


def rows_of(options: type) -> dict[Row, str]:
    """Returns the options of a job with their headings in --help."""
    rows = {row(each): each.group for each in options_by_name(options).values() if not each.metadata.get("hidden")}
    if "config" not in options_by_name(options):
        rows["`--config`", "FILE", "", CONFIG_HELP] = EVERY_JOB
    return rows


def row(option: Option) -> Row:
    return f"`{option.flag}`", values_of(option), default_of(option), option.help


def values_of(option: Option) -> str:
    """Returns what an option takes: its choices, or what --help writes for a value; … after a list."""
    if option.type is bool:
        return "flag"
    names = choices_of(option.type)
    return (", ".join(f"`{name}`" for name in names) or metavar_of(option)) + (" …" if option.is_list else "")


def default_of(option: Option) -> str:
    """Returns the default as --help shows it: not None, False and an empty list, which the text explains."""
    default = option.default
    if option.is_required:
        return "required"
    if default is None or default is False or default in ((), [], {}, ""):
        return ""
    if isinstance(default, tuple | list):
        return " ".join(f"`{each}`" for each in default)
    return f"`{option.flag if default is True else default}`"


def shared_rows(jobs: Mapping[str, type]) -> dict[Row, Heading]:
    """Returns the options that several jobs have with the same text, and where they are listed."""
    users: dict[tuple[Row, str], set[str]] = defaultdict(set)
    for name, options in jobs.items():
        for each, group in rows_of(options).items():
            users[each, group].add(name)
    training = set(GROUPS["train"])
    return {each: (group, names <= training) for (each, group), names in users.items() if len(names) >= SHARED_BY}


def shared_headings(shared: Mapping[Row, Heading]) -> list[Heading]:
    """Returns the headings, those of every job first and those of trainings last."""
    return sorted(dict.fromkeys(shared.values()), key=lambda heading: (heading[1], heading[0] != EVERY_JOB))


def title(heading: Heading) -> str:
    group, is_training = heading
    if is_training and "training" not in group:
        group = "every training" if group == EVERY_JOB else f"{group} of trainings"
    return group.capitalize()


def options_of_job(name: str, jobs: Mapping[str, type], shared: Mapping[Row, Heading]) -> list[str]:
    """Returns the tables of the options of a job, by groups, and the names of its shared ones."""
    rows = rows_of(jobs[name])
    lines: list[str] = []
    if base := base_of(name, jobs, shared):
        missing = [each[0] for each in rows_of(jobs[base]) if each[0] not in {row[0] for row in rows}]
        without = f" without {', '.join(missing)}" if missing else ""
        lines = [f"All options of [{base}](#{base}){without}, with these differences:", ""]
        rows = {each: group for each, group in rows.items() if each not in rows_of(jobs[base])}
    own = {each: group for each, group in rows.items() if each not in shared}
    first = [heading for heading in jobs[name].HELP_FIRST if heading in own.values()]
    for group in dict.fromkeys([*first, *own.values()]):  # as in --help
        lines += [f"**{group.capitalize()}**", "", HEADER]
        lines += [*(line(each) for each, place in own.items() if place == group), ""]
    used: dict[Heading, list[str]] = defaultdict(list)
    for each in rows:
        if each in shared:
            used[shared[each]].append(each[0])
    for heading, flags in used.items():
        anchor = title(heading).lower().replace(" ", "-")
        lines.append(f"- [{title(heading)}](#{anchor}): {', '.join(flags)}")
    return [*lines, ""] if used else lines


def base_of(name: str, jobs: Mapping[str, type], shared: Mapping[Row, Heading]) -> str:
    """Returns the earlier job that has more than half of the options that a job lists; empty without one."""
    own = set(rows_of(jobs[name])) - set(shared)
    earlier = list(jobs)[: list(jobs).index(name)]
    return next((each for each in earlier if len(own & set(rows_of(jobs[each]))) > len(own) / 2), "")


def line(row: Row) -> str:
    option, values, default, help = row
    cells: Iterable[str] = (option, values, default, escaped(help))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def escaped(text: str) -> str:
    """Returns a text in which Markdown takes nothing for its own, except for code between backticks."""
    pieces = text.split("`")
    for number in range(0, len(pieces), 2):
        pieces[number] = pieces[number].replace("*", "\\*").replace("<", "\\<")
    return "`".join(pieces)
