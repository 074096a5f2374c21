"""A name that was made, or begun, with another model is refused with the names of both models, and not with hashes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_prompts import random_rows, save_dptdr
from job_outcome import Outcome
from samples import save_tiny_bert
from tiny import make_classifier
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store

Job = Callable[..., Outcome]


@pytest.fixture
def begin(job: Job, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """begin(*command) begins the artifact of a command, and makes no part of it."""

    def start(*arguments: object) -> None:
        def begin_draft(draft: Draft, *, abandoned_s: float | None = None) -> None:
            draft.begin(abandoned_s=abandoned_s)

        with monkeypatch.context() as patch:
            patch.setattr(Draft, "check", begin_draft)
            outcome = job(*arguments, "--plan")
        assert (outcome.status, outcome.err) == (0, "")

    return start


def save_model(folder: Path, seed: int) -> Path:
    """Writes a tiny encoder over an earlier one."""
    return Path(save_tiny_bert(folder, seed=seed))


def save_prompt(folder: Path, model: str, seed: int) -> Path:
    """Writes a prompt of DPTDR's authors over an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    save_dptdr(folder, Path(model), random_rows(Path(model), seed))
    return folder


def train(form: tuple, *more: object) -> Callable[[Any, Path], tuple[object, ...]]:
    """Returns the function that gives a training command its store and its backbone."""
    return lambda world, model: (*command(form, world, "new", *more), "--backbone", model)


CONVERT = ("convert_prompts", "--task", "new", "--pooling", "cls", "--query-length", 32, "--passage-length", 40)
COMMANDS: dict[str, Callable[[Any, Path], tuple[object, ...]]] = {  # by the job and the option that names a model
    "encode --encoder": lambda world, model: (
        *("encode_corpus", "--store", world.store, "--name", "new"),
        *("--encoder", model),
    ),
    "search --rerank": lambda world, model: (
        *("search", "--store", world.store, "--mode", "exact", "--name", "new"),
        *("--rerank", model),
    ),
    "tune --backbone": train(TUNE),
    "sweep --backbone": train(TUNE, "--sweep", "lr=0.1,0.2", "--steps", 2),
    "train_reranker --backbone": train(RERANK),
    "pretrain --backbone": train(RIP),
    "convert --source": lambda world, source: (
        *(*CONVERT, "--store", world.store, "--backbone", world.model),
        *("--source", source),
    ),
}


def save(world: Any, name: str, folder: Path, seed: int) -> Path:
    """Writes the model, or the prompt, that an option names."""
    if name == "convert --source":
        return save_prompt(folder, world.model, seed)
    model = save_model(folder, seed)
    return make_classifier(model, seed=seed) if name == "search --rerank" else model


@pytest.mark.parametrize("name", COMMANDS)
def test_both_models_are_named(
    world, mined: Store, tmp_path: Path, job: Job, begin, documented: Callable[..., None], name: str
) -> None:
    """Of a draft that has no part, by the plan and by the run; and with the files of the first model changed."""
    option = name.split()[1]
    one, other = (save(world, name, tmp_path / folder, seed) for seed, folder in enumerate(("one", "other")))
    made_by = functools.partial(COMMANDS[name], world)
    begin(*made_by(one))
    for plan in ((), ("--plan",)):
        outcome = job(*made_by(other), *plan)
        assert outcome.status == 1, outcome
        assert f"otherwise: {option} {one}, now {other}; give {option} {one}, or another name" in outcome.err, outcome
    if name == "tune --backbone":
        documented("Training", "tune_prompts with another backbone under the name of a prompt", outcome.err, 1)
    save(world, name, one, 2)
    outcome = job(*made_by(one))
    what = "prompt" if name == "convert --source" else "weights"
    changed = f"otherwise: {option} {one} has changed since (other {what}); give the former files of {one}, or another"
    assert changed in outcome.err, outcome
    if name == "tune --backbone":
        documented("Training", "tune_prompts with a backbone whose files have changed", outcome.err, 1)
