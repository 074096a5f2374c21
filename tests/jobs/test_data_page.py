"""docs/data.md: every example is imported from the text of the page, and gives what the page says."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


class Block(NamedTuple):
    """A fenced block and the line of text before it."""

    heading: str
    label: str
    language: str
    text: str


def blocks() -> list[Block]:
    found, heading, label, language, lines = [], "", "", None, []
    for line in PAGE.read_text(encoding="utf-8").splitlines(keepends=True):
        if language is not None:
            if line == "```\n":
                found.append(Block(heading, label, language, "".join(lines)))
                label, language = "", None
            else:
                lines.append(line)
        elif line.startswith("```"):
            language, lines = line[3:].strip(), []
        elif line.startswith("#"):
            heading = line.strip("# \n")
        elif line.strip() and not line.startswith("<!--"):
            label = line.strip()
    return found


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def write_example(block: Block) -> None:
    """The file that a block shows; Python writes it itself, by pyarrow alone."""
    path = Path(block.label.strip("`"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if block.language == "python":
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)}
        assert calls == {"pa.table", "pq.write_table"}
        exec(block.text, {"pa": pa, "pq": pq})
        assert path.is_file()
    else:
        path.write_text(block.text, encoding="utf-8")


def test_every_example_of_the_page_gives_what_the_page_says(
    tmp_path: Path, done: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, out, name, commands, checked = Store("none"), "", "", 0, 0
    for block in blocks():
        if block.language == "bash":
            for command in block.text.replace("\\\n", "").splitlines():
                program, job, *arguments = shlex.split(command)
                assert program == "riptide"
                out = done(job.replace("-", "_"), *arguments)
                store = Store(arguments[arguments.index("--store") + 1])
                name = next(iter(re.findall(r"/queries/(\S+): ", out)), "")
                commands += 1
        elif re.fullmatch(r"`\S+`", block.label):
            write_example(block)
        elif block.language == "text":
            printed = out.replace(str(tmp_path), "…").splitlines()
            assert block.text.splitlines() == [line for line in printed if line.startswith("columns of ")]
            checked += 1
        elif block.label == "Passages:":
            corpus = Corpus.open(store)
            kept = [row for row in range(corpus.num_rows) if row not in set(corpus.deleted.tolist())]
            actual = [
                {"id": p.id, "title": p.title, "text": p.text, "metadata": json.loads(p.metadata_json or "{}")}
                for p in corpus.passages(kept)
            ]
            assert actual == rows(block.text)
            checked += 1
        elif block.label == "Queries:":
            table = Queries.open(store, name).table.to_pylist()
            assert [{**row, "metadata": json.loads(row["metadata"] or "{}")} for row in table] == rows(block.text)
            checked += 1
        else:
            [split] = re.fullmatch(r"Judgements of `(\w+)`:", block.label).groups()
            judged = Queries.open(store, name).qrels(split).to_pylist()
            actual = [dict(zip(("query", "passage", "score"), row.values(), strict=True)) for row in judged]
            assert actual == rows(block.text)
            checked += 1
    assert commands == sum(block.language == "bash" for block in blocks()) >= 16
    assert checked >= 25
