"""--plan refuses what the run refuses before any work: the same line and status, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_outcome import Outcome

from riptide.indexing.store.store import Store

MISSING = [
    ("encode_corpus", "--encoder", "none/here"),
    ("encode_corpus", "--task", "none"),
    ("build_index", "--embeddings", "none"),
    ("build_index", "--embeddings", "enc", "--name", "new", "--factory", "IVF"),
    ("build_bm25", "--limit", "0"),
    ("fit_topics", "--name", "a/b"),
    ("search", "--source", "bm25:none"),
    ("search", "--mode", "exact", "--queries", "none"),
    ("search", "--mode", "exact", "--split", "none"),
    ("mine_negatives", "--sources", "bm25:none"),
    ("evaluate", "--runs", "none"),
    ("compare", "exact", "none"),
    ("judge", "exact", "none"),
    ("replay", "none-here"),
    ("draw", "points", "--embeddings", "none"),
    ("train_retriever", "--task", "t", "--backbone", "none/here", "--negatives", "none"),
    ("train_reranker", "--name", "r", "--backbone", "none/here", "--negatives", "none"),
    ("pretrain_rip", "--name", "t", "--backbone", "none/here"),
    ("import_corpus", "--source", "none-here"),
    ("import_corpus", "--delete", "none-here"),
    ("import_queries", "--source", "none-here"),
    ("convert_prompts", "--task", "t", "--source", "none-here"),
    ("serve_search", "--embeddings", "none"),
    ("migrate", "--to", "none/here"),
]


def check_plan(job: Callable[..., Outcome], store: Path, name: str, *arguments: object) -> str:
    """Runs a job with --plan and without it; returns the line of the refusal."""
    before = sorted(str(path) for path in store.rglob("*"))
    planned, run = (job(name, *arguments, "--store", store, *plan) for plan in (("--plan",), ()))
    assert (planned.status, planned.err) == (run.status, run.err)
    assert run.status in (1, 2), run
    assert sorted(str(path) for path in store.rglob("*")) == before
    return run.err


@pytest.mark.parametrize("arguments", MISSING, ids=" ".join)
def test_a_missing_input_or_an_impossible_option_is_refused_by_the_plan(
    world, job: Callable[..., Outcome], arguments: tuple[str, ...]
) -> None:
    assert check_plan(job, world.store, *arguments).startswith("error: ")


SYNTHESISED = ("--train", "prompts", "--prompt", "synthesised", "--sides", "query")
MISFITS = [
    (("--train", "prompts", "--flops-queries", 1), "--flops-queries 1.0: regularises sparse vectors"),
    ((*SYNTHESISED, "--no-uniformity"), "--no-uniformity: the prompt regulariser has weight 0 here"),
    ((*SYNTHESISED, "--no-alignment", "--divergence-weight", 1), "--no-alignment --divergence-weight 1: no batch has"),
    (("--train", "prompts", "--prompt", "per-task", "--sides", "query"), "--prompt per-task: there is one task, tiny"),
    (("--train", "prompts", "--loss", "kl", "--refresh-epochs", 1), "--loss kl with --refresh-epochs: negatives that"),
    (("--train", "all", "--learn-temperature", "--zero", 3), "--learn-temperature --zero 3: DeepSpeed's stage 3"),
]


@pytest.mark.parametrize(("options", "expected"), MISFITS, ids=[expected.partition(":")[0] for _, expected in MISFITS])
def test_options_of_a_training_are_checked_before_its_data_is_opened(
    world,
    job: Callable[..., Outcome],
    documented: Callable[..., None],
    options: tuple[object, ...],
    expected: str,
) -> None:
    """The named negatives are missing, which would be the error of opening them."""
    names = ("--task", "t", "--backbone", world.model, "--queries", "tiny", "--negatives", "missing")
    line = check_plan(job, world.store, "train_retriever", *names, *options)
    assert line.startswith(f"error: {expected}")
    documented("Training", f"train_retriever {' '.join(map(str, options))}", line, 1)


def tsv(path: Path, text: str) -> Path:
    """Writes a file and returns its path."""
    path.write_text(text, encoding="utf-8")
    return path


def test_a_taken_name_is_refused_by_the_plan(world, tmp_path: Path, job: Callable[..., Outcome], done) -> None:
    """Each command has the name of a complete artifact, and other options or inputs."""
    at = ("--store", world.store)
    done("build_bm25", *at)
    done("search", *at, "--source", "bm25", "--name", "words")
    mined = (
        "mine_negatives",
        *at,
        "--queries",
        "tiny",
        "--sources",
        "bm25",
        "--split",
        "test",
        "--depth",
        5,
        "--pool-negatives",
        1,
    )
    done(*mined, "--candidates", "pool", "--name", "drawn")
    first = tsv(tmp_path / "first.csv", "id,text\na,some words\n")
    second = tsv(tmp_path / "second.csv", "id,text\nb,other words\n")
    done("import_queries", *at, "--queries", "more", "--source", first)
    mined = tuple(each for each in mined if each not in at)
    for command in (
        ("import_corpus", "--source", second),
        ("import_queries", "--queries", "more", "--source", second),
        ("encode_corpus", "--encoder", world.model, "--name", "enc", "--passage-length", 9),
        ("build_index", "--embeddings", "enc", "--name", "idx", "--shards", 2),
        ("build_bm25", "--k1", 2),
        ("search", "--source", "bm25", "--queries", "tiny", "--name", "words", "--k", 3),
        (*mined, "--candidates", "pool", "--name", "drawn", "--seed", 3),
        (*(6 if each == 5 else each for each in mined), "--candidates", "pool"),
    ):
        line = check_plan(job, world.store, *command)
        assert "otherwise" in line, command


def test_a_name_that_a_draft_has_is_refused_by_the_plan(world, tmp_path: Path, job: Callable[..., Outcome]) -> None:
    """Each command has the name of a draft that another one has just begun."""
    store = Store(str(world.store))
    names = ("corpus/g0001", "queries/more", "embeddings/new/g0000", "index/new/g0000", "bm25/new/g0000", "runs/new")
    for key in (*names, "topics/new/g0000", "candidates/new", "prompts/new", "models/new"):
        kind, _, name = key.partition("/")
        store.create(kind, name, config={"other": 1})
    more = tsv(tmp_path / "more.csv", "id,text\nb,other words\n")
    new = ("--name", "new")
    for command in (
        ("import_corpus", "--append", "--source", more),
        ("import_corpus", "--filters", "year", "int64"),
        ("import_queries", "--queries", "more", "--source", more),
        ("encode_corpus", "--encoder", world.model, *new),
        ("build_index", "--embeddings", "enc", "--factory", "Flat", *new),
        ("build_bm25", *new),
        ("fit_topics", *new),
        ("search", "--mode", "exact", *new),
        ("mine_negatives", "--sources", "exact:enc", "--split", "test", "--candidates", "new"),
        ("pretrain_rip", "--backbone", world.model, "--max-length", 32, *new),
    ):
        line = check_plan(job, world.store, *command)
        assert "another command is making it, otherwise: " in line, (command, line)


def test_a_plan_reads_the_queries_of_a_corpus(tmp_path: Path, job: Callable[..., Outcome]) -> None:
    """Their bad lines are refused before the corpus is imported."""
    folder = tmp_path / "raw"
    folder.mkdir()
    tsv(folder / "corpus.jsonl", '{"_id": "a", "text": "some words"}\n')
    tsv(folder / "queries.jsonl", '{"_id": "q", "text": "words"}\n{"_id": "q", "text": "words"}\n')
    store = tmp_path / "store"
    planned, run = (job("import_corpus", "--store", store, "--source", folder, *plan) for plan in (("--plan",), ()))
    assert (planned.status, planned.err) == (run.status, run.err)
    assert "queries.jsonl: query id 'q' comes a second time" in run.err
    assert not store.exists()
