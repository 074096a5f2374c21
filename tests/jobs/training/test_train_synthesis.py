"""train_retriever --prompt synthesised: several query sets, an interrupted run, --init, and options that do not fit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruption import interrupt_at
from mined import weights
from safetensors.torch import load_file
from samples import write_queries

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.process.memory import format_bytes
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.training.loop import Trainer
from riptide.serve.parts.service_models import EncoderPart
from riptide.serve.release.planning import plan_release
from riptide.serve.service.prompt_uploads import check_prompt

Done = Callable[..., str]
SMALL = ("--negatives", "none", "--batch", 8, "--cpus", 1, "--dtype", "float32", "--seed", 3)
SIZES = ("--basic-prompts", 3, "--length", 4, "--prompt-hidden", 6, "--prompt-bottleneck", 5)
MORE = ("--also-train", "queries=more")


def command(world: Any, task: str, *more: object) -> tuple:
    at = ("--store", world.store, "--backbone", world.model, "--task", task, "--train", "prompts", "--queries", "tiny")
    return ("train_retriever", *at, *SMALL, "--sides", "query", *more)


def synthesised(world: Any, task: str, *more: object) -> tuple:
    return command(world, task, "--prompt", "synthesised", *more)


@pytest.fixture
def several(world, done: Done, tmp_path: Path) -> Store:
    """The finished store with the query sets `tiny` and `more`, of 10 and 4 training queries."""
    queries = [{"_id": f"m{number}", "text": world.passages[number]["text"]} for number in range(4)]
    judged = [(f"m{number}", f"p{number}", 1) for number in range(4)]
    source = write_queries(tmp_path / "more", queries, {"train": judged})
    done("import_queries", "--store", world.store, "--source", source)
    return Store(str(world.store))


def test_an_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    world, several: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (*SIZES, *MORE, "--steps", 6, "--checkpoint-every", 2, "--lr", "1e-2")
    done(*synthesised(world, "whole", *more))
    interrupt_at(monkeypatch, 4)
    assert job(*synthesised(world, "cut", *more)).status == 130
    assert " kept) in " in done(*synthesised(world, "cut", *more))
    assert weights(several, "prompts/cut") == weights(several, "prompts/whole")
    tuning = several.open("prompts", "whole").config["tuning"]
    assert tuning["synthesis"] == {
        "prompts": 3,
        "length": 4,
        "hidden": 6,
        "bottleneck": 5,
        "temperature": math.e,
        "mix": "before",
        "attention": "learned",
    }
    assert tuning["divergence"] == {"weight": 1.0, "alignment": True, "uniformity": True}
    assert (tuning["parametrisation"], tuning["length"], tuning["prompt_dropout"]) == ("synthesised", 4, 0.0)
    # The index of the backbone serves the task.
    ask = ("search", "--store", world.store, "--mode", "exact", "--queries", "tiny", "--embeddings", "enc", "--k", 5)
    for name, more in {"tiny-test-exact-enc-whole": ("--task", "whole"), "tiny-test-exact-enc": ()}.items():
        assert f"/runs/{name}\n" in done(*ask, *more, "--plan")
    done(*ask, "--task", "whole", "--name", "t")
    done(*ask, "--encoder", world.model, "--name", "plain")
    runs = [next(read_run(several.open("runs", name)))["score"].to_pylist() for name in ("t", "plain")]
    assert runs[0] != runs[1]


def test_a_saved_network_is_continued(world, several: Store, done: Done, refused: Done) -> None:
    """Its options are the defaults; a single task has no regulariser."""
    begin = (*SIZES, "--mix", "after", "--prompt-temperature", "0.5")
    done(*synthesised(world, "begun", *begin, *MORE, "--steps", 2))
    done(*synthesised(world, "few", "--init", "begun", "--steps", 2, "--limit", 3))
    first, second = (load_prompt(model_folder(several.open("prompts", name))) for name in ("begun", "few"))
    assert first.synthesis is not None
    assert second.synthesis is not None
    assert first.synthesis.options == second.synthesis.options
    assert first.synthesis.digest() != second.synthesis.digest()
    artifact = several.open("prompts", "few")
    assert artifact.inputs["init"]["artifact"] == "prompts/begun"
    assert "divergence" not in artifact.config["tuning"]
    assert artifact.config["loop"]["lr"] == 1e-3
    line = refused(*synthesised(world, "x", "--init", "begun", "--mix", "before"))
    assert "--init begun: its prompts have --mix after, and before is given: leave it out" in line
    line = refused(*command(world, "x", "--init", "begun"))
    assert "--init begun --prompt matrix: its prompt is computed from each query; give --prompt synthesised" in line
    done(*command(world, "fixed", "--length", 4, "--steps", 1))
    line = refused(*synthesised(world, "x", "--init", "fixed"))
    assert "--init fixed --prompt synthesised: its prompt is the same for all queries; give --prompt matrix" in line


def test_a_network_of_another_store_is_continued(
    world, several: Store, done: Done, refused: Done, tmp_path: Path
) -> None:
    done(*synthesised(world, "begun", *SIZES, *MORE, "--steps", 2))
    other = shutil.copytree(world.store, tmp_path / "other")
    for task, init in (("here", "prompts/begun"), ("there", f"{other}/prompts/begun")):
        done(*synthesised(world, task, "--init", init, "--steps", 2, "--limit", 3))
    assert weights(several, "prompts/here") == weights(several, "prompts/there")
    assert several.open("prompts", "there").inputs["init"]["artifact"] == f"{other}/prompts/begun"
    line = refused(*synthesised(world, "x", "--init", f"{tmp_path}/none/prompts/begun"))
    assert f"{tmp_path}/none: there is no store here" in line


def test_the_plan_counts_the_parameters(world, several: Store, done: Done) -> None:
    """Of the network with HYPER's sizes over a backbone of 2 layers and embeddings of 32 numbers."""
    numbers = 20 * 100 * 32 + 2 * 32 * 400 + 2 * 32 + 32 * 100 + 100 * (2 * 2 * 32)
    out = done(*synthesised(world, "x", "--plan"))
    assert f"trains    {format_bytes(4 * numbers)}, over" in out
    assert "passages  are not encoded: their vectors are those of embeddings/enc" in out


def test_own_negatives_train_other_weights(world, mined: Store, done: Done, refused: Done) -> None:
    for choice in ("batch", "own"):
        more = ("--negatives", "hand", "--negatives-per-query", 2, "--negatives-from", choice, "--steps", 2)
        done(*synthesised(world, choice, *SIZES, *more))
    assert weights(mined, "prompts/own") != weights(mined, "prompts/batch")
    assert "negatives_from" not in mined.open("prompts", "batch").config["tuning"]
    line = refused(*synthesised(world, "x", "--negatives-from", "own"))
    assert "--negatives-from own, --negatives-per-query 0, --loss contrastive: expected at least 1 negative" in line


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--sides", "tied"), "--prompt synthesised --sides tied: only queries have computed prompts"),
        (("--position-offset",), "--prompt synthesised --position-offset: a text starts at its usual position"),
        (("--basic-prompts", 0), "--basic-prompts 0: expected at least 1"),
        (("--length", 0), "--length 0: expected at least 1"),
        (("--prompt", "per-task", "--length", 0), "--length 0: expected at least 1"),
        (("--prompt-temperature", 0), "--prompt-temperature 0.0: expected more than 0"),
        (("--train", "all"), "--train all --prompt synthesised: expected --prompt none: fine-tuning trains no prompt"),
        (("--attention", "uniform", "--divergence-weight", 1), "--attention uniform --divergence-weight 1: all quer"),
        (("--no-alignment", "--divergence-weight", 1), "--no-alignment --divergence-weight 1: no batch has queries of"),
        (("--divergence-weight", -1), "--divergence-weight -1.0: expected at least 0"),
        (("--prompt", "matrix", "--mix", "after"), "--mix after: is for prompts that are computed"),
        (("--no-uniformity",), "--no-uniformity: the prompt regulariser has weight 0 here, so nothing changes"),
        (("--prompt", "mlp", "--no-alignment"), "--no-alignment: is for prompts that are computed"),
    ],
)
def test_options_that_do_not_fit_are_refused(world, several: Store, refused: Done, more: tuple, expected: str) -> None:
    assert expected in refused(*synthesised(world, "x", "--plan", *more))


def test_a_query_without_a_word_is_named(
    world, done: Done, refused: Done, tmp_path: Path, documented: Callable[..., None]
) -> None:
    queries = [{"_id": "w0", "text": world.passages[0]["text"]}, {"_id": "w1", "text": "日本"}]
    source = write_queries(tmp_path / "wordless", queries, {"train": [("w0", "p0", 1), ("w1", "p1", 1)]})
    done("import_queries", "--store", world.store, "--source", source)
    line = refused(*synthesised(world, "x", "--queries", "wordless", "--steps", 1))
    documented("Training", "train_retriever --prompt synthesised with a query without a known word", line, 1)


def test_a_dev_query_without_a_word_is_named_before_any_step(
    world, done: Done, refused: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = [{"_id": "w0", "text": world.passages[0]["text"]}, {"_id": "w1", "text": "日本"}]
    judged = {"train": [("w0", "p0", 1)], "dev": [("w1", "p1", 1)]}
    source = write_queries(tmp_path / "wordless", queries, judged)
    done("import_queries", "--store", world.store, "--source", source)
    monkeypatch.setattr(Trainer, "train", lambda *_: pytest.fail("training has started"))
    measured = ("--dev-split", "dev", "--evaluate-every", 1, "--steps", 1)
    line = refused(*synthesised(world, "x", "--queries", "wordless", *measured))
    assert "the query '日本' has no word that the backbone knows" in line


def test_each_task_has_a_prompt_and_other_tasks_their_mean(world, several: Store, done: Done, refused: Done) -> None:
    more = ("--prompt", "per-task", "--length", 4, "--prompt-bottleneck", 5, "--steps", 3, "--lr", "1e-2")
    ask = command(world, "many", *more, *MORE)
    numbers = 2 * 4 * 32 + 32 * 5 + 5 * (2 * 2 * 32)
    out = done(*ask, "--plan")
    assert f"trains    {format_bytes(4 * numbers)}, over" in out
    assert f"writes    {format_bytes(3 * 4 * 4 * 2 * 2 * 32)}, and" in out
    done(*ask)
    assert sorted(several.names("prompts")) == ["many", "many-more", "many-tiny"]
    names = ("many", "many-more", "many-tiny")
    mean, *prompts = (load_prompt(model_folder(several.open("prompts", name))) for name in names)
    assert mean.query is not None
    matrices = [prompt.query for prompt in prompts if prompt.query is not None]
    torch.testing.assert_close(mean.query, (matrices[0] + matrices[1]) / 2)
    assert not torch.equal(*matrices)
    assert several.open("prompts", "many-tiny").inputs["tasks"]["artifact"] == "prompts/many"
    several.remove("prompts/many-tiny")
    done(*ask)  # makes what is missing
    search = ("search", "--store", world.store, "--mode", "exact", "--queries", "tiny", "--embeddings", "enc", "--k", 5)
    done(*search, "--task", "many-tiny", "--name", "t")
    line = refused(*command(world, "x", *more))
    assert "--prompt per-task: there is one task, tiny, expected several" in line
    line = refused(*command(world, "x", *more, *MORE, "--basic-prompts", 3))
    assert "--basic-prompts 3: is for prompts that are computed from each query" in line
    line = refused(*command(world, "x", *more, "--also-train", "queries=more,task=a/b"))
    assert "name 'x-a/b': expected a name without '/'" in line
    done(*command(world, "x-more", "--length", 4, "--steps", 1))
    line = refused(*command(world, "x", *more, *MORE))
    assert "prompts/x-more exists, and training makes a prompt of this name: give another --task" in line
    assert several.incomplete_keys() == []


def test_a_sweep_whose_second_run_would_replace_a_prompt_is_refused_before_any_run(
    world, several: Store, done: Done, refused: Done
) -> None:
    done(*command(world, "x-lr0.02-more", "--length", 4, "--steps", 1))
    sizes = ("--prompt", "per-task", "--length", 4, "--prompt-bottleneck", 5, "--steps", 1)
    sweep = ("--sweep", "lr=1e-2,2e-2", "--dev-split", "train", "--evaluate-every", 1)
    line = refused(*command(world, "x", *sizes, *MORE, *sweep))
    assert "prompts/x-lr0.02-more exists, and training makes a prompt of this name: give another --task" in line
    assert several.names("prompts") == ["x-lr0.02-more"]


def test_prompts_and_both_encoders_are_trained_together(world, several: Store, done: Done) -> None:
    """The encoder of passages makes a new index, and queries are encoded by the other one with the prompts."""
    ask = synthesised(world, "both", "--train", "all", "--sides", "untied", *SIZES, *MORE, "--steps", 2)
    shown = done(*ask, "--plan")
    out = done(*ask)
    folder = model_folder(several.open("models", "both"))
    files = {path.relative_to(folder).parts[0]: load_file(path) for path in folder.rglob("*.safetensors")}
    assert files.keys() == {"query", "passage", "prompt"}
    size = 4 * sum(tensor.numel() for file in files.values() for tensor in file.values())
    assert f"trains    {format_bytes(size)}, over" in shown
    assert "prompts/both-prompt: the prompts of queries, over the encoder of queries of" in out
    assert several.open("models", "both").config["loop"]["lr"] == 2e-5
    assert several.open("prompts", "both-prompt").inputs["model"]["artifact"] == "models/both"
    exact = ("--dtype", "float32", "--compile", "never")
    done("encode_corpus", "--store", world.store, "--encoder", "models/both", "--name", "both", *exact)
    ask = ("search", "--store", world.store, "--mode", "exact", "--queries", "tiny", "--embeddings", "both", "--k", 5)
    done(*ask, "--name", "plain")
    done(*ask, "--task", "both-prompt", "--name", "t")
    runs = [next(read_run(several.open("runs", name)))["score"].to_pylist() for name in ("plain", "t")]
    assert runs[0] != runs[1]

    release, excluded = plan_release(several, embeddings="both")
    assert [task.name for task in release.tasks] == ["both-prompt", "default"]
    assert excluded == {}
    release.save(several)
    served, texts = EncoderPart(several, threads=1, device="cpu"), ["moon soup", "river", "moon"]
    options = EncoderOptions(**several.open("models", "both").notes["options"])
    prompt = load_prompt(model_folder(several.open("prompts", "both-prompt")))
    encoders = {side: Encoder(str(folder / side), options, tasks={}) for side in ("query", "passage")}
    encoders["query"].put_task("t", prompt)
    tasks = {"both-prompt": "t", "default": None}
    for side, encoder in encoders.items():
        for names in (["both-prompt"] * 3, ["default", "both-prompt", "default"]):
            actual = served.encode(release.id, texts, names, side).vectors
            expected = encoder.encode(texts, side=side, task=[tasks[n] if side == "query" else None for n in names])
            np.testing.assert_allclose(actual, expected, atol=1e-5)
    spec = EncoderSpec(several, "models/both", options)
    embeddings = Embeddings.open(several, "both", Corpus.open(several))
    check_prompt("t", prompt, spec, embeddings)  # what a server checks of a prompt that it receives
    of_passages = replace(prompt, synthesis=None, passage=torch.zeros(1, 2, 1, 4, 8))
    with pytest.raises(InputError, match=r"^each side has its own encoder, and the prompt is for passages"):
        check_prompt("t", of_passages, spec, embeddings)
