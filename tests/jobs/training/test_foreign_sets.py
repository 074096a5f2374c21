"""A training set of another store, with mined negatives: it trains as a set of the same store does.

Only two things differ: passages with equal texts, and a run whose other store changes before it is resumed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from foreign_sets import MINING, ForeignStore, make_foreign_store
from mined import weights
from samples import make_passages, save_tiny_bert, write_beir
from training_commands import command

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.model_artifacts import StoredCheckpoint
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import open_dev_set
from riptide.jobs.common.flat_options import build_options
from riptide.jobs.training.opening import open_retriever_setup
from riptide.jobs.training.run_options import DevPool
from riptide.jobs.training.training_options import TrainRetriever
from riptide.retriever.encoding.reranker import Reranker
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.training_data import batch_at

Done = Callable[..., str]
TUNE = (
    "tune_prompts",
    "--task",
    "NAME",
    "--length",
    4,
    "--dtype",
    "float32",
    "--queries",
    "tiny",
    "--negatives-per-query",
    2,
    "--lr",
    "0.05",
    "--negatives",
)


@pytest.fixture
def foreign(world, done: Done, tmp_path: Path) -> ForeignStore:
    return make_foreign_store(tmp_path, world.model, done)


def open_system(world, negatives: str, more: tuple[str, str], **options: Any) -> DualEncoderSystem:
    """Returns the system that a worker of train_retriever would train on the query set `tiny` and another one."""
    named = {"store": str(world.store), "backbone": world.model, "queries": "tiny", "negatives": negatives}
    chosen = build_options(
        TrainRetriever, {"task": "x", "train": "prompts", "length": 4, "also_train": more[1:], **named, **options}
    )
    return open_retriever_setup(Store(str(world.store)), chosen).maker.make(
        device=torch.device("cpu"), dtype=torch.float32, rank=0, world=1
    )[0]


def test_quality_is_the_mean_over_the_dev_splits_of_all_sets(world, foreign: ForeignStore, refused: Done) -> None:
    also = f"queries=foreign,store={foreign.path},dev=train"
    options = build_options(
        TrainRetriever,
        {
            "store": str(world.store),
            "backbone": world.model,
            "queries": "tiny",
            "negatives": "none",
            "task": "x",
            "train": "prompts",
            "length": 4,
            "also_train": (also,),
            "dev_split": "train",
            "dev_passages": DevPool(40),
        },
    )
    maker = open_retriever_setup(Store(str(world.store)), options).maker
    system, evaluate, _ = maker.make(device=torch.device("cpu"), dtype=torch.float32, rank=0, world=1)
    assert evaluate is not None

    def compose(titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        return system.tokenizer.compose(titles, texts, system.encoder.title)

    values = []
    for store, name in ((Store(str(world.store)), "tiny"), (foreign.store, "foreign")):
        corpus = Corpus.open(store)
        pairs = read_judged_pairs(corpus, Queries.open(store, name), "train")
        values.append(open_dev_set(corpus, pairs, 40, compose).mrr(system))
    assert values[0] != values[1]
    assert evaluate() == pytest.approx(np.mean(values), abs=1e-12)
    at = (
        "tune_prompts",
        "--store",
        world.store,
        "--backbone",
        world.model,
        "--task",
        "x",
        "--queries",
        "tiny",
        "--negatives",
        "none",
    )
    assert "--also-train dev=train: is measured together with --dev-split" in refused(*at, "--also-train", also)
    line = refused(*at, "--dev-split", "train", "--also-train", also.replace("dev=train", "dev=nowhere"))
    assert "no split 'nowhere' with qrels; it has train" in line


def append(store: Store, foreign: ForeignStore, done: Done) -> None:
    """Appends the foreign passages to the corpus of a store, with their queries and negatives/taught as `others`."""
    done("import_corpus", "--store", store.url, "--source", foreign.source, "--append")
    done("import_queries", "--store", store.url, "--source", foreign.source)
    corpus = Corpus.open(store)
    first = corpus.num_rows - 30
    inputs = {"corpus": corpus.generations[-1], "queries": Queries.open(store, "foreign").artifact}
    [part] = (artifact := foreign.store.open("negatives", "taught")).numbered_parts("part")
    table = pq.read_table(artifact.local_path(part))
    for name in ("positives", "negatives", "copies"):
        rows = [[first + row for row in own] for own in table[name].to_pylist()]
        table = table.set_column(table.column_names.index(name), name, pa.array(rows, pa.list_(pa.int64())))
    with store.create("negatives", "others", inputs=inputs, config={}) as draft:
        draft.commit("part-00000", ".parquet", lambda path: pq.write_table(table, path), rows=len(table))


def test_two_stores_give_the_bytes_of_one_and_the_scores_of_both_teachers(
    world, foreign: ForeignStore, classifier: str, done: Done, tmp_path: Path
) -> None:
    """The one store holds the foreign passages after its own, as the rows of two stores are numbered in training."""
    teach = ("--denoise-threshold", "0.5", "--reranker", classifier, "--teacher-scores")
    done("mine_negatives", "--store", world.store, *MINING, "--queries", "tiny", "--name", "taught", *teach)
    foreign.mine(done, "taught", *teach)
    joined = Store(shutil.copytree(world.store, tmp_path / "joined").as_posix())
    append(joined, foreign, done)
    two = foreign.training_set("taught")
    store = Store(str(world.store))
    trained = []
    for loss in ("contrastive", "kl", "margin-mse"):
        ask = ("--steps", 3, "--loss", loss)
        done(*command((*TUNE, "taught"), world, loss, *ask, *two))
        artifact = store.open("prompts", loss)
        assert artifact.inputs["negatives:2"]["artifact"] == f"{foreign.path}/negatives/taught"
        one = ("--store", joined.url, "--also-train", "queries=foreign,negatives=others")
        done(*command((*TUNE, "taught"), world, loss, *ask, *one))
        assert weights(joined, f"prompts/{loss}") == weights(store, f"prompts/{loss}")
        assert joined.open("prompts", loss).notes["loss"] == artifact.notes["loss"]
        trained.append(weights(store, f"prompts/{loss}")["prompt.safetensors"])
    assert len(set(trained)) == 3

    system = open_system(world, "taught", two, loss="kl", negatives_per_query=2, batch=16)
    data, reranker = system.data, Reranker(classifier)
    assert data is not None
    queries, rows = batch_at(data, system.tuning, 0)
    assert {*(rows >= 240).all(1)} == {True, False}
    labels = system.batch(0, 0, 1).arguments
    texts = {passage["text"] for passage in make_passages(30, seed=5)}
    for query, group, teacher in zip(queries, rows, labels["teacher"], strict=True):
        assert {*data.passages(group)[1]} <= texts or query < 10
        known = reranker.score([data.queries[query]] * 3, reranker.compose(*data.passages(group)))
        np.testing.assert_allclose(torch.sigmoid(teacher), known, atol=0.03)


def test_stored_vectors_of_two_stores_are_read(
    world, foreign: ForeignStore, done: Done, refused: Done, tmp_path: Path, documented: Callable[..., None]
) -> None:
    """The passages of a step are the bytes of the embeddings of both stores, and their fingerprints are inputs."""
    option, more = foreign.training_set()
    system = open_system(world, "none", (option, more), sides="query", batch=16)
    stores = (Store(str(world.store)), foreign.store)
    first, second = (Embeddings.open(store, "enc", Corpus.open(store)) for store in stores)
    _, rows = batch_at(system.data, system.tuning, 0)
    passages = np.unique(rows)
    assert {*(passages >= 240)} == {True, False}
    expected = np.concatenate([first.take(passages[passages < 240]), second.take(passages[passages >= 240] - 240)])
    [chunk] = [chunk for chunk in system.batch(0, 0, 1).chunks if isinstance(chunk.inputs, torch.Tensor)]
    assert chunk.inputs.numpy().tobytes() == expected.astype(np.float32).tobytes()
    assert system.vectors is not None
    expected = np.concatenate([of.take(np.array([row])) for of, row in ((second, 10), (first, 3), (second, 0))])
    np.testing.assert_array_equal(system.vectors(np.array([250, 3, 240])), expected)
    ask = (*TUNE, "none", "--steps", 2, "--sides", "query", "--negatives-per-query", 0)
    done(*command(ask, world, "two", option, more))
    inputs = Store(str(world.store)).open("prompts", "two").inputs
    assert inputs["embeddings/0"]["artifact"] == "embeddings/enc/g0000"
    assert inputs["embeddings:2/0"]["artifact"] == f"{foreign.path}/embeddings/enc/g0000"
    at = ("--store", foreign.path, "--dtype", "float32", "--compile", "never")
    done("encode_corpus", *at, "--encoder", world.model, "--name", "again")
    line = refused(*command(ask, world, "x", option, more))
    assert line.startswith(f"error: {foreign.path}: the backbone made several embeddings of the passages: again, enc; ")
    assert "name one with embeddings=NAME in --also-train" in line
    assert "embeddings/again" in done(*command(ask, world, "x", option, f"{more},embeddings=again", "--plan"))
    line = refused(*command((*TUNE, "none", "--plan"), world, "x", option, f"{more},embeddings=again"))
    assert "--also-train embeddings=again --sides tied: stored vectors of passages are for --sides query" in line
    other = save_tiny_bert(tmp_path / "other", seed=9)
    done("encode_corpus", *at, "--encoder", other, "--name", "other")
    line = refused(*command(ask, world, "x", option, f"{more},embeddings=other"))
    line = line.replace(world.model, "tiny-bert")
    documented("Training", "train_retriever --sides query with a set whose store has another backbone", line, 1)


def test_a_set_without_teacher_scores_is_refused_by_name(
    world, foreign: ForeignStore, classifier: str, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    teach = ("--denoise-threshold", "0.5", "--reranker", classifier, "--teacher-scores")
    done("mine_negatives", "--store", world.store, *MINING, "--queries", "tiny", "--name", "taught", *teach)
    foreign.mine(done, "plain")
    kl = ("--steps", 1, "--loss", "kl")
    line = refused(*command((*TUNE, "taught"), world, "x", *kl, *foreign.training_set("plain")))
    assert line.startswith(f"error: {foreign.path}/negatives/plain: has no teacher scores")
    documented("Training", "tune_prompts --loss kl with a training set of another store without scores", line, 1)
    line = refused(*command((*TUNE, "taught"), world, "x", *kl, *foreign.training_set()))
    assert "training set foreign: judged pairs alone have no teacher scores" in line
    foreign.mine(done, "taught", *teach)
    line = refused(*command((*TUNE, "none"), world, "x", *kl, *foreign.training_set("taught")))
    assert "training set tiny: judged pairs alone have no teacher scores" in line
    assert Store(str(world.store)).names("prompts") == Store(str(world.store)).incomplete_keys() == []


@pytest.mark.parametrize("batches", ["mixed", "one-task"])
def test_equal_texts_of_two_stores_are_negatives_only_in_a_mixed_batch(
    world, done: Done, tmp_path: Path, batches: str
) -> None:
    """The foreign passages have the texts of the positives of `tiny`, and of others."""
    positives = {passage for _, passage, _ in world.judged[30:]}
    copied = [p for p in world.passages if p["_id"] in positives]
    copied += [p for p in world.passages if p["_id"] not in positives][:20]
    foreign = make_foreign_store(tmp_path, world.model, done, [{**p, "_id": f"f{p['_id']}"} for p in copied])
    foreign.mine(done, "mined")
    done("mine_negatives", "--store", world.store, *MINING, "--queries", "tiny", "--name", "mined")
    more = foreign.training_set("mined")
    system = open_system(world, "mined", more, batches=batches, batch=16, negatives_per_query=1)
    assert system.data is not None
    shared = 0
    for step in range(2):
        queries, rows = batch_at(system.data, system.tuning, step)
        passages, labels = np.unique(rows), system.batch(step, 0, 1).arguments
        keys = np.array(["\n".join(key) for key in zip(*system.data.passages(passages), strict=True)])
        for place, query in enumerate(queries):
            is_equal = (keys == keys[labels["positives"][place]]) & ((passages >= 240) != (query >= 10))
            assert not labels["ignored"][place].numpy()[is_equal].any()
            shared += int(is_equal.sum())
    assert (shared > 0) == (batches == "mixed")


def test_a_resume_whose_other_store_is_not_as_before_is_refused(
    world,
    foreign: ForeignStore,
    done: Done,
    refused: Done,
    job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    documented: Callable[..., None],
) -> None:
    """As soon as the store is as before, the run resumes. Passages that are only appended do not change it."""
    foreign.mine(done, "mined")
    form, more = (*TUNE, "none"), ("--steps", 4, "--checkpoint-every", 2)
    ask = command(form, world, "cut", *more, *foreign.training_set("mined"))
    store = Store(str(world.store))
    done(*command(form, world, "whole", *more, *foreign.training_set("mined")))
    save = StoredCheckpoint.save

    def interrupted(self: StoredCheckpoint, step: int, write: Callable) -> None:
        save(self, step, write)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoint, "save", interrupted)
        assert job(*ask).status == 130

    original = Path(shutil.copytree(foreign.path, tmp_path / "original"))
    moved = foreign.path.rename(tmp_path / "moved")
    line = refused(*ask)
    assert line.startswith(f"error: {foreign.path}: there is no store here")
    line = refused(*command(form, world, "cut", *more, *foreign.training_set("mined", moved)))
    assert f"its input {foreign.path}/queries/foreign is now {moved}/queries/foreign, with the same content; " in line
    assert "; give the same inputs, or another name (--task), or run this command again when " in line
    moved.rename(foreign.path)

    foreign.store.remove("negatives/mined")
    foreign.mine(done, "mined", "--seed", 1)
    line = refused(*ask)
    assert (
        f"is making it, otherwise: it was made from another {foreign.path}/negatives/mined than the present one; "
        in line
    )
    documented("Training", "resume of tune_prompts after negatives of its other store were mined again", line, 1)
    (tmp_path / "gone").write_text("f0\n")
    done("import_corpus", "--store", foreign.path, "--delete", tmp_path / "gone")
    line = refused(*ask)
    assert f"it was made from {foreign.path}/corpus/g0000, now {foreign.path}/corpus/g0001, it was made from " in line

    shutil.rmtree(foreign.path)
    original.rename(foreign.path)
    source = write_beir(tmp_path / "later", make_passages(3, seed=6, prefix="l"))
    done("import_corpus", "--store", foreign.path, "--source", source, "--append")
    assert " kept) in " in done(*ask)
    assert weights(store, "prompts/cut") == weights(store, "prompts/whole")
