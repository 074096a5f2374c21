"""train_retriever --train lora makes a merged model with its adapter, which encodes like a fine-tuned one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from mined import weights
from samples import files_of
from training_commands import TUNE, command

from riptide.indexing.store.store import Store

Done = Callable[..., str]
LORA = ("--method", "lora", "--lora-rank", 4, "--lora-alpha", 8, "--lr", "1e-2", "--steps", 6, "--checkpoint-every", 2)


def test_a_merged_model_with_its_adapter_flows_through_search(world, mined: Store, done: Done) -> None:
    run = command(TUNE, world, "nq", *LORA)
    before = files_of(world.store)
    plan = done(*run, "--plan")
    assert "trains    4.1 kB, over a backbone of " in plan  # 2 layers, 2 projections, A and B: 8 * 4 * 32 float32
    assert files_of(world.store) == before
    assert "models/nq: " in done(*run)
    files = weights(mined, "models/nq")
    assert {
        "model.safetensors",
        "modules.json",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    } <= files.keys()
    assert len(files["adapter/adapter_model.safetensors"]) < len(files["model.safetensors"]) / 5
    assert mined.open("models", "nq").config["tuning"]["lora"] == {
        "rank": 4,
        "alpha": 8,
        "dropout": 0.05,
        "targets": None,
    }
    assert not list(mined.storage.list("checkpoints"))
    done("encode_corpus", "--store", world.store, "--task", "nq", "--name", "nq", "--dtype", "float32")
    assert "nq" in mined.names("embeddings")
    complete = files_of(world.store)
    done(*run)
    assert files_of(world.store) == complete
    assert done(*run, "--plan").endswith("/models/nq is complete\n")


def test_a_run_that_was_interrupted_makes_the_same_files(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint before the interruption is that of step 4, and holds the adapter alone."""
    from riptide.retriever.training.loop import Trainer

    done(*command(TUNE, world, "whole", *LORA, "--lora-targets", "query", "output.dense"))
    interrupted, step = command(TUNE, world, "parts", *LORA, "--lora-targets", "query", "output.dense"), Trainer.step

    def stop(trainer: Trainer, number: int):
        if number == 5:
            raise KeyboardInterrupt
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        assert job(*interrupted).status == 130
    [size] = [size for key, size in mined.storage.list("checkpoints/parts.models") if key.endswith(".safetensors")]
    assert size < sum(map(len, weights(mined, "models/whole").values())) / 2
    done(*interrupted)
    assert weights(mined, "models/parts") == weights(mined, "models/whole")


def test_bad_options_leave_the_store_as_it_was(
    world, mined: Store, refused: Done, documented: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(world.store)
    for case, more, message in [
        ("a rank of 0", ("--lora-rank", 0), "--lora-rank 0"),
        ("layers that the backbone lacks", ("--lora-targets", "q_proj"), "give all-linear, or some of dense, key"),
        ("--position-offset", ("--position-offset",), "--train lora --position-offset"),
        ("ZeRO stage 2", ("--zero", 2), "--zero 2 --train lora"),
    ]:
        line = refused(*command(TUNE, world, "nq", *LORA, *more))
        assert message in line
        documented("Training", f"tune_prompts --method lora with {case}", line, 1)
    line = refused(*command(TUNE, world, "nq", "--lora-rank", 4))
    documented("Training", "tune_prompts --method prompt with --lora-rank", line, 1)
    assert "--lora-rank 4: is for a LoRA adapter: give --train lora, or leave it out" in line
    monkeypatch.setitem(sys.modules, "peft", None)
    line = refused(*command(TUNE, world, "nq", *LORA))
    assert "pip install 'riptide[lora]'" in line
    documented("Training", "tune_prompts --method lora without the package peft", line, 1)
    assert files_of(world.store) == before
