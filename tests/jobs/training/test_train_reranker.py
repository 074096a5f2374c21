"""The job's model is that of the training loop; negatives that do not fit are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mined import mine, weights
from samples import make_passages, write_beir
from sentence_transformers import CrossEncoder

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.mining.negatives import mined_corpus, read_groups, read_training_data
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.model_artifacts import resolve_model
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.reranker import Reranker, describe_reranker
from riptide.retriever.forward.numerics import choose_dtype
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.training.hooks import WorkerHooks
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import batch_at

Done = Callable[..., str]
SMALL = ("--split", "all", "--batch", 8, "--negatives-per-query", 3, "--lr", "1e-3", "--max-length", 48, "--seed", 3)


def command(world, *more: object) -> tuple:
    return ("--store", world.store, "--backbone", world.model, "--name", "ce", "--negatives", "hand", *SMALL, *more)


def test_negatives_are_read_as_they_were_written(mined: Store) -> None:
    groups = read_groups(mined.open("negatives", "hand"))
    assert groups.query_ids == Queries.open(mined).split("all").ids
    files = sorted((Path(mined.url) / "negatives/hand").glob("*.parquet"))
    lines = [line for file in files for line in pq.read_table(file).to_pylist()]
    assert [rows.tolist() for rows in groups.positives] == [line["positives"] for line in lines]
    assert [rows.tolist() for rows in groups.negatives] == [line["negatives"] for line in lines]
    assert {rows.dtype for rows in (*groups.positives, *groups.negatives)} == {np.dtype(np.int64)}


def test_the_model_is_that_of_the_training_loop(world, mined: Store, tmp_path: Path, done: Done) -> None:
    out = done("train_reranker", *command(world, "--steps", 6, "--cpus", 1))
    assert "train: 6 steps in" in out
    assert "models/ce: 6 steps over 40 of 40 queries, last loss " in out
    artifact = mined.open("models", "ce")
    assert {role: entry["artifact"] for role, entry in artifact.inputs.items()} == {
        "corpus": "corpus/g0000",
        "queries": Queries.open(mined).artifact.key,
        "negatives": "negatives/hand",
    }
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = read_training_data(Corpus.open(mined), Queries.open(mined), "all", mined.open("negatives", "hand"), None)
        cpu = torch.device("cpu")
        dtype = choose_dtype("auto", cpu)
        system = CrossSystem(
            Path(world.model), CrossEncoderOptions(**artifact.config["training"]), data, device=cpu, dtype=dtype
        )
        losses: list[float] = []
        hooks = WorkerHooks(
            lambda: None, lambda *_: None, lambda: None, lambda *_: None, lambda values: losses.append(values.loss)
        )
        Trainer(system, LoopOptions(steps=6, lr=1e-3, seed=3), device=cpu, dtype=dtype).train(hooks)
        system.save(tmp_path / "bare")
    finally:
        torch.set_num_threads(threads)
    assert weights(mined, "models/ce") == {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}
    assert artifact.notes["loss"] == losses[-1]
    folder = resolve_model(mined, "models/ce")
    assert describe_reranker(folder)["probability"] == "sigmoid"
    pair = ("a question", "a passage")
    np.testing.assert_allclose(
        Reranker(folder).score(*[[text] for text in pair]),
        CrossEncoder(folder, device="cpu").predict([pair]),
        atol=0.02,
    )
    assert all(finding.problem is None for finding in verify(mined))
    assert not (world.store / "checkpoints").exists()
    before = {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()}
    # The number of workers and the stage are no part of the fingerprint.
    out = done("train_reranker", *command(world, "--steps", 6, "--cpus", 1, "--workers", 2, "--zero", 1))
    assert "train:" not in out
    assert "models/ce: 6 steps over 40 of 40 queries" in out
    planned = done("train_reranker", *command(world, "--steps", 6, "--cpus", 1, "--plan"))
    assert planned == f"nothing to make: {world.store}/models/ce is complete\n"
    assert {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()} == before


def test_other_options_under_the_name_are_refused(world, mined: Store, done: Done, refused: Done) -> None:
    done("train_reranker", *command(world, "--steps", 1, "--cpus", 1))
    for more, difference in (
        (("--steps", 2, "--cpus", 1), "loop.steps 1, now 2"),
        (("--steps", 1, "--cpus", 2), "--cpus 1, now 2"),
        (("--steps", 1, "--cpus", 1, "--dtype", "float32"), "--dtype auto, now float32"),
        (("--steps", 1, "--cpus", 1, "--loss", "listwise"), "training.loss bce, now listwise"),
    ):
        assert difference in refused("train_reranker", *command(world, *more))
    assert "models/seven: 1 steps over 7 of 7 queries" in done(
        "train_reranker", *command(world, "--steps", 1, "--cpus", 1, "--limit", 7, "--name", "seven")
    )


def test_a_time_limit_ends_a_training(world, mined: Store, done: Done) -> None:
    limited = command(world, "--epochs", 1000, "--max-minutes", 0.02, "--cpus", 1)
    assert "steps     at most 5,000, as many as take --max-minutes 0.02, of 8 queries" in done(
        "train_reranker", *limited, "--plan"
    )
    out = done("train_reranker", *limited)
    steps = mined.open("models", "ce").notes["steps"]
    assert 3 < steps < 5000
    assert f"train: {steps:,} steps, which take about --max-minutes 0.02" in out.splitlines()


def test_plan(world, mined: Store, done: Done) -> None:
    out = done("train_reranker", *command(world, "--epochs", 2, "--plan"))
    assert "queries   40 of the 40 of all, with negatives in negatives/hand" in out
    assert "steps     10 of 8 queries on 1 workers" in out
    assert "pairs     320, at most 15,360 tokens" in out
    assert mined.names("models") == mined.incomplete_keys() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--split", "dev"), "no split 'dev' with qrels; it has test, train"),
        (("--negatives", "other"), "negatives/other: there is no such artifact (complete negatives: hand)"),
        (("--queries", "other"), "queries/other: there is no such artifact"),
        (("--backbone", "./nowhere"), "no such folder"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--max-length", 65, "--steps", 1), "--max-length 65: more than the 64 positions"),
        (("--epochs", 0), "--epochs 0.0: expected more than 0"),
        (("--steps", 0), "--steps 0: expected at least 1"),
        (("--checkpoint-minutes", "-1"), "--checkpoint-minutes -1.0: expected at least 0"),
        (("--lr", "-1"), "--lr -1.0: expected more than 0"),
        (("--batch", 1, "--workers", 2), "a row of the batch for each worker"),
        (("--name", "a/b"), "name 'a/b': expected a name without '/'"),
        (("--zero", 0, "--offload"), "--offload: expected --zero 1 to 3"),
        (("--workers", 2, "--min-workers", 3), "--min-workers 3: expected 1 to --workers 2"),
        (("--cpus", 99), "--cpus 99: expected at most "),
        (("--limit", 0), "--limit 0: expected at least 1"),
    ],
)
@pytest.mark.usefixtures("mined")
def test_bad_input(world, refused: Done, more: tuple, message: str) -> None:
    """Refused before the model begins, so that the corrected command can take the name."""
    assert message in refused("train_reranker", *command(world, *more))
    assert not (world.store / "models").exists()


@pytest.mark.parametrize("more", [("--no-such-flag", 1), ("--loss", "mse"), ("--batch", "many")])
def test_bad_usage(world, job, more: tuple) -> None:
    assert job("train_reranker", *command(world, *more)).status == 2


def test_deleted_passages_are_not_trained_on(world, mined: Store, done: Done, refused, tmp_path: Path) -> None:
    """They are neither positives nor negatives, and do not fill up a batch; growth alone changes nothing."""
    negatives, queries = mined.open("negatives", "hand"), Queries.open(mined)
    before = read_training_data(mined_corpus(mined, negatives), queries, "all", negatives, None)
    more = write_beir(tmp_path / "more", make_passages(30, seed=9, prefix="n"))
    at = ("--store", world.store)
    done("import_corpus", *at, "--source", more, "--append")
    assert len(mined_corpus(mined, negatives).generations) == 1
    gone = sorted({int(before.positives[0][0]), *range(0, 240, 2)} - {int(before.positives[1][0])})
    (tmp_path / "gone").write_text("".join(f"p{row}\n" for row in gone))
    done("import_corpus", *at, "--delete", tmp_path / "gone")
    corpus = mined_corpus(mined, negatives)
    assert corpus.deleted.tolist() == gone
    after = read_training_data(corpus, queries, "all", negatives, None)
    kept = {query: place for place, query in enumerate(before.queries)}
    assert before.queries[0] not in after.queries
    assert before.queries[1] in after.queries
    for place, query in enumerate(after.queries):
        for now, then in ((after.positives, before.positives), (after.negatives, before.negatives)):
            assert now[place].tolist() == [row for row in then[kept[query]].tolist() if row not in gone]
    options = CrossEncoderOptions(batch=8, negatives_per_query=8)
    drawn = np.concatenate([batch_at(after, options, step)[1].ravel() for step in range(40)])
    assert not {*drawn.tolist()} & {*gone}
    assert len({*drawn.tolist()}) > 120
    out = done("train_reranker", *command(world, "--plan"))
    assert f"queries   {len(after.queries)} of the 40 of all" in out


def test_negatives_of_something_else_are_refused(world, mined: Store, refused: Done) -> None:
    other = mined.open("embeddings", "enc/g0000")
    for number, (role, message) in enumerate(
        (("corpus", "was mined from the corpus"), ("queries", "was mined for the queries"))
    ):
        mine(mined, f"other{number}", **{role: other})
        assert message in refused("train_reranker", *command(world, "--negatives", f"other{number}"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("negatives", [10**6], "names rows 0 to 1000000 of a corpus of 240"),
        ("negatives", [-1], "names rows -1 to"),
        ("positives", [*range(240)], "each of the 240 passages is a positive of the query 'q0'"),
    ],
)
def test_impossible_rows_are_refused(
    world, mined: Store, refused: Done, column: str, value: list[int], message: str
) -> None:
    values = [value, *[[0]] * 39] if column == "negatives" else [value, *[[1]] * 39]
    mine(mined, "bad", rows={column: pa.array(values, pa.list_(pa.int64()))})
    assert message in refused("train_reranker", *command(world, "--negatives", "bad"))


def test_queries_without_a_positive_are_left_out_and_counted(world, mined: Store, done: Done, refused: Done) -> None:
    """For example, if a passage was deleted after the query was judged."""
    mine(mined, "few", rows={"positives": pa.array([[], *[[1]] * 39], pa.list_(pa.int64()))})
    out = done("train_reranker", *command(world, "--negatives", "few", "--plan"))
    assert "queries   39 of the 40 of all, with negatives in negatives/few" in out
    mine(mined, "none", rows={"positives": pa.array([[]] * 40, pa.list_(pa.int64()))})
    line = refused("train_reranker", *command(world, "--negatives", "none"))
    assert "none of the 40 queries of the split 'all' has positives and negatives" in line


def test_other_columns_are_refused(world, mined: Store, refused: Done) -> None:
    mine(mined, "bad", rows={"negatives": pa.array(["none"] * 40)})
    line = refused("train_reranker", *command(world, "--negatives", "bad"))
    assert "part-00000-" in line
    assert "expected columns query_id, positives and negatives" in line
