"""Pretraining by the job: a model that opens everywhere, a bound on what is drawn, and what cannot be trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from test_train_reranker import mine
from transformers import AutoModelForMaskedLM

from indexing.corpus import Corpus
from indexing.models import model_folder
from indexing.pretraining import drawable
from indexing.store import Store
from retriever.encoder import Encoder, EncoderOptions
from retriever.rip import RipOptions

Done = Callable[..., str]
SMALL = ("--batch", 12, "--steps", 4, "--max-length", 32, "--cpus", 1, "--dtype", "float32", "--lr", "1e-3")


def command(world, *more: object) -> tuple:
    return ("pretrain_rip", "--store", world.store, "--backbone", world.model, *SMALL, *more)


@pytest.mark.parametrize("objective", ["rip", "condenser", "mlm"])
def test_the_model_opens_everywhere(world, done: Done, objective: str) -> None:
    # The passages are words without full stops: spans are what pairs can be made of.
    out = done(*command(world, "--objective", objective, "--unit", "span", "--name", objective))
    assert f"models/{objective}: 4 steps over " in out
    store = Store(str(world.store))
    folder = model_folder(store.open("models", objective))
    AutoModelForMaskedLM.from_pretrained(folder)
    texts = ["a b c", "c d e f"]
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
    ours = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never")).encode(texts)
    np.testing.assert_allclose(ours, peer, atol=1e-5)
    assert done(*command(world, "--objective", objective, "--unit", "span", "--name", objective)) in out
    assert not [*(world.store / "checkpoints").rglob("*.safetensors")]


def test_it_goes_on_as_a_backbone_and_as_an_encoder(world, done: Done) -> None:
    done(*command(world, "--unit", "span", "--name", "rip", "--limit", 100))
    store = Store(str(world.store))
    done("encode_corpus", "--store", world.store, "--encoder", "models/rip-limit100", "--dtype", "float32")
    assert "rip-limit100" in store.names("embeddings")
    assert store.dependents("models/rip-limit100") == ["embeddings/rip-limit100/g0000"]


def test_prompts_are_opened_by_task_and_begun_from(world, done: Done, refused: Done) -> None:
    out = done(*command(world, "--unit", "span", "--name", "begun", "--train", "prompts",
                         "--prompt-length", 5, "--steps", 2))  # fmt: skip
    assert "prompts/begun: 2 steps" in out
    assert "only --train prompts has one" in refused(*command(world, "--name", "other", "--prompt-length", 5))
    done("encode_corpus", "--store", world.store, "--task", "begun", "--dtype", "float32", "--compile", "never")
    mine(Store(str(world.store)))
    tuned = ("tune_prompts", "--store", world.store, "--backbone", world.model, "--negatives", "hand", "--cpus", 1,
             "--dtype", "float32", "--steps", 1, "--batch", 4, "--pooling", "cls", "--length", 5)  # fmt: skip
    done(*tuned, "--task", "on", "--init", "prompts/begun")
    assert Store(str(world.store)).inputs("prompts/on")["init"]["artifact"] == "prompts/begun"
    assert "take its length" in refused(*tuned, "--task", "x", "--init", "begun", "--length", 3)
    assert "nothing to begin fine-tuning from" in refused(
        *tuned, "--task", "x", "--init", "begun", "--method", "finetune"
    )


def test_what_is_drawn_is_alive_and_within_the_limit(world) -> None:
    corpus = Corpus.open(Store(str(world.store)))
    rows = drawable(corpus, RipOptions(steps=1, objective="mlm", max_length=32), 50)
    assert rows.max() < 50
    assert not np.isin(rows, corpus.deleted).any()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-length", 65), "max_length=65 is more than the 64 positions"),
        (("--workers", 8), "--workers 8 --cpus 1: the cluster has 2 cores"),
        (("--batch", 1), "batch=1: the pairs of one passage have no negatives"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--objective", "condenser", "--pooling", "mean"), "condenser trains a backbone's first token"),
        (("--lr", "-1"), "lr=-1.0"),
        (("--steps", 0), "steps=0"),
        (("--epochs", 0), "--epochs 0.0"),
        (("--train", "prompts", "--zero", 2), "--zero 2 --train prompts"),
        (("--min-workers", 2), "--min-workers 2: expected 1 to --workers 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(world, refused: Done, more: tuple, message: str) -> None:
    assert message in refused(*command(world, "--unit", "span", "--name", "x", *more))
    assert Store(str(world.store)).incomplete() == []


def test_passages_of_one_sentence_leave_nothing_to_train_on(world, refused: Done) -> None:
    assert "no passage has two sentences to make a pair of" in refused(*command(world, "--name", "x"))


def test_plan(world, done: Done) -> None:
    out = done(*command(world, "--plan"))
    assert "passages  up to 240, those of one sentence are left out" in out
    assert "steps     4 of 24 texts, on 1 workers" in out
    assert Store(str(world.store)).incomplete() == []
