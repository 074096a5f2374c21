"""A task from training to search: its prompt is used in encoding, search and mining; bad options are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from mined import mine, weights
from samples import save_tiny_bert
from sentence_transformers import SentenceTransformer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_commands import COMMON

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.named_encoders import EncoderSpec, find_encoder_spec
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.prompts.task_prompt import load_prompt

Done = Callable[..., str]
SMALL = ("--negatives", "hand", *COMMON)
EXACT = ("--dtype", "float32", "--compile", "never")


def command(world, *more: object) -> tuple:
    return ("tune_prompts", "--store", world.store, "--backbone", world.model, *SMALL, *more)


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
    assert sorted(weights(mined, "prompts/t")) == ["prompt.json", "prompt.safetensors"]
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
    selected = Queries.open(mined).split("test")
    vectors = encoder.encode(selected.texts, side="query", task="t")
    scores = vectors @ made.take(np.arange(corpus.num_rows)).astype(np.float32).T
    [table] = read_run(mined.open("runs", "by-task"))
    best: dict[str, float] = {}
    for line in table.to_pylist():
        best.setdefault(line["query_id"], line["score"])
    np.testing.assert_allclose([best[id] for id in selected.ids], scores.max(axis=1), atol=2e-3)
    inputs = mined.open("runs", "by-task").inputs.values()
    assert "prompts/t" in [entry["artifact"] for entry in inputs]


def test_a_query_prompt_is_served_by_the_backbones_index(
    world, mined: Store, done: Done, refused: Done, tmp_path: Path
) -> None:
    done(*command(world, "--task", "q", "--steps", 3, "--lr", "0.05", "--side", "query"))
    ask = ("search", "--store", world.store, "--mode", "exact", "--embeddings", "enc", "--k", 5)
    done(*ask, "--task", "q", "--name", "q")
    done(*ask, "--name", "plain")
    one, other = (read_run(mined.open("runs", name)) for name in ("q", "plain"))
    assert not pa.concat_tables(one)["score"].equals(pa.concat_tables(other)["score"])
    done("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--task", "q", "--depth", 5, "--name", "m")
    # A prompt on both sides needs its own embeddings.
    done(*command(world, "--task", "both", "--steps", 1))
    line = refused(*ask, "--task", "both", "--name", "x")
    assert "task both is not the one that made embeddings/enc (prompt differ): name that one with --task" in line
    assert "--task none: " in refused(*ask, "--task", "none", "--name", "x")
    assert "--encoder NAME and --task T: expected one of them" in refused("encode_corpus", "--store", world.store)


def test_a_fine_tuned_model_flows_through_encoding_and_search(world, mined: Store, done: Done) -> None:
    done(*command(world, "--task", "f", "--steps", 3, "--method", "finetune", "--lr", "1e-3"))
    done("encode_corpus", "--store", world.store, "--task", "f", *EXACT)
    corpus = Corpus.open(mined)
    part = corpus.passages(range(20))
    peer = SentenceTransformer(str(model_folder(mined.open("models", "f"))), device="cpu", local_files_only=True)
    expected = peer.encode([f"{p.title} {p.text}" if p.title else p.text for p in part])
    np.testing.assert_allclose(Embeddings.open(mined, "f", corpus).take(np.arange(20)), expected, atol=2e-3)
    done("search", "--store", world.store, "--mode", "exact", "--embeddings", "f", "--k", 5, "--name", "f")
    ours = find_encoder_spec(mined, None, "f", EncoderOptions(dtype="float32", compile="never")).open(
        side="query", device="cpu"
    )
    np.testing.assert_allclose(ours.encode(["a b c"], side="query"), peer.encode(["a b c"]), atol=1e-5)


def test_negatives_are_mined_again_during_training(world, mined: Store, done: Done, refused: Done) -> None:
    ask = command(world, "--steps", 3, "--refresh-depth", 5)
    done(*ask, "--task", "again", "--refresh-epochs", 1)  # 10 queries, 8 per step: after the second step
    done(*ask, "--task", "not")
    assert weights(mined, "prompts/again") != weights(mined, "prompts/not")
    assert "--refresh-epochs 0.0" in refused(*ask, "--task", "x", "--refresh-epochs", 0)


def test_options_of_vectors_and_of_the_gradient_are_passed_on(world, mined: Store, done: Done, refused: Done) -> None:
    more = ("--append-eos", "--padding-side", "left", "--dimension", 8, "--clip", "0.25")
    done(*command(world, "--task", "t", "--steps", 1, *more))
    artifact = mined.open("prompts", "t")
    options = load_prompt(model_folder(artifact)).options
    assert (options.append_eos, options.padding_side, options.dimension) == (True, "left", 8)
    assert artifact.config["loop"]["clip"] == 0.25
    done("encode_corpus", "--store", world.store, "--task", "t", *EXACT)
    assert Embeddings.open(mined, "t", Corpus.open(mined)).take(np.arange(3)).shape == (3, 8)
    warning = done(*command(world, "--task", "u", "--append-eos", "--plan")).splitlines()[0]
    assert "append_eos True instead of False; give --no-append-eos, or encode" in warning
    warning = done(*command(world, "--task", "u", "--normalize", "True", "--plan")).splitlines()[0]
    assert "another head; give --no-normalize, or encode" in warning
    line = refused(*command(world, "--task", "u", "--clip", "0"))
    assert "--clip 0.0: expected more than 0" in line
    line = refused(*command(world, "--task", "u", "--dimension", 33))
    assert line.startswith("error: --dimension 33: more than the 32 that ")


def test_a_prompt_whose_texts_start_after_it_flows_through_search(
    world, mined: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    more = ("--task", "t", "--side", "query", "--steps", 2, "--lr", "0.05", "--query-length", 20)
    line = refused(*command(world, *more[:2], "--position-offset"))
    case = "tune_prompts with --position-offset and texts as long as the backbone has positions"
    documented("Training", case, line, 1)
    line = refused(*command(world, "--task", "t", "--method", "finetune", "--position-offset"))
    assert "--train all --position-offset" in line
    done(*command(world, *more, "--position-offset"))
    prompt = load_prompt(model_folder(mined.open("prompts", "t")))
    assert prompt.position_offset
    done(
        "search",
        "--store",
        world.store,
        "--mode",
        "exact",
        "--embeddings",
        "enc",
        "--k",
        5,
        "--task",
        "t",
        "--name",
        "later",
    )
    encoder = Encoder(world.model, replace(prompt.options, dtype="float32", compile="never"), tasks={"t": prompt})
    selected = Queries.open(mined).split("test")
    vectors = encoder.encode(selected.texts, side="query", task="t")
    corpus = Corpus.open(mined)
    scores = vectors @ Embeddings.open(mined, "enc", corpus).take(np.arange(corpus.num_rows)).astype(np.float32).T
    best: dict[str, float] = {}
    for row in pa.concat_tables(read_run(mined.open("runs", "later"))).to_pylist():
        best.setdefault(row["query_id"], row["score"])
    np.testing.assert_allclose([best[id] for id in selected.ids], scores.max(axis=1), atol=2e-3)


def test_a_prompt_for_cosines_starts_from_one_for_products(world, mined: Store, done: Done) -> None:
    done(*command(world, "--task", "first", "--steps", 2, "--lr", "0.05", "--normalize", "False"))
    done(*command(world, "--task", "second", "--steps", 1, "--lr", "1e-9", "--init", "first", "--normalize", "True"))
    first, second = (load_prompt(model_folder(mined.open("prompts", name))) for name in ("first", "second"))
    assert first.query is not None
    assert second.query is not None
    np.testing.assert_allclose(first.query, second.query, atol=1e-6)
    assert (first.backbone["head"], second.backbone["head"]) == ([], ["normalize"])


def test_plan(world, mined: Store, done: Done) -> None:
    out = done(*command(world, "--task", "t", "--epochs", 2, "--plan"))
    assert "queries   10 of train, with negatives in negatives/hand" in out
    assert "steps     3 of 8 queries and up to 24 passages, on 1 workers" in out
    assert "trains    2.0 kB, over a backbone of " in out  # 4 tokens, 2 layers, keys and values of 4 heads of 8
    assert mined.names("prompts") == mined.incomplete_keys() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--split", "nothing"), "no split 'nothing' with qrels"),
        (("--dev-split", "nothing"), "no split 'nothing' with qrels"),
        (("--backbone", "models/nothing"), "models/nothing: there is no such artifact"),
        (("--query-length", 65), "--query-length 65: more than the 64 positions"),
        (("--length", 0), "--length 0: expected at least 1"),
        (("--steps", 0), "--steps 0: expected at least 1"),
        (("--lr", "-1"), "--lr -1.0: expected more than 0"),
        (("--lr", "0"), "--lr 0.0: expected more than 0"),
        (("--zero", 2), "--zero 2 --train prompts"),
        (("--wait", "-1"), "--wait -1: expected seconds"),
        (("--curves", "s3://bucket/x"), "--curves s3://bucket/x: expected a folder that this machine sees"),
        (("--epochs", "nan"), "--epochs nan: expected more than 0"),
        (("--epochs", "inf"), "--epochs inf: expected more than 0"),
        (("--refresh-epochs", "inf"), "--refresh-epochs inf"),
        (("--weight-decay", "nan"), "--weight-decay nan: expected at least 0"),
        (("--task", ""), "name '': expected a name"),
        (("--task", "x/y"), "name 'x/y': expected a name without '/', as in prompts/NAME"),
        (("--task", ".."), "name '..': use letters"),
        (("--side", "query", "--untied"), "only one side has a prompt"),
        (("--dev-split", "test", "--dev-limit", 0), "--dev-limit 0: expected at least 1"),
        (("--dev-split", "test", "--dev-passages", -5), "--dev-passages -5: expected a number of passages, hard:N"),
        (("--patience", 2), "--patience 2: expected --dev-split too"),
        (("--dev-split", "test", "--patience", 2, "--evaluate-every", 0), "and --evaluate-every"),
        (("--min-workers", 0), "--min-workers 0: expected at least 1"),
        (("--init", "nothing"), "prompts/nothing: there is no such artifact"),
        (("--zero", 1, "--offload", "--steps", 1, "--grad-cache", "sometimes"), "--grad-cache"),
    ],
)
def test_bad_options_are_refused(
    world, mined: Store, call_job: Callable[..., int], capsys: pytest.CaptureFixture[str], more: tuple, message: str
) -> None:
    status = call_job(*command(world, "--task", "t", *more))
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert mined.names("prompts") == mined.incomplete_keys() == []


def test_a_prompt_that_cannot_be_served_with_what_the_store_holds_is_told_before_training(
    world, mined: Store, done: Done, documented: Callable[..., None]
) -> None:
    probe = command(world, "--task", "q", "--plan")
    assert "warning" not in done(*probe)
    out = done(*probe, "--passage-length", 32, "--title", "sep").splitlines()
    assert out[0] == (
        "warning: the prompt cannot be served with embeddings/enc: it would have passage_length 32 instead of "
        "64, title 'sep' instead of 'space'; give --passage-length 64 --title 'space', or encode the corpus with the "
        "prompt's settings under another name"
    )
    answer = done(*probe, "--passage-length", 32).splitlines()[0]
    documented("Training", "tune_prompts with another passage length than the store's embeddings have", answer, 0)
    spec = EncoderSpec(mined, world.model, EncoderOptions(passage_length=32))
    with mined.create("prompts", "short", inputs={}, config={"backbone": spec.settings("query")}):
        pass
    assert "prompts/short: it would have passage_length 64 instead of 32; give --passage-length 32 to serve both" in (
        done(*probe)
    )
    short = ("--name", "enc32", "--passage-length", 32)
    done("encode_corpus", "--store", world.store, "--encoder", world.model, *short, *EXACT)
    assert "warning" not in done(*probe, "--passage-length", 32)


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


def test_a_loss_that_is_not_finite_is_one_line(world, mined: Store, refused: Done, tmp_path: Path) -> None:
    """The curves up to that step are drawn."""
    more = ("--steps", 30, "--lr", "1e30", "--method", "finetune", "--curves", tmp_path / "curves")
    line = refused(*command(world, "--task", "t", *more))
    assert (tmp_path / "curves/curves.png").exists()
    assert "give a smaller lr than 1e+30" in line
    assert line.startswith("error: step ")
