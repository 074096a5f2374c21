"""docs/jobs.md is what the declarations of the options say; it is written again with RIPTIDE_WRITE_TABLES=1."""

from __future__ import annotations

from riptide.jobs.commands.cli import options_class_of

import os

from job_page import PAGE, module_of, written_page

from riptide.jobs.commands.console import command_names, summary
from riptide.jobs.common.flat_options import options_by_name


def test_the_page_has_the_jobs_and_their_options() -> None:
    expected = written_page()
    if os.environ.get("RIPTIDE_WRITE_TABLES"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected


def test_every_job_and_every_option_stands_in_the_page() -> None:
    sections = {part.partition("\n")[0]: part for part in written_page().split("\n## ")}
    for name in command_names():
        section = sections[name]
        assert section.startswith(f"{name}\n\n{summary(name)}\n")
        if name == "tune-prompts":
            assert "All options of [train-retriever](#train-retriever)" in section
            section += sections["train-retriever"]
        options = options_by_name(options_class_of(module_of(name).main)).values()
        flags = [each.flag for each in options if not each.metadata.get("hidden")]
        assert [flag for flag in flags if f"`{flag}`" not in section] == []
