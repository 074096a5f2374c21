"""examples/demo.py: the queries of its second task."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_chat_is_a_question_its_answer_and_a_question_about_another_article(demo: ModuleType, tmp_path: Path) -> None:
    demo.write_chat(tmp_path)
    questions = {row["_id"]: row for row in demo.read_lines(demo.SQUAD / "queries.jsonl.gz")}
    titles = {row["_id"]: row["title"] for row in demo.read_lines(demo.SQUAD / "corpus.jsonl.gz")}
    articles = {}
    for split, count in (("train", 2000), ("test", 1000)):
        lines = (demo.SQUAD / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
        passages = dict(line.split("\t")[:2] for line in lines)
        titles_of = defaultdict(set)  # several questions may have one text and one answer
        for query, passage in passages.items():
            first = f"User: {questions[query]['text']} Assistant: {questions[query]['metadata']['answers'][0]}. User: "
            titles_of[first].add(titles[passage])
        rows = [json.loads(line) for line in (tmp_path / f"queries.{split}.jsonl").read_text().splitlines()]
        assert len({row["query_id"] for row in rows}) == len(rows) == count
        for row in rows:
            assert passages[row["query_id"]] == row["relevant"]
            first = row["query"].removesuffix(questions[row["query_id"]]["text"])
            assert first != row["query"]
            assert titles_of[first] - {titles[row["relevant"]]}
        articles[split] = {titles[row["relevant"]] for row in rows}
    assert articles["train"].isdisjoint(articles["test"])


def test_the_queries_of_the_chat_are_the_same_each_time(demo: ModuleType, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        demo.write_chat(tmp_path / folder)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
