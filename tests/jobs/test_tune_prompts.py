"""A task from training to search: its prompt flows through encoding, search and mining; killed, it goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from local_cluster import LONG, start, title_of, wait_for, wait_for_its_end
from samples import save_tiny_bert
from sentence_transformers import SentenceTransformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train_reranker import mine

from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.encoders import spec_of
from indexing.models import model_folder
from indexing.queries import Queries
from indexing.runs import read_run
from indexing.store import Store
from retriever.encoder import Encoder, EncoderOptions
from retriever.prompts import load_prompt

Done = Callable[..., str]
SMALL = ("--negatives", "hand", "--split", "train", "--batch", 8, "--negatives-per-query", 2, "--length", 4,
         "--cpus", 1, "--dtype", "float32", "--seed", 3)  # fmt: skip
EXACT = ("--dtype", "float32", "--compile", "never")


@pytest.fixture
def mined(world) -> Store:
    store = Store(str(world.store))
    mine(store)
    return store


def command(world, *more: object) -> tuple:
    return ("tune_prompts", "--store", world.store, "--backbone", world.model, *SMALL, *more)


def weights(store: Store, kind: str, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model_folder(store.open(kind, name)).rglob("*") if path.is_file()}


def test_a_prompt_flows_through_encoding_and_search(world, mined: Store, done: Done, tmp_path: Path) -> None:
    more = ("--task", "t", "--steps", 6, "--lr", "0.05", "--dev-split", "test", "--evaluate-every", 3)
    out = done(*command(world, *more, "--curves", tmp_path / "curves"))
    assert "prompts/t: " in out
    assert "6 steps over 10 queries" in out
    assert "dev MRR@10" in out
    assert (tmp_path / "curves/curves.png").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "curves/curves.json").read_text())) == 6
    events = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, 7)]
    assert {"loss", "learning rate", "dev MRR@10"} == {*events.Tags()["scalars"]}
    assert sorted(weights(mined, "prompts", "t")) == ["prompt.json", "prompt.safetensors"]
    assert not [*(world.store / "checkpoints").rglob("*.safetensors")]
    assert done(*command(world, *more)) in out

    done("encode_corpus", "--store", world.store, "--task", "t", *EXACT)
    corpus = Corpus.open(mined)
    made = Embeddings.open(mined, "t", corpus)
    prompt = load_prompt(model_folder(mined.open("prompts", "t")))
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"), tasks={"t": prompt})
    part = corpus.passages(range(60))
    texts = encoder.compose([p.title for p in part], [p.text for p in part])
    expected = encoder.encode(texts, side="passage", task="t")
    np.testing.assert_allclose(made.take(np.arange(60)).astype(np.float32), expected, atol=2e-3)
    plain = encoder.encode(texts, side="passage")
    assert np.abs(plain - expected).max() > 0.01

    done("search", "--store", world.store, "--mode", "exact", "--embeddings", "t", "--k", 5, "--name", "by-task")
    asked = Queries.open(mined).split("test")
    vectors = encoder.encode(asked.texts, side="query", task="t")
    scores = vectors @ made.take(np.arange(corpus.num_rows)).astype(np.float32).T
    [table] = read_run(mined.open("runs", "by-task"))
    best: dict[str, float] = {}
    for line in table.to_pylist():
        best.setdefault(line["query_id"], line["score"])
    np.testing.assert_allclose([best[id] for id in asked.ids], scores.max(axis=1), atol=2e-3)
    inputs = mined.open("runs", "by-task").inputs.values()
    assert "prompts/t" in [entry["artifact"] for entry in inputs]


def test_a_prompt_for_questions_is_served_by_the_backbones_index(
    world, mined: Store, done: Done, refused: Done, tmp_path: Path
) -> None:
    done(*command(world, "--task", "q", "--steps", 3, "--lr", "0.05", "--side", "query"))
    ask = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "enc", "--k", 5)
    done(*ask, "--task", "q", "--name", "q")
    done(*ask, "--name", "plain")
    one, other = (read_run(mined.open("runs", name)) for name in ("q", "plain"))
    assert not pa.concat_tables(one)["score"].equals(pa.concat_tables(other)["score"])
    done("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--task", "q", "--depth", 5, "--name", "m")
    # Prompts on both sides need passages of their own.
    done(*command(world, "--task", "both", "--steps", 1))
    line = refused(*ask, "--task", "both", "--name", "x")
    assert "task both is not the one that made embeddings/enc (prompt differ): name that one with --task" in line
    assert "--task none: " in refused(*ask, "--task", "none", "--name", "x")
    assert "give one of --encoder NAME and --task T" in refused("encode_corpus", "--store", world.store)


def test_a_fine_tuned_model_flows_too(world, mined: Store, done: Done) -> None:
    done(*command(world, "--task", "f", "--steps", 3, "--method", "finetune", "--lr", "1e-3"))
    done("encode_corpus", "--store", world.store, "--task", "f", *EXACT)
    corpus = Corpus.open(mined)
    part = corpus.passages(range(20))
    peer = SentenceTransformer(str(model_folder(mined.open("models", "f"))), device="cpu", local_files_only=True)
    expected = peer.encode([f"{p.title} {p.text}" if p.title else p.text for p in part])
    np.testing.assert_allclose(Embeddings.open(mined, "f", corpus).take(np.arange(20)), expected, atol=2e-3)
    done("search", "--store", world.store, "--mode", "exact", "--embeddings", "f", "--k", 5, "--name", "f")
    ours = spec_of(mined, None, "f", EncoderOptions(dtype="float32", compile="never")).open()
    np.testing.assert_allclose(ours.encode(["a b c"], side="query"), peer.encode(["a b c"]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("workers", [1, 2] if LONG else [2])
def test_killed_and_started_again_it_ends_with_the_same_weights(world, mined: Store, done: Done, workers: int) -> None:
    """kill -9 to the job in the middle; its private Ray goes down with it."""
    often = ("--checkpoint-every", 10, "--evaluate-every", 20)
    more = ("--steps", 60, "--workers", workers, *often, "--dev-split", "test")
    done(*command(world, *more, "--task", "whole"))
    job = start(*command(world, *more, "--task", "t"))
    latest = world.store / "checkpoints/t.prompts/latest.json"
    wait_for(lambda: latest.exists() and json.loads(latest.read_text())["step"] >= 10, "a checkpoint", job.process)
    tree = [job.process.pid, *(child.pid for child in psutil.Process(job.process.pid).children(recursive=True))]
    job.process.send_signal(signal.SIGKILL)
    job.process.wait()
    wait_for_its_end(tree[1:])
    assert not (world.store / "prompts/t/manifest.json").exists(), "the kill came too late to be in the middle"
    done(*command(world, *more, "--task", "t"))
    assert weights(mined, "prompts", "t") == weights(mined, "prompts", "whole")
    one, other = (mined.open("prompts", name).notes for name in ("t", "whole"))
    assert one["curve"] == other["curve"]


def train_workers(driver: int) -> list[psutil.Process]:
    """Of the Ray that a process started."""
    every = psutil.Process(driver).children(recursive=True)
    return [one for one in every if "RayTrainWorker" in title_of(one)]


@pytest.mark.chaos
def test_a_lost_worker_is_started_again_and_the_weights_are_the_same(world, mined: Store, done: Done) -> None:
    """kill -9 to one of two workers: both go on from the last checkpoint, in the same run."""
    more = ("--steps", 100, "--workers", 2, "--checkpoint-every", 10)
    done(*command(world, *more, "--task", "whole"))
    job = start(*command(world, *more, "--task", "t"))
    latest = world.store / "checkpoints/t.prompts/latest.json"
    wait_for(lambda: latest.exists() and json.loads(latest.read_text())["step"] >= 10, "a checkpoint", job.process)
    first = train_workers(job.process.pid)
    first[0].kill()
    wait_for(lambda: {*train_workers(job.process.pid)} - {*first}, "the next workers", job.process)
    job.end()
    assert weights(mined, "prompts", "t") == weights(mined, "prompts", "whole")
    one, other = (mined.open("prompts", name).notes for name in ("t", "whole"))
    assert one["curve"] == other["curve"]


def test_negatives_are_mined_anew_while_it_trains(world, mined: Store, done: Done, refused: Done) -> None:
    ask = command(world, "--steps", 3, "--refresh-depth", 5)
    done(*ask, "--task", "anew", "--refresh-epochs", 1)  # 10 questions, 8 a step: after the second
    done(*ask, "--task", "not")
    assert weights(mined, "prompts", "anew") != weights(mined, "prompts", "not")
    assert "--refresh-epochs 0.0" in refused(*ask, "--task", "x", "--refresh-epochs", 0)


def test_plan(world, mined: Store, done: Done) -> None:
    out = done(*command(world, "--task", "t", "--epochs", 2, "--plan"))
    assert "queries   10 of train, with negatives in negatives/hand" in out
    assert "steps     3 of 8 queries and up to 24 passages, on 1 workers" in out
    assert "trains    2.0 kB, over a backbone of " in out  # 4 tokens, 2 layers, keys and values of 4 heads of 8
    assert mined.names("prompts") == mined.incomplete() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--split", "nothing"), "no split 'nothing' with qrels"),
        (("--dev-split", "nothing"), "no split 'nothing' with qrels"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--query-length", 65), "query_length=65 is more than the 64 positions"),
        (("--length", 0), "length=0"),
        (("--steps", 0), "steps=0"),
        (("--lr", "-1"), "lr=-1.0"),
        (("--lr", "0"), "lr=0.0"),
        (("--zero", 2), "--zero 2 --method prompt"),
        (("--wait", "-1"), "--wait -1: expected seconds"),
        (("--curves", "s3://bucket/x"), "--curves s3://bucket/x: expected a folder that this machine sees"),
        (("--epochs", "nan"), "--epochs nan: expected more than 0"),
        (("--epochs", "inf"), "--epochs inf: expected more than 0"),
        (("--refresh-epochs", "inf"), "--refresh-epochs inf"),
        (("--weight-decay", "nan"), "weight_decay=nan"),
        (("--task", ""), "name '': expected one"),
        (("--task", "x/y"), "name 'x/y': expected one, and without '/', for prompts/NAME"),
        (("--task", ".."), "name '..': use letters"),
        (("--side", "query", "--untied"), "only one side has a prompt"),
        (("--dev-split", "test", "--dev-limit", 0), "--dev-limit 0 --dev-passages 2000: expected 1 at least"),
        (("--dev-split", "test", "--dev-passages", -5), "--dev-passages -5: expected 1 at least"),
        (("--patience", 2), "--patience 2: expected --dev-split too"),
        (("--dev-split", "test", "--patience", 2, "--evaluate-every", 0), "and --evaluate-every"),
        (("--min-workers", 0), "--min-workers 0: expected 1 to --workers 1"),
        (("--init", "nothing"), "prompts/nothing: there is no such artifact"),
        (("--workers", 8), "--workers 8 --cpus 1: the cluster has 2 cores"),
        (("--method", "finetune", "--side", "query"), "train prompts for one side only"),
        (("--zero", 1, "--offload", "--steps", 1, "--grad-cache", "sometimes"), "--grad-cache"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    world, mined: Store, call_job: Callable[..., int], capsys: pytest.CaptureFixture[str], more: tuple, message: str
) -> None:
    status = call_job(*command(world, "--task", "t", *more))
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert mined.names("prompts") == mined.incomplete() == []


def test_a_prompt_of_another_backbone_is_refused(
    world, mined: Store, done: Done, refused: Done, tmp_path: Path
) -> None:
    done(*command(world, "--task", "t", "--steps", 1))
    other = save_tiny_bert(tmp_path / "other", seed=9)
    done("encode_corpus", "--store", world.store, "--encoder", other, "--name", "other", *EXACT)
    line = refused(
        "search", "--store", world.store, "--mode", "exact", "--embeddings", "other", "--task", "t", "--name", "x"
    )
    assert "task t is not the one that made embeddings/other" in line


def test_negatives_of_unknown_passages_are_refused(world, refused: Done) -> None:
    store = Store(str(world.store))
    mine(store, rows={"negatives": pa.array([[10**6]] * 40, pa.list_(pa.int64()))})
    assert "of a corpus of 240" in refused(*command(world, "--task", "t"))


def test_a_loss_that_is_no_number_ends_it_in_a_line(world, mined: Store, refused: Done, tmp_path: Path) -> None:
    """And leaves the picture of how it came to that."""
    more = ("--steps", 30, "--lr", "1e30", "--method", "finetune", "--curves", tmp_path / "curves")
    line = refused(*command(world, "--task", "t", *more))
    assert (tmp_path / "curves/curves.png").exists()
    assert "give a smaller lr than 1e+30" in line
    assert line.startswith("error: step ")
