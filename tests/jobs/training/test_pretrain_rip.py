"""Pretraining: the model opens in other libraries, the passages to train on, and bad options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mined import mine
from samples import save_tiny_bert
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.training.pretraining_data import EligibleCount, count_eligible, training_rows
from riptide.indexing.work.local_runner import LocalRunner
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.options.pretraining import RipOptions
from riptide.retriever.systems.condenser import HeadShape, choose_head_shape

Done = Callable[..., str]
SMALL = ("--batch", 12, "--steps", 4, "--max-length", 32, "--cpus", 1, "--dtype", "float32", "--lr", "1e-3")


def command(world, *more: object) -> tuple:
    return ("pretrain_rip", "--store", world.store, "--backbone", world.model, *SMALL, *more)


@pytest.mark.parametrize("objective", ["rip", "cocondenser", "mlm"])
def test_the_model_opens_everywhere(world, done: Done, objective: str) -> None:
    # The passages are words without full stops, so pairs can only be made of spans.
    out = done(*command(world, "--objective", objective, "--unit", "span", "--name", objective))
    assert f"models/{objective}: 4 steps of 12 passages over " in out
    store = Store(str(world.store))
    folder = model_folder(store.open("models", objective))
    AutoModelForMaskedLM.from_pretrained(folder)
    texts = ["a b c", "c d e f"]
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
    ours = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never")).encode(texts)
    np.testing.assert_allclose(ours, peer, atol=1e-5)
    again = command(world, "--objective", objective, "--unit", "span", "--name", objective)
    assert done(*again) in out
    assert done(*again, "--plan") == f"nothing to make: {world.store}/models/{objective} is complete\n"
    assert not [*(world.store / "checkpoints").rglob("*.safetensors")]


def test_cocondenser_starts_from_the_head_of_condenser(world, done: Done, refused: Done) -> None:
    out = done(*command(world, "--objective", "condenser", "--name", "first", "--steps", 1, "--head-layers", 1))
    assert "head      new" not in out
    second = ("--objective", "cocondenser", "--steps", 1)
    out = done(*command(world, *second, "--backbone", "models/first", "--name", "second"))
    assert "head      new" not in out
    store = Store(str(world.store))
    assert [store.open("models", name).notes["head"] for name in ("first", "second")] == ["new", "the backbone's"]
    assert choose_head_shape(model_folder(store.open("models", "second")), 2, None, None) == HeadShape(1, 1)
    plan = command(world, *second, "--name", "third", "--plan")
    assert f"head      new: {world.model} has none; --objective condenser trains a backbone" in done(*plan)
    line = refused(*command(world, *second, "--backbone", "models/first", "--name", "x", "--head-layers", 2))
    assert "the saved head has --head-layers 1 and --skip-from 1, found --head-layers 2 and --skip-from 1" in line
    assert store.incomplete_keys() == []


def test_the_model_is_an_encoder(world, done: Done) -> None:
    done(*command(world, "--unit", "span", "--name", "rip", "--limit", 100))
    store = Store(str(world.store))
    done("encode_corpus", "--store", world.store, "--encoder", "models/rip", "--dtype", "float32")
    assert "rip" in store.names("embeddings")
    assert store.dependents("models/rip") == ["embeddings/rip/g0000"]


def test_a_prompt_is_opened_by_task_and_starts_another(world, done: Done, refused: Done, tmp_path: Path) -> None:
    out = done(
        *command(world, "--unit", "span", "--name", "begun", "--train", "prompts", "--prompt-length", 5, "--steps", 2)
    )
    assert "prompts/begun: 2 steps" in out
    line = refused(*command(world, "--name", "other", "--prompt-length", 5))
    assert "--prompt-length 5: expected --train prompts too" in line
    done("encode_corpus", "--store", world.store, "--task", "begun", "--dtype", "float32", "--compile", "never")
    mine(Store(str(world.store)))
    tuned = (
        "tune_prompts",
        "--store",
        world.store,
        "--backbone",
        world.model,
        "--negatives",
        "hand",
        "--cpus",
        1,
        "--dtype",
        "float32",
        "--steps",
        1,
        "--batch",
        4,
        "--pooling",
        "cls",
        "--length",
        5,
    )
    done(*tuned, "--task", "on", "--init", "prompts/begun")
    assert Store(str(world.store)).inputs("prompts/on")["init"]["artifact"] == "prompts/begun"
    for more, message in (
        (("--length", 3), "--init begun --length 3: its prompt of the query side has 5 tokens; give --length 5"),
        (("--prompt", "mlp"), "--init begun --prompt mlp: the parameters of the network cannot be found"),
        (
            ("--backbone", save_tiny_bert(tmp_path / "other", seed=1)),
            f"--init begun --backbone {tmp_path}/other: the prompt is for another backbone (weights differ): ",
        ),
    ):
        for plan in ((), ("--plan",)):
            assert message in refused(*tuned, "--task", "x", "--init", "begun", *more, *plan)
    assert "fine-tuning starts from the backbone alone" in refused(
        *tuned, "--task", "x", "--init", "begun", "--method", "finetune"
    )


def test_training_rows_are_not_deleted_and_within_the_limit(world) -> None:
    corpus = Corpus.open(Store(str(world.store)))
    rows = training_rows(corpus, RipOptions(steps=1, objective="mlm", max_length=32), 50, LocalRunner(cores=1))
    assert rows.max() < 50
    assert not np.isin(rows, corpus.deleted).any()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-length", 65), "--max-length 65: more than the 64 positions"),
        (("--batch", 1), "--batch 1: the pairs of one passage have no negatives"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--objective", "condenser", "--pooling", "mean"), "condenser trains a backbone's first token"),
        (("--lr", "-1"), "--lr -1.0: expected more than 0"),
        (("--steps", 0), "--steps 0: expected at least 1"),
        (("--epochs", 0), "--epochs 0.0"),
        (("--train", "prompts", "--zero", 2), "--zero 2 --train prompts"),
        (("--min-workers", 2), "--min-workers 2: expected 1 to --workers 1"),
    ],
)
def test_bad_options_are_refused(world, refused: Done, more: tuple, message: str) -> None:
    assert message in refused(*command(world, "--unit", "span", "--name", "x", *more))
    assert Store(str(world.store)).incomplete_keys() == []


def test_a_corpus_without_pairs_is_refused(world, refused: Done, documented: Callable[..., None]) -> None:
    message = "no passage has two sentences of at least 8 words to make a pair of: lower min_words"
    line = refused(*command(world, "--name", "x"))
    assert message in line
    assert refused(*command(world, "--name", "x", "--plan")) == line
    documented("Training", "pretrain_rip on a corpus without passages of two sentences", line, 1)


def test_a_batch_larger_than_the_eligible_passages_is_cut(
    world, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    small = ("--unit", "span", "--limit", 20, "--steps", 1)
    out = done(*command(world, *small, "--batch", 500, "--name", "cut"))
    notes = Store(str(world.store)).open("models", "cut").notes
    number = notes["passages"]
    assert 2 <= number == notes["batch"] <= 20
    assert f"batch     {number} passages instead of 500: no more are eligible" in out
    assert f"1 steps of {number} passages over {number} eligible of 20 passages" in out
    line = refused(*command(world, *small, "--batch", 500, "--workers", 100, "--name", "x", "--plan"))
    assert f"--workers 100: only {number} passages are eligible" in line
    documented("Training", "pretrain_rip with more workers than eligible passages", line, 1)


def test_plan(world, done: Done) -> None:
    options = RipOptions(steps=1, unit="span", max_length=32)
    corpus = Corpus.open(Store(str(world.store)))
    number, total = len(training_rows(corpus, options, None, LocalRunner(cores=1))), 240 - len(corpus.deleted)
    out = done(*command(world, "--unit", "span", "--plan"))
    assert f"passages  {number} eligible of {total}, with two spans of at least 8 words" in out
    assert "steps     4 of 24 texts, on 1 workers" in out
    assert "\nwork     48 passages in 1 part; " in out
    assert Store(str(world.store)).incomplete_keys() == []


def test_a_plan_estimates_the_eligible_passages_of_a_large_corpus(world) -> None:
    corpus = Corpus.open(Store(str(world.store)))
    options, runner = RipOptions(steps=1, objective="mlm"), LocalRunner(cores=1)
    exact = count_eligible(corpus, options, 200, runner)
    rows = training_rows(corpus, options, 200, runner)
    assert exact == EligibleCount(len(rows), 200 - int((corpus.deleted < 200).sum()), exact.num_examined)
    some = count_eligible(corpus, options, 200, runner, sample=1)
    assert 0 < some.num_examined < some.num_passages == exact.num_passages
    assert some.num_eligible == pytest.approx(exact.num_eligible, rel=0.2)
