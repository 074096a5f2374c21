"""Fixtures for jobs on sparse vectors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import add_masked_head

EXACT = ("--pooling", "splade", "--dtype", "float32")


@pytest.fixture(scope="module")
def masked(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny masked language model."""
    return add_masked_head(Path(shutil.copytree(model, tmp_path_factory.mktemp("masked") / "m")))


@pytest.fixture
def encode(world, masked: Path) -> Callable[..., tuple]:
    """encode(*arguments) returns the command that makes embeddings/sparse of the small store."""

    def command(*more: object) -> tuple:
        return ("encode_corpus", "--store", world.store, "--encoder", masked, "--name", "sparse", *EXACT, *more)

    return command
