"""Pages of docs/measurements have the tables of the files in docs/results; RIPTIDE_WRITE_TABLES=1 writes them.

The tables of docs/results/NAME.json.gz stand between the lines <!-- results: NAME --> and <!-- end of results --> of a
page. A file is made by `riptide reproduce`, benchmarks/experiment.py or benchmarks/training_budgets.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.files import read_json
from benchmarks.common.training_runs import budget_lines
from riptide.jobs.experiments.arms import STORE, read_experiment
from riptide.jobs.experiments.results_file import (
    ENDING,
    IDENTITY,
    identity,
    read_results,
    results_lines,
    summarise_results,
)
from riptide.jobs.reproduction.page import RAW, markdown_page, page_blocks
from riptide.jobs.reproduction.table import find_table, read_table

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs/measurements").glob("*.md"))
FILES = {file.name.removesuffix(ENDING): file for file in sorted((ROOT / "docs/results").glob(f"*{ENDING}"))}
BUDGETS = "training-budgets"  # how the names of the files of benchmarks/training_budgets.py begin
# Pages with measures of trained systems. A table of theirs has a file of results, or its section says that it has none.
OF_EXPERIMENTS = ("computed-prompts", "mining", "papers", "quality", "sparse", "topic-prompts")
WITHOUT_FILE = "Per-query values were not kept."
MEASURES = re.compile(r"^\|.*@\d+.*\|\n\| ?-", re.MULTILINE)
MAX_BYTES, MAX_BYTES_OF_ALL = 200_000, 5_000_000
PLACE = re.compile(r"(?<=^<!-- results: )([\w.-]+) -->\n(.*?)(?=^<!-- end of results -->$)", re.MULTILINE | re.DOTALL)


def tables_of(name: str) -> str:
    """Returns the tables of a file of results as Markdown."""
    if name.startswith(BUDGETS):
        return "\n".join(["", *budget_lines(read_json(FILES[name])), "", ""])
    document = read_results(str(FILES[name]))
    if "arms" in document:
        return "\n".join(["", *results_lines(document, summarise_results(document)), "", ""])
    table = read_table(find_table(document["table"]))
    blocks = page_blocks(table, document["scale"], document)
    return "\n#" + markdown_page(f"{table.heading} ({document['scale']})", blocks) + "\n"


def identity_of(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the present identity of the experiment that a file of results names."""
    if "arms" in document:
        file = ROOT / f"benchmarks/arms/{document['arms']}.yaml"
        only = {"only": document["only"]} if "only" in document else {}
        return identity(read_experiment(str(file), STORE), arms=document["arms"], **only)
    table, scale = read_table(find_table(document["table"])), document["scale"]
    return identity(table.experiment(scale, STORE, RAW), table=table.name, scale=scale)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_its_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    expected = PLACE.sub(lambda place: f"{place[1]} -->\n{tables_of(place[1])}", text)
    if os.environ.get("RIPTIDE_WRITE_TABLES"):
        page.write_text(expected, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("name", OF_EXPERIMENTS)
def test_a_section_with_measures_has_a_file_of_results_or_says_that_it_has_none(name: str) -> None:
    text = (ROOT / f"docs/measurements/{name}.md").read_text(encoding="utf-8")
    sections = [section for section in re.split(r"^(?=#{1,3} )", text, flags=re.MULTILINE) if MEASURES.search(section)]
    assert sections
    for section in sections:
        assert bool(PLACE.search(section)) != (WITHOUT_FILE in section), section.splitlines()[0]


def test_each_file_has_one_place_and_all_are_small() -> None:
    names = [place[1] for page in PAGES for place in PLACE.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(FILES)
    sizes = [file.stat().st_size for file in FILES.values()]
    assert max(sizes) <= MAX_BYTES
    assert sum(sizes) <= MAX_BYTES_OF_ALL


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith(BUDGETS)])
def test_a_file_has_the_options_of_its_experiment(name: str) -> None:
    document = read_results(str(FILES[name]))
    known = {key: document[key] for key in IDENTITY if key in document}
    assert known == identity_of(document), "run the experiment again: its options have changed"
    assert document["machine"]
    assert document["commit"]
