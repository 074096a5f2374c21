"""train_retriever: an encoder of each side, queries trained against stored vectors, and the names of its options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from mined import weights
from samples import save_tiny_bert
from sentence_transformers import SentenceTransformer
from training_commands import COMMON

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import build_options, options_by_name
from riptide.jobs.training.training_options import TrainRetriever, TunePrompts
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.dev import mean_reciprocal_rank
from riptide.retriever.training.training_data import batch_at
from riptide.serve.parts.service_models import EncoderPart
from riptide.serve.release.planning import plan_release

Done = Callable[..., str]
SMALL = ("--negatives", "hand", *COMMON)
EXACT = ("--dtype", "float32", "--compile", "never")


def command(world: Any, *more: object, job: str = "train_retriever") -> tuple:
    return (job, "--store", world.store, "--backbone", world.model, *SMALL, *more)


def best_scores(store: Store, run: str) -> dict[str, float]:
    """Returns the score of the first hit of each query."""
    best: dict[str, float] = {}
    for line in pa.concat_tables(read_run(store.open("runs", run))).to_pylist():
        best.setdefault(line["query_id"], line["score"])
    return best


def test_untied_encoders_flow_through_encoding_search_and_serving(
    world, mined: Store, done: Done, refused: Done
) -> None:
    """Passages are encoded by one, queries by the other, in each job and without further options."""
    untied = ("--train", "all", "--sides", "untied", "--steps", 3, "--lr", "1e-2")
    done(*command(world, "--task", "u", *untied, "--dev-split", "test", "--evaluate-every", 2))
    done("encode_corpus", "--store", world.store, "--encoder", "models/u", *EXACT)
    corpus, queries = Corpus.open(mined), Queries.open(mined).split("test")
    made = Embeddings.open(mined, "u", corpus).take(np.arange(corpus.num_rows)).astype(np.float32)
    folder = model_folder(mined.open("models", "u"))
    peers = {
        side: SentenceTransformer(str(folder / side), device="cpu", local_files_only=True)
        for side in ("query", "passage")
    }
    texts = [f"{p.title} {p.text}" if p.title else p.text for p in corpus.passages(range(30))]
    np.testing.assert_allclose(made[:30], peers["passage"].encode(texts), atol=2e-3)
    vectors = peers["query"].encode(queries.texts)
    assert np.abs(peers["passage"].encode(queries.texts) - vectors).max() > 0.01

    ask = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "u", "--k", 5)
    done(*ask, "--name", "u")
    found = best_scores(mined, "u")
    np.testing.assert_allclose([found[id] for id in queries.ids], (vectors @ made.T).max(axis=1), atol=5e-3)
    assert "models/u" in [entry["artifact"] for entry in mined.open("runs", "u").inputs.values()]
    done("mine_negatives", "--store", world.store, "--sources", "exact:u", "--depth", 5, "--name", "m")

    release, _ = plan_release(mined, embeddings="u")
    release.save(mined)
    served = EncoderPart(mined, threads=1, device="cpu")
    for side, peer in peers.items():
        actual = served.encode(release.id, queries.texts[:3], ["default"] * 3, side).vectors
        np.testing.assert_allclose(actual, peer.encode(queries.texts[:3]), atol=1e-4)

    # The same encoder of passages with another encoder of queries.
    other = world.store.parent / "other"
    done("store", "export", "models/u", "--store", world.store, "--to", other)
    done(*ask, "--encoder", other, "--name", "exported")
    assert best_scores(mined, "exported") == found
    save_tiny_bert(other / "query", seed=9)
    line = refused(*ask, "--encoder", other, "--name", "x")
    assert "is not the one that made embeddings/u (query_encoder differ)" in line
    line = refused(*command(world, "--task", "v", "--train", "all", "--backbone", "models/u"))
    assert "--backbone models/u: has an encoder of each side, or of queries only; expected one model" in line


def test_one_prompt_is_trained_with_the_encoder(world, mined: Store, done: Done) -> None:
    """The saved model with its prompt has the quality that training measured."""
    joint = ("--train", "all", "--prompt", "matrix", "--lr", "1e-3", "--steps", 3)
    done(*command(world, "--task", "j", *joint, "--dev-split", "test", "--evaluate-every", 3))
    model, prompt = mined.open("models", "j"), mined.open("prompts", "j-prompt")
    assert [model.config["tuning"][key] for key in ("method", "joint_prompt", "length")] == ["finetune", True, 4]
    assert prompt.inputs["model"]["fingerprint"] == model.fingerprint
    trained = load_prompt(model_folder(prompt))
    encoder = Encoder(str(model_folder(model)), trained.options, tasks={"task": trained})
    corpus = Corpus.open(mined)
    pairs, passages = read_judged_pairs(corpus, Queries.open(mined), "test", None), corpus.passages(range(240))
    texts = encoder.compose([passage.title for passage in passages], [passage.text for passage in passages])

    def quality(task: str | None) -> float:
        scores = encoder.encode(pairs.texts, task=task) @ encoder.encode(texts, side="passage", task=task).T
        return mean_reciprocal_rank(scores, pairs.rows, 10)

    assert model.notes["best"] == pytest.approx(quality("task"))
    assert quality("task") != pytest.approx(quality(None))
    done("encode_corpus", "--store", world.store, "--task", "j-prompt", *EXACT)
    done("search", "--store", world.store, "--source", "exact:j-prompt", "--k", 10, "--name", "j")
    assert mined.open("runs", "j").rows == 300


@pytest.mark.parametrize("train", ["prompts", "all"])
def test_queries_are_trained_against_the_bytes_of_the_index(
    world, mined: Store, done: Done, monkeypatch: pytest.MonkeyPatch, train: str
) -> None:
    """No passage is encoded: not for a step, nor for the dev split, nor to mine negatives again."""
    made = Embeddings.open(mined, "enc", Corpus.open(mined))
    loss, chunks, steps = DualEncoderSystem.loss, DualEncoderSystem.chunks, []

    def record(system: DualEncoderSystem, outputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        assert system.data is not None
        options = system.tuning
        _, rows = batch_at(
            system.data, options, len(steps), draw_positive=options.draw_positive, draw_negatives=options.draw_negatives
        )
        steps.append((outputs["dense"][batch.arguments["queries"] :].detach().numpy().copy(), np.unique(rows)))
        return loss(system, outputs, batch)

    def of_queries(system: DualEncoderSystem, texts: Any, side: Any, *rows: Any) -> Any:
        assert side == "query"
        return chunks(system, texts, side, *rows)

    monkeypatch.setattr(DualEncoderSystem, "loss", record)
    monkeypatch.setattr(DualEncoderSystem, "chunks", of_queries)
    more = ("--steps", 4, "--dev-split", "test", "--evaluate-every", 2, "--refresh-epochs", 1, "--grad-cache", "on")
    done(*command(world, "--task", "q", "--train", train, "--sides", "query", *more))
    assert len(steps) == 4
    for vectors, rows in steps:
        assert vectors.tobytes() == made.take(rows).astype(np.float32).tobytes()
    inputs = mined.open("prompts" if train == "prompts" else "models", "q").inputs
    assert inputs["embeddings/0"]["artifact"] == "embeddings/enc/g0000"


def test_an_encoder_of_queries_is_served_by_the_backbones_index(world, mined: Store, done: Done, refused: Done) -> None:
    more = ("--train", "all", "--sides", "query", "--steps", 3, "--lr", "1e-2")
    out = done(*command(world, "--task", "q", *more, "--plan"))
    assert "passages  are not encoded: their vectors are those of embeddings/enc" in out
    done(*command(world, "--task", "q", *more))
    assert {path.partition("/")[0] for path in weights(mined, "models/q")} == {"query"}
    ask = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "enc", "--k", 5)
    done(*ask, "--task", "q", "--name", "q")
    folder = model_folder(mined.open("models", "q")) / "query"
    queries = Queries.open(mined).split("test")
    vectors = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never")).encode(queries.texts)
    corpus = Corpus.open(mined)
    made = Embeddings.open(mined, "enc", corpus).take(np.arange(corpus.num_rows)).astype(np.float32)
    found = best_scores(mined, "q")
    np.testing.assert_allclose([found[id] for id in queries.ids], (vectors @ made.T).max(axis=1), atol=2e-3)
    line = refused("encode_corpus", "--store", world.store, "--task", "q")
    assert "models/q is an encoder of queries only, and the backbone encodes its passages: give --encoder " in line
    assert "has an encoder of query texts only" in refused(
        "encode_corpus", "--store", world.store, "--encoder", "models/q"
    )


def test_embeddings_that_do_not_fit_are_refused(
    world, mined: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    probe = command(world, "--task", "q", "--train", "prompts", "--sides", "query", "--plan")
    line = refused(*probe, "--passage-length", 32)
    assert "embeddings/enc are not those of the backbone, which would have passage_length 32 instead of 64" in line
    far = ("--name", "a-far-one", "--passage-length", 16, "--pooling", "cls", "--limit", 10)
    done("encode_corpus", "--store", world.store, "--encoder", world.model, *far)
    assert refused(*probe, "--passage-length", 32) == line, "the embeddings with the fewest differences are named"
    mined.remove("embeddings/a-far-one/g0000")
    case = "train_retriever --sides query with another passage length than the embeddings have"
    documented("Training", case, line.replace(world.model, "tiny-bert"), 1)
    done(*probe, "--query-length", 16)  # of queries only
    done("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "again", *EXACT)
    line = refused(*probe)
    assert "the backbone made several embeddings of the passages: again, enc; name one with --embeddings" in line
    done(*probe, "--embeddings", "again")
    part = ("--name", "few", "--limit", 100, *EXACT)
    done("encode_corpus", "--store", world.store, "--encoder", world.model, *part)
    assert "embeddings/few covers 100 of the 240 passages" in refused(*probe, "--embeddings", "few")
    other = save_tiny_bert(world.store.parent / "other", seed=9)
    line = refused(*probe, "--backbone", other, "--embeddings", "enc")
    assert "embeddings/enc are not those of the backbone, which would have other weights" in line
    assert "embeddings/none" in refused(*probe, "--embeddings", "none")
    for name in ("enc", "again", "few"):
        for generation in mined.generations("embeddings", name):
            for key, _ in list(mined.storage.list(generation.key)):
                mined.storage.delete(key)
    line = refused(*probe)
    assert f"run riptide encode-corpus --store {world.store} --encoder {world.model} first" in line
    case = "train_retriever --sides query without embeddings"
    documented("Training", case, line.replace(world.model, "tiny-bert"), 1)
    assert mined.names("prompts") == mined.incomplete_keys() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--length", 3), ("--train", "prompts")),
        (("--untied", "--parametrisation", "mlp"), ("--train", "prompts", "--sides", "untied", "--prompt", "mlp")),
        (("--side", "query"), ("--train", "prompts", "--sides", "query", "--prompt", "matrix")),
        (("--method", "finetune", "--parametrisation", "mlp"), ("--train", "all", "--prompt", "none")),
        (("--method", "finetune", "--untied"), ("--train", "all", "--sides", "untied")),
        (("--train", "all", "--sides", "query"), ("--train", "all", "--sides", "query")),
    ],
)
def test_tune_prompts_makes_the_same_under_its_own_names(
    world, mined: Store, done: Done, old: tuple, new: tuple
) -> None:
    same = (*old[:2], "--steps", 1) if old[0] == "--length" else ("--steps", 1)
    done(*command(world, "--task", "t", *old, "--steps", 1, job="tune_prompts"))
    assert done(*command(world, "--task", "t", *new, *same, "--plan")).splitlines()[-1].startswith("nothing to make: ")


def test_options_keep_their_defaults_under_both_names() -> None:
    required: dict[str, Any] = {"store": "s", "task": "t", "backbone": "b"}
    assert build_options(TunePrompts, required).as_train_retriever() == build_options(
        TrainRetriever, {**required, "train": "prompts"}
    )
    assert options_by_name(TunePrompts).keys() - options_by_name(TrainRetriever).keys() == {
        "method",
        "side",
        "untied",
        "parametrisation",
    }
    for values in (
        {"side": "query", "sides": "untied"},
        {"side": "both", "sides": "query"},
        {"parametrisation": "mlp", "prompt": "matrix"},
        {"method": "prompt", "train": "all"},
    ):
        with pytest.raises(InputError, match="give one of them"):
            build_options(TunePrompts, {**required, **values}).as_train_retriever()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--train", "prompts", "--prompt", "none"), "expected --prompt matrix, mlp, synthesised, per-task or topics"),
        (("--train", "all", "--prompt", "mlp"), "expected --prompt none: fine-tuning trains no prompt"),
        (("--train", "all", "--sides", "untied", "--prompt", "matrix"), "--train all --sides tied --prompt topics or "),
        (
            ("--train", "all", "--prompt", "matrix", "--position-offset"),
            "--train all --prompt matrix --position-offset: a text starts at its usual position after a prompt that is "
            "trained together with the weights: leave it out",
        ),
        (("--train", "all", "--embeddings", "enc"), "--embeddings enc --sides tied"),
        (("--train", "all", "--sides", "untied", "--zero", 2), "--zero 2 --sides untied"),
        (("--train", "prompts", "--zero", 3), "--zero 3 --train prompts"),
        (("--train", "all", "--init", "x"), "--init x --train all"),
        (("--train", "some"), "--train"),
        ((), "--train"),
    ],
)
def test_bad_options_are_refused(
    world, mined: Store, call_job: Callable[..., int], capsys: pytest.CaptureFixture[str], more: tuple, message: str
) -> None:
    assert call_job(*command(world, "--task", "t", *more)) in (1, 2)
    assert message in capsys.readouterr().err
    assert mined.names("prompts") == mined.names("models") == mined.incomplete_keys() == []


def test_a_recipe_takes_the_job_as_a_step(world, mined: Store, done: Done, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"store: {world.store}\nsteps:\n"
        f"  - train_retriever: {{task: t, backbone: {world.model}, train: all, sides: untied, negatives: hand,\n"
        "      split: train, batch: 8, steps: 1, cpus: 1}\n"
    )
    assert "$ riptide train-retriever" in done("pipeline", "--config", file, "--plan")
    done("pipeline", "--config", file)
    assert mined.names("models") == ["t"]
