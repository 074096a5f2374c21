"""Finds the settings of a recipe that have no label, which says where their value comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.job_options import Common

LABEL = re.compile(r"#\s*(paper|authors' code|ours)\b")
# Options that name data, artifacts or files, besides those that the class of a job lists.
NAMES = frozenset(
    ("store", "source", "split", "dev_split", "dev_negatives", "also_train", "candidates", "queries", "curves", "page")
) | {"json", "categories_field", "picture", "requests"}


def names_of(options: type[Common]) -> frozenset[str]:
    """Returns the options of a job that name something: a label would say nothing about them."""
    sources = {name for name, kind in options.READS.items() if kind == "sources"}
    named = {*options.NAMED_BY, *options.READS} & options_by_name(options).keys()
    return NAMES | (named - (sources - {"source", "mode"}))


def unlabelled(file: Path, options: type[Common] | None = None) -> list[str]:
    """Returns each setting without a label, as LINE: KEY.

    Args:
        file: The recipe.
        options: The options of its job; None: the recipe is a chain of jobs.
    """
    text = file.read_text(encoding="utf-8")
    lines, root = text.splitlines(), yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    found = []
    for job, settings in [(options, root)] if options else list(steps_of(root)):
        for key, value in settings.value:
            end = value.end_mark.line if isinstance(value, yaml.ScalarNode) or value.flow_style else key.start_mark.line
            comment = lines[end].partition(" #")
            is_named = key.value in names_of(job) or key.value == "<<"
            if not is_named and LABEL.match("#" + comment[2]) is None:
                found.append(f"{key.start_mark.line + 1}: {key.value}")
    return sorted(set(found), key=lambda each: int(each.partition(":")[0]))


def steps_of(root: yaml.MappingNode) -> Iterator[tuple[type[Common], yaml.MappingNode]]:
    """Yields the class of options and the settings of each step of a chain."""
    from riptide.jobs.commands.steps import _open_job

    [steps] = [value for key, value in root.value if key.value == "steps"]
    for step in steps.value:
        [(job, settings)] = step.value
        if isinstance(settings, yaml.MappingNode):
            yield _open_job(job.value.replace("-", "_"), "")[1], settings
