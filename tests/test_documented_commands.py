"""Every command and every link in README.md and docs/ names what exists: jobs, options, values, scripts, sections."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import PAGES, ROOT, Command, commands_of, is_script, job_refusal, refusal

from riptide.serve.http.guard import Tokens


def written(command: Command, problem: str) -> str:
    return f"{command.page}:{command.line}: {command.text}\n    {problem}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_accepted(page: Path) -> None:
    problems = [written(command, problem) for command in commands_of(page) if (problem := refusal(command))]
    assert not problems, "\n".join(["", *problems])


@pytest.mark.slow
def test_scripts_take_the_options_that_the_pages_give_them() -> None:
    commands = [command for page in PAGES for command in commands_of(page) if is_script(command)]
    program = [sys.executable, str(Path(__file__).parent / "documented_commands.py")]
    texts = json.dumps([command.text for command in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(program, input=texts, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout.splitlines()[-1])
    problems = [
        written(command, problem)
        for command, problem in zip(commands, answers, strict=True)
        if problem and not (command.is_partial and "arguments are required" in problem)
    ]
    assert len(commands) > 40
    assert not problems, "\n".join(["", *problems])


def test_servers_accept_the_tokens_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [
        found for page in PAGES for found in re.findall(r"(RIPTIDE_(?:USER|ADMIN)_TOKENS)=(\S+)", page.read_text())
    ]
    assert shown
    for name, token in shown:
        monkeypatch.setenv(name, token)
        assert Tokens.read(None)


def anchors(page: Path) -> set[str]:
    """The sections of a page, as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_sections(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (section and section not in anchors(target)):
            wrong.append(link)
    assert wrong == []


PAGE = """\
Run `riptide serch --k 3`, `search --kk 3` or `make tset`; `riptide JOB` and `riptide search` are fine.

```bash
riptide search --store data/mine --k ten   # a comment
RIPTIDE_X=1 python benchmarks/none.py && riptide verify --store s > out.txt
ray job submit --working-dir . -- python -m riptide build-bm25 \\
    --sharts 2
frobnicate --all
```

    python -m pytest tests/test_layout.py::test_that_is_none -q
    riptide train-retriever --store S … --lr high

```text
riptide nothing
```
"""


def test_what_is_wrong_in_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "page.md"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: PAGE if path == page else original(path, **_))
    problems = [f"{each.line}: {problem}" for each in commands_of(page) if (problem := refusal(each))]
    assert [problem.partition("; ")[0] for problem in problems] == [
        "1: no job serch",
        "1: --kk: unknown option",
        "1: no target tset",
        "4: --k ten: expected a whole number",
        "5: no benchmarks/none.py",
        "6: --sharts: unknown option",
        "8: unknown program frobnicate",
        "11: no tests/test_layout.py::test_that_is_none",
        "12: --lr high: expected a number",
    ]


original = Path.read_text


def test_required_options_may_be_missing_in_a_sentence_only() -> None:
    assert job_refusal(["search"], is_partial=True) == ""
    assert job_refusal(["search"], is_partial=False).startswith("--store is required")
