"""train_retriever --pooling splade: its defaults, an interrupted run, and options that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from interruption import interrupt_at
from mined import weights
from sentence_transformers import SparseEncoder as Peer
from t5_folders import save_t5
from tiny import add_masked_head
from transformers import AutoModelForMaskedLM

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.runs import read_run
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import build_options, replace_options
from riptide.jobs.training.resolving import encoder_options
from riptide.jobs.training.training_options import TrainRetriever
from riptide.process.memory import format_bytes
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.objectives.flops_term import FlopsWeights
from riptide.retriever.objectives.tune_options import PlannedRun, TuneOptions

Done = Callable[..., str]


@pytest.fixture(scope="module")
def masked(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny masked language model."""
    return add_masked_head(Path(shutil.copytree(model, tmp_path_factory.mktemp("masked") / "m")), spread=0.2)


def command(world, masked: Path, task: str, *more: object) -> tuple:
    at = ("--store", world.store, "--backbone", masked, "--task", task, "--pooling", "splade")
    small = ("--negatives", "hand", "--split", "train", "--batch", 8, "--cpus", 1, "--dtype", "float32", "--length", 4)
    return ("train_retriever", *at, *small, *more)


@pytest.mark.parametrize("train", ["all", "prompts"])
def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    world, mined: Store, masked: Path, done: Done, job, monkeypatch: pytest.MonkeyPatch, train: str
) -> None:
    more = ("--train", train, "--steps", 6, "--checkpoint-every", 2, "--dev-split", "test", "--evaluate-every", 3)
    done(*command(world, masked, "whole", *more))
    interrupt_at(monkeypatch, 4)
    assert job(*command(world, masked, "cut", *more)).status == 130
    assert " kept) in " in done(*command(world, masked, "cut", *more))
    kind = "prompts" if train == "prompts" else "models"
    assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
    # The task encodes the corpus; the number of words is no matter of training.
    done("encode_corpus", "--store", world.store, "--task", "whole", "--passage-terms", 7, "--dtype", "float32")
    made = SparseEmbeddings.open(mined, "whole", Corpus.open(mined))
    assert [made.vectors(part).counts.max() for part in made.parts] == [7] * 4
    config = mined.open(kind, "whole").config
    assert config["tuning"]["flops"] == {"queries": 3e-4, "passages": 1e-4, "warm_up": 2}
    assert config["loop"]["warm_up"] == 0.04
    assert config["backbone"]["query_length"] == config["backbone"]["passage_length"] == 64
    if train == "all":
        folder = model_folder(mined.open("models", "whole"))
        peer = Peer(str(folder), device="cpu", local_files_only=True)
        assert peer.encode_query(["bada"]).shape == (1, config["backbone"]["dim"])


def test_prompts_of_queries_are_trained_against_stored_sparse_vectors(
    world, mined: Store, masked: Path, done: Done
) -> None:
    """Prompts that are computed from each query; the index of the backbone's impacts serves the task."""
    at = ("--store", world.store)
    splade = ("--pooling", "splade", "--dtype", "float32", "--passage-terms", 40)
    done("encode_corpus", *at, "--encoder", masked, "--name", "sparse", *splade)
    done("build_index", *at, "--embeddings", "sparse", "--name", "impacts")
    small = ("--basic-prompts", 2, "--prompt-hidden", 4, "--prompt-bottleneck", 3, "--lr", "1e-2")
    dev = ("--dev-split", "test", "--evaluate-every", 2)
    prompts = ("--train", "prompts", "--sides", "query", "--prompt", "synthesised", *small)
    negatives = ("--negatives-per-query", 2, "--negatives-from", "own")
    done(*command(world, masked, "q", *prompts, "--steps", 4, *negatives, *dev))
    artifact = mined.open("prompts", "q")
    assert artifact.inputs["embeddings/0"]["artifact"] == "embeddings/sparse/g0000"
    assert artifact.config["tuning"]["flops"] == {"queries": 3e-4, "passages": 0.0, "warm_up": 1}
    # The vectors that training reads are those of the file, which is memory-mapped.
    corpus = Corpus.open(mined)
    embeddings = SparseEmbeddings.open(mined, "sparse", corpus)
    rows = np.array([200, 3, 77, 3])
    np.testing.assert_array_equal(embeddings.open_vector_reader()(rows), embeddings.take(rows).dense())
    assert (embeddings.open_vector_reader()(rows) > 0).sum(1).tolist() == [40] * 4
    ask = ("search", *at, "--source", "splade:impacts", "--k", 5)
    done(*ask, "--name", "plain")
    done(*ask, "--task", "q", "--name", "q")
    runs = [next(read_run(mined.open("runs", name)))["score"].to_pylist() for name in ("plain", "q")]
    assert runs[0] != runs[1]


@pytest.mark.parametrize("train", ["all", "lora", "prompts"])
def test_a_time_limit_is_refused_in_one_line(world, mined: Store, masked: Path, refused: Done, train: str) -> None:
    line = refused(*command(world, masked, "limited", "--train", train, "--max-minutes", 1))
    assert line == (
        "error: --max-minutes 1 with --pooling splade: the weights of the regulariser rise over a fraction of the "
        "steps, whose number must be known: give --steps"
    )
    assert mined.incomplete_keys() == []


def test_a_sweep_over_the_weight_of_the_regulariser(world, mined: Store, masked: Path, done: Done) -> None:
    dev = ("--dev-split", "test", "--dev-limit", 5, "--dev-passages", 20, "--evaluate-every", 1)
    ask = command(world, masked, "grid", "--train", "all", "--steps", 1, *dev, "--sweep", "flops_passages=1e-4,1e-1")
    out = done(*ask)
    names = ["grid-flops_passages0.0001", "grid-flops_passages0.1"]
    assert sorted(mined.names("models")) == names
    passages = [mined.open("models", name).config["tuning"]["flops"]["passages"] for name in names]
    assert passages == [1e-4, 1e-1]
    assert mined.open("sweeps", "grid").notes["chosen"] in [f"models/{name}" for name in names]
    assert "chosen: models/grid-flops_passages0" in out


def test_the_plan_counts_the_head(world, mined: Store, masked: Path, done: Done, refused: Done, tmp_path: Path) -> None:
    whole = AutoModelForMaskedLM.from_pretrained(masked)
    size = format_bytes(4 * sum(parameter.numel() for parameter in whole.parameters()))
    assert f"trains    {size}, over" in done(*command(world, masked, "t", "--train", "all", "--steps", 2, "--plan"))
    line = refused(*command(world, save_t5(tmp_path / "t5"), "t", "--train", "all", "--steps", 2, "--plan"))
    assert "--pooling splade needs a masked-language-model head, and a t5 has none" in line


def test_the_weights_of_margin_mse_are_others() -> None:
    tuning = TuneOptions(method="finetune", loss="margin-mse")
    resolved = FlopsWeights().resolve(PlannedRun(tuning=tuning, pooling="splade"))
    assert resolved is not None
    flops = resolved.with_steps(30)
    assert (flops.queries, flops.passages, flops.warm_up) == (0.5, 0.4, 10)


def test_a_splade_folder_keeps_its_lengths(masked: Path, tmp_path: Path) -> None:
    """Also if --pooling splade names what the folder is; a masked language model gets naver/splade's 256 tokens."""
    folder = Path(shutil.copytree(masked, tmp_path / "m"))
    package = "sentence_transformers.sparse_encoder.models"
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    entries = [{"path": path, "type": f"{package}.{name}"} for path, name in modules]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text("{}")
    options = build_options(
        TrainRetriever, {"store": "", "task": "t", "backbone": "", "train": "all", "pooling": "splade"}
    )
    recipes = [read_recipe(path, encoder_options(options, str(path))) for path in (folder, masked)]
    assert [(recipe.query_length, recipe.passage_length) for recipe in recipes] == [(24, 24), (64, 64)]
    encoder = encoder_options(replace_options(options, {"query_length": 9}), str(folder))
    assert (encoder.query_length, read_recipe(folder, encoder).passage_length) == (9, 24)


def test_what_does_not_fit_is_refused(
    world, mined: Store, masked: Path, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    more = ("--train", "all", "--steps", 2)
    line = refused(*command(world, world.model, "t", *more))
    assert "--pooling splade needs a masked-language-model head, and the weights lack it" in line
    case = "train_retriever --pooling splade with a backbone without a masked-language-model head"
    documented("Training", case, line.replace(world.model, "tiny-bert"), 1)
    line = refused(*command(world, masked, "t", *more, "--pooling", "cls", "--flops-queries", "0.1"))
    assert "--flops-queries 0.1: regularises sparse vectors, and --pooling is cls: give --pooling splade" in line
    line = refused(*command(world, masked, "t", *more, "--refresh-epochs", "1"))
    assert "--pooling splade with --refresh-epochs" in line
    line = refused(*command(world, masked, "t", *more, "--sides", "query", "--flops-passages", "0.1"))
    assert "--flops-passages 0.1: with --sides query, vectors of passages are stored" in line
    line = refused(*command(world, masked, "t", *more, "--sides", "query"))
    assert "embeddings/enc are not those of the backbone, which would have another backbone" in line
    line = refused(*command(world, masked, "t", *more, "--flops-warm-up", "2"))
    assert "--flops-warm-up 2.0: expected a fraction of the steps" in line
    # A weight far too large leaves no word: one line ends the run.
    line = refused(
        *command(
            world,
            masked,
            "t",
            "--train",
            "all",
            "--steps",
            60,
            "--lr",
            "0.1",
            "--flops-queries",
            "1e6",
            "--flops-warm-up",
            "0",
        )
    )
    assert "non-zero words on average, expected at least 1" in line
    case = "train_retriever --pooling splade with a FLOPS weight that leaves no word in the vectors"
    line = re.sub(r"step \d+", "step N", re.sub(r"\d\.\d+ non-zero", "N non-zero", line))
    documented("Training", case, line, 1)
