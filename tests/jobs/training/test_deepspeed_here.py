"""DeepSpeed in this process: stages run one after the other and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist
from mined import weights
from training_commands import RERANK, command

from riptide.indexing.store.store import Store
from riptide.indexing.training.local import LAUNCHER


def test_stages_run_one_after_the_other(world, mined: Store, done: Callable[..., str]) -> None:
    """The losses equal those without DeepSpeed, and plain runs before and after give the same bytes."""
    before = {name: os.environ.get(name) for name in LAUNCHER}
    runs = {"before": (), "one": ("--zero", 1), "three": ("--zero", 3), "after": ()}
    for name, more in runs.items():
        done(*command(RERANK, world, name, "--steps", 3, *more))
        assert not dist.is_initialized()
        assert {name: os.environ.get(name) for name in LAUNCHER} == before
    assert weights(mined, "models/after") == weights(mined, "models/before")
    losses = [mined.open("models", name).notes["loss"] for name in runs]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-2)
