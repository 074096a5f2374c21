"""The job's model is that of the bare training, however often it was killed; what does not fit is refused in a line."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_cluster import start, wait_for, wait_for_its_end
from samples import make_passages, write_beir
from sentence_transformers import CrossEncoder

from indexing.artifact import Artifact
from indexing.corpus import Corpus
from indexing.models import model_folder, resolve_model
from indexing.negatives import mined_corpus, read_groups, training_data
from indexing.queries import Queries
from indexing.store import Store
from indexing.verify import verify
from retriever.numerics import choose_dtype
from retriever.reranker import Reranker, describe_reranker
from retriever.reranker_data import batch_at
from retriever.reranker_training import CrossOptions, CrossSystem
from retriever.training import Hooks, LoopOptions, Trainer

Done = Callable[..., str]
SMALL = ("--split", "all", "--batch", 8, "--negatives-per-query", 3, "--lr", "1e-3", "--max-length", 48, "--seed", 3)


def mine(store: Store, name: str = "hand", *, rows: dict | None = None, **inputs: Artifact) -> Artifact:
    """negatives/NAME by hand: of every query of the store its judged passages, and others; in two parts."""
    queries = Queries.open(store)
    corpus = Corpus.open(store)
    asked = queries.split("all")
    judged = pa.concat_tables(queries.qrels(split) for split in queries.splits).to_pylist()
    positives: dict[str, list[int]] = {}
    for line in judged:
        positives.setdefault(line["query_id"], []).append(int(corpus.rows_of([line["corpus_id"]])[0]))
    draw = np.random.default_rng(0)
    mined = {q: [int(row) for row in draw.choice(corpus.num_rows, 6, replace=False) if row not in positives[q]]
             for q in asked.ids}  # fmt: skip
    table = pa.table({
        "query_id": pa.array(asked.ids, pa.string()),
        "positives": pa.array([positives[q] for q in asked.ids], pa.list_(pa.int64())),
        "negatives": pa.array([mined[q] for q in asked.ids], pa.list_(pa.int64())),
        "more": pa.array([0.5] * len(asked.ids)),
    })  # fmt: skip
    for column, values in (rows or {}).items():
        table = table.set_column(table.column_names.index(column), column, values)
    of = {"corpus": corpus.generations[-1], "queries": queries.artifact, **inputs}
    with store.create("negatives", name, inputs=of, config={"by": "hand"}) as draft:
        for number, piece in enumerate((table.slice(0, 25), table.slice(25))):
            draft.commit(f"part-{number:05d}", ".parquet", lambda path, piece=piece: pq.write_table(piece, path),
                         rows=len(piece))  # fmt: skip
    return store.open("negatives", name)


def command(world, *more: object) -> tuple:
    return ("--store", world.store, "--backbone", world.model, "--name", "ce", "--negatives", "hand", *SMALL, *more)


def weights_of(store: Store, name: str = "ce") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model_folder(store.open("models", name)).iterdir()}


@pytest.fixture
def mined(world) -> Store:
    store = Store(str(world.store))
    mine(store)
    return store


def test_negatives_are_read_as_they_were_written(mined: Store) -> None:
    groups = read_groups(mined.open("negatives", "hand"))
    assert groups.query_ids == Queries.open(mined).split("all").ids
    files = sorted((Path(mined.url) / "negatives/hand").glob("*.parquet"))
    lines = [line for file in files for line in pq.read_table(file).to_pylist()]
    assert [rows.tolist() for rows in groups.positives] == [line["positives"] for line in lines]
    assert [rows.tolist() for rows in groups.negatives] == [line["negatives"] for line in lines]
    assert {rows.dtype for rows in (*groups.positives, *groups.negatives)} == {np.dtype(np.int64)}


@pytest.mark.slow
def test_the_model_is_that_of_the_bare_training(world, mined: Store, tmp_path: Path, done: Done) -> None:
    out = done("train_reranker", *command(world, "--steps", 6, "--cpus", 1))
    assert "train: 6 steps in" in out
    assert "models/ce: 6 steps over 40 of 40 queries, last loss " in out
    artifact = mined.open("models", "ce")
    assert {role: entry["artifact"] for role, entry in artifact.inputs.items()} == {
        "corpus": "corpus/g0000", "queries": Queries.open(mined).artifact.key, "negatives": "negatives/hand",
    }  # fmt: skip
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = training_data(Corpus.open(mined), Queries.open(mined), "all", mined.open("negatives", "hand"), None)
        cpu = torch.device("cpu")
        dtype = choose_dtype("auto", cpu)
        system = CrossSystem(Path(world.model), CrossOptions(**artifact.config["training"]), data, device=cpu,
                             dtype=dtype)  # fmt: skip
        losses: list[float] = []
        hooks = Hooks(lambda: None, lambda *_: None, lambda: None, lambda *_: None,
                      lambda told: losses.append(told["loss"]))  # fmt: skip
        Trainer(system, LoopOptions(steps=6, lr=1e-3, seed=3), device=cpu, dtype=dtype).train(hooks)
        system.save(tmp_path / "bare")
    finally:
        torch.set_num_threads(threads)
    assert weights_of(mined) == {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}
    assert artifact.notes["loss"] == losses[-1]
    folder = resolve_model(mined, "models/ce")
    assert describe_reranker(folder)["probability"] == "sigmoid"
    pair = ("a question", "a passage")
    np.testing.assert_allclose(Reranker(folder).score(*[[text] for text in pair]),
                               CrossEncoder(folder, device="cpu").predict([pair]), atol=0.02)  # fmt: skip
    assert all(finding.problem is None for finding in verify(mined))
    assert not (world.store / "checkpoints").exists()
    before = {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()}
    # Where and how it is computed is no other model.
    out = done("train_reranker", *command(world, "--steps", 6, "--cpus", 1, "--workers", 2, "--zero", 1))
    assert "train:" not in out
    assert "models/ce: 6 steps over 40 of 40 queries" in out
    assert {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_other_options_under_the_name_are_refused(world, mined: Store, done: Done, refused: Done) -> None:
    done("train_reranker", *command(world, "--steps", 1, "--cpus", 1))
    for more, difference in (
        (("--steps", 2, "--cpus", 1), "config.loop.steps 1, now 2"),
        (("--steps", 1, "--cpus", 2), "config.cpus 1, now 2"),
        (("--steps", 1, "--cpus", 1, "--dtype", "float32"), 'config.dtype "auto", now "float32"'),
        (("--steps", 1, "--cpus", 1, "--loss", "listwise"), 'config.training.loss "bce", now "listwise"'),
    ):
        assert difference in refused("train_reranker", *command(world, *more))
    assert "models/ce-limit7: 1 steps over 7 of 7 queries" in done(
        "train_reranker", *command(world, "--steps", 1, "--cpus", 1, "--limit", 7)
    )


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.parametrize(("workers", "checkpoints"), [(1, 1), (2, 2)])
def test_killed_and_started_again_it_ends_with_the_same_weights(
    world, mined: Store, done: Done, workers: int, checkpoints: int
) -> None:
    """kill -9 to the job after so many checkpoints; its private Ray goes down with it."""
    more = ("--steps", 100, "--cpus", 1, "--workers", workers, "--checkpoint-every", 20)
    done("train_reranker", *command(world, *more, "--name", "whole"))
    job = start("train_reranker", *command(world, *more))
    folder = world.store / "checkpoints" / "ce.models"

    def steps_kept() -> int:
        try:
            return int(json.loads((folder / "latest.json").read_text())["step"])
        except FileNotFoundError:
            return 0

    wait_for(lambda: steps_kept() >= 20 * checkpoints, "a checkpoint", job.process)
    tree = [job.process.pid, *(child.pid for child in psutil.Process(job.process.pid).children(recursive=True))]
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    wait_for_its_end(tree[1:])
    assert not (world.store / "models/ce/manifest.json").exists(), "the kill came too late to be in the middle"
    assert steps_kept() < 100
    assert "models/ce: 100 steps" in done("train_reranker", *command(world, *more))
    assert weights_of(mined) == weights_of(mined, "whole")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.long
def test_a_worker_that_is_killed_is_started_again(world, mined: Store, done: Done) -> None:
    more = ("--steps", 60, "--cpus", 1, "--workers", 2, "--checkpoint-every", 20)
    done("train_reranker", *command(world, *more, "--name", "whole"))
    job = start("train_reranker", *command(world, *more))
    wait_for(lambda: (world.store / "checkpoints/ce.models/latest.json").exists(), "a checkpoint", job.process)
    workers = [child for child in psutil.Process(job.process.pid).children(recursive=True)
               if "RayTrainWorker" in " ".join(child.cmdline())]  # fmt: skip
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    assert "models/ce: 60 steps" in job.end()
    assert weights_of(mined) == weights_of(mined, "whole")


def test_plan(world, mined: Store, done: Done) -> None:
    out = done("train_reranker", *command(world, "--epochs", 2, "--plan"))
    assert "queries   40 of the 40 of all, with negatives in negatives/hand" in out
    assert "steps     10 of 8 queries on 1 workers" in out
    assert "pairs     320, at most 15,360 tokens" in out
    assert mined.names("models") == mined.incomplete() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--split", "dev"), "no split 'dev' with qrels; it has test, train"),
        (("--negatives", "other"), "negatives/other: there is no such artifact (complete negatives: hand)"),
        (("--queries", "other"), "queries/other: there is no such artifact"),
        (("--backbone", "./nowhere"), "no such folder"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--max-length", 65, "--steps", 1), "max_length=65 is more than the 64 positions"),
        (("--epochs", 0), "--epochs 0.0: expected more than 0"),
        (("--steps", 0), "steps=0 checkpoint_every=100"),
        (("--lr", "-1"), "lr=-1.0"),
        (("--batch", 1, "--workers", 2), "a query for each worker"),
        (("--name", "a/b"), "name 'a/b': expected one, and without '/'"),
        (("--zero", 0, "--offload"), "zero=0 offload=True"),
        (("--workers", 2, "--min-workers", 3), "--min-workers 3: expected 1 to --workers 2"),
        (("--workers", 8, "--batch", 8), "--workers 8 --cpus 2: the cluster has 2 cores, its"),
        (("--limit", 0), "--limit 0: expected at least 1"),
    ],
)
@pytest.mark.usefixtures("mined")
def test_bad_input(world, refused: Done, more: tuple, message: str) -> None:
    """Told before anything is begun, so that the mended command may take the name."""
    assert message in refused("train_reranker", *command(world, *more))
    assert not (world.store / "models").exists()


@pytest.mark.parametrize("more", [("--no-such-flag", 1), ("--loss", "mse"), ("--batch", "many")])
def test_bad_usage(world, job, more: tuple) -> None:
    assert job("train_reranker", *command(world, *more)).status == 2


def test_deleted_passages_are_trained_on_no_more(world, mined: Store, done: Done, refused, tmp_path: Path) -> None:
    """Neither as positives nor as negatives nor to fill up, whenever deleted; growth alone changes nothing."""
    negatives, queries = mined.open("negatives", "hand"), Queries.open(mined)
    before = training_data(mined_corpus(mined, negatives), queries, "all", negatives, None)
    more = write_beir(tmp_path / "more", make_passages(30, seed=9, prefix="n"))
    at = ("--store", world.store)
    done("import_corpus", *at, "--source", more, "--append")
    assert len(mined_corpus(mined, negatives).generations) == 1
    gone = sorted({int(before.positives[0][0]), *range(0, 240, 2)} - {int(before.positives[1][0])})
    (tmp_path / "gone").write_text("".join(f"p{row}\n" for row in gone))
    done("import_corpus", *at, "--delete", tmp_path / "gone")
    corpus = mined_corpus(mined, negatives)
    assert corpus.deleted.tolist() == gone
    after = training_data(corpus, queries, "all", negatives, None)
    kept = {query: place for place, query in enumerate(before.queries)}
    assert before.queries[0] not in after.queries
    assert before.queries[1] in after.queries
    for place, query in enumerate(after.queries):
        for now, then in ((after.positives, before.positives), (after.negatives, before.negatives)):
            assert now[place].tolist() == [row for row in then[kept[query]].tolist() if row not in gone]
    options = CrossOptions(batch=8, negatives_per_query=8)
    drawn = np.concatenate([batch_at(after, options, step)[1].ravel() for step in range(40)])
    assert not {*drawn.tolist()} & {*gone}
    assert len({*drawn.tolist()}) > 120
    out = done("train_reranker", *command(world, "--plan"))
    assert f"queries   {len(after.queries)} of the 40 of all" in out


def test_negatives_of_something_else_are_refused(world, mined: Store, refused: Done) -> None:
    other = mined.open("embeddings", "enc/g0000")
    for number, (role, message) in enumerate((("corpus", "was mined from the corpus"),
                                              ("queries", "was mined for the queries"))):  # fmt: skip
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
def test_rows_that_cannot_be_are_refused(
    world, mined: Store, refused: Done, column: str, value: list[int], message: str
) -> None:
    values = [value, *[[0]] * 39] if column == "negatives" else [value, *[[1]] * 39]
    mine(mined, "bad", rows={column: pa.array(values, pa.list_(pa.int64()))})
    assert message in refused("train_reranker", *command(world, "--negatives", "bad"))


def test_queries_without_a_positive_are_left_out_and_counted(world, mined: Store, done: Done, refused: Done) -> None:
    """As where a passage was deleted since the query was judged."""
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
