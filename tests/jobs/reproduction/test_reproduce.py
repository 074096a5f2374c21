"""A reproduction from raw files to its page, killed and resumed, with a tiny backbone; and its answers to bad input."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import write_beir

from riptide.jobs.experiments import read_results, read_values
from riptide.jobs.reproduction.table import TABLES

ROOT = TABLES.parents[1]
BACKBONE = str(ROOT / "examples/backbone")
PASSAGES = 120


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of raw data with a part of SQuAD: passages of articles and their queries."""
    folder = tmp_path_factory.mktemp("raw")
    source = ROOT / "examples/squad"
    passages = [*read_lines(source / "corpus.jsonl.gz")]
    ids: set[str] = set()
    judged: dict[str, list[tuple[str, str, int]]] = {}
    for split in ("train", "dev", "test"):
        pairs = [line.split("\t") for line in (source / f"qrels/{split}.tsv").read_text().splitlines()[1:]]
        judged[split] = [(query, passage, int(score)) for query, passage, score in pairs[:60]]
        ids |= {passage for _, passage, _ in judged[split]}
    ids |= {passage["_id"] for passage in passages[:PASSAGES]}
    wanted = {query for of_split in judged.values() for query, _, _ in of_split}
    queries = [query for query in read_lines(source / "queries.jsonl.gz") if query["_id"] in wanted]
    write_beir(folder / "squad", [each for each in passages if each["_id"] in ids], queries, judged)
    return folder


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two rows of the table dptdr-3, with a small backbone and two steps of each training."""
    base = yaml.safe_load((TABLES / "dptdr/base.yaml").read_text())
    small = base["scales"]["small"]
    small["seeds"] = [0]
    small["common"] |= {"backbone": BACKBONE, "steps": 2, "batch": 4, "evaluate_every": 1, "dev_limit": 5}
    sizes = {
        "import_corpus": {"hold_out": 20},
        "train_retriever": {"steps": 2, "batch": 4},
        "pretrain_rip": {"backbone": BACKBONE, "steps": 2, "batch": 8},
        "train_reranker": {"backbone": BACKBONE, "steps": 2, "batch": 4},
        "mine_negatives": {"depth": 5, "pool_negatives": 2},
    }
    for entry in small["prepare"]:
        for job, settings in entry.items():
            settings |= sizes.get(job, {})
    document = yaml.safe_load((TABLES / "dptdr/dptdr-3.yaml").read_text())
    document["rows"] = [row for row in document["rows"] if row["arm"] in ("finetuned", "dptdr")]
    small["pairs"] = [["finetuned", "dptdr"]]
    file = tmp_path / "dptdr-3.yaml"
    file.write_text(yaml.safe_dump(document))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    return file


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.jobs.common.session.find_cluster", lambda **options: None)


@pytest.mark.slow
def test_a_killed_reproduction_is_resumed_to_the_same_page(
    raw: Path,
    table: Path,
    tmp_path: Path,
    done: Callable[..., str],
    interrupt: Callable[..., Any],
    refused: Callable[..., str],
    documented: Callable[..., None],
) -> None:
    def command(name: str) -> tuple[object, ...]:
        results = tmp_path / name / "results.json.gz"
        return "reproduce", "--table", table, "--raw", raw, "--store", tmp_path / name, "--results", results

    out = done(*command("whole"))
    page = (tmp_path / "whole/results.md").read_text()
    assert page in out
    assert (tmp_path / "whole/results.html").read_text().count("<table>") == 3
    values = read_values(read_results(str(tmp_path / "whole/results.json.gz")))
    mean = 100 * values.mean("squad", "finetuned", "RR@10").mean()
    [row] = [line for line in page.splitlines() if line.startswith("| fine-tuning without RIP and UNM |")]
    assert row.split(" | ")[1].startswith(f"{mean:.1f} [")
    assert row.split(" | ")[2] == "34.9"
    difference = mean / 100 - values.mean("squad", "dptdr", "RR@10").mean()
    assert f"| finetuned - dptdr | {difference:+.4f} [" in page
    assert "| training | 10 epochs, 3 epochs, 40 epochs, 60 epochs | 2 steps |" in page
    for units in (4, 9):
        assert "run the same command again to resume" in interrupt(units, *command("killed")).err
    done(*command("killed"))
    for ending in ("md", "html", "json.gz"):
        whole, killed = (tmp_path / name / f"results.{ending}" for name in ("whole", "killed"))
        assert killed.read_bytes() == whole.read_bytes()
    line = refused(*command("killed"), "--seeds", 1, 2)
    assert line.endswith(
        "results.json.gz: holds results of experiment.seeds [0], expected [1, 2]: name another file with --results, or "
        "give --overwrite"
    )
    documented("Reproducing", "reproduce with a file of results of other options", line, 1)


def test_missing_data_and_mistakes_are_one_line(
    tmp_path: Path, refused: Callable[..., str], documented: Callable[..., None]
) -> None:
    store = ("--store", tmp_path / "store")
    line = refused("reproduce", "--table", "dptdr3", *store)
    assert "--table dptdr3: no such table; did you mean dptdr-3 or " in line
    documented("Reproducing", "reproduce of a table that does not exist", line, 1)
    line = refused("reproduce", "--table", "dptdr-3", "--raw", tmp_path, "--scale", "paper", *store)
    assert "msmarco: no collection.tsv, queries.train.tsv, " in line
    assert " and put it there; licence: research only" in line
    assert line.endswith("; and 2 more, which --plan lists")
    documented("Reproducing", "reproduce without the data of the table", line, 1)
    line = refused("reproduce", "--table", "gtr-3", *store)
    assert line == "error: --scale small: gtr-3 has no small form, as sizes of T5 are compared; gtr-5 has one"
    documented("Reproducing", "reproduce of a table without a small form", line, 1)
    file = tmp_path / "results.json.gz"
    file.write_text("{}")
    line = refused("reproduce", "--table", "dptdr-3", "--results", file, *store)
    assert line == f"error: {file}: not a gzip file; expected a file of --results"
    file.write_bytes(gzip.compress(b"[1]"))
    line = refused("reproduce", "--table", "dptdr-3", "--results", file, *store)
    assert line == f"error: {file}: not a file of --results: delete it or name another one"
    file.write_bytes(gzip.compress(b"a" * 100)[:12] + b"\xff" * 20)
    line = refused("reproduce", "--table", "dptdr-3", "--results", file, *store)
    assert line == f"error: {file}: not a file of --results: delete it or name another one"
    for name in ("results.json", "s3://bucket/results.json.gz"):
        line = refused("reproduce", "--table", "dptdr-3", "--results", name, *store)
        assert line == f"error: --results {name}: expected a local file whose name ends with .json.gz"
    assert "--limit 3: the table defines the sizes" in refused("reproduce", "--table", "dptdr-3", "--limit", 3, *store)
    assert not (tmp_path / "store").exists()
