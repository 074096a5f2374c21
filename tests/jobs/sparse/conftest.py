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


@pytest.fixture(scope="module")
def sparse_store(served: Path, masked: Path, tmp_path_factory: pytest.TempPathFactory, call_job) -> Path:
    """The folder of `served` with embeddings/sparse and index/impacts over them in 3 shards; 6 passages are deleted."""
    root = Path(shutil.copytree(served, tmp_path_factory.mktemp("sparse") / "root"))
    at = ("--store", root / "store")
    assert call_job("encode_corpus", *at, "--encoder", masked, "--name", "sparse", *EXACT) == 0
    assert call_job("build_index", *at, "--embeddings", "sparse", "--name", "impacts", "--shards", 3) == 0
    return root


@pytest.fixture
def encode(world, masked: Path) -> Callable[..., tuple]:
    """encode(*arguments) returns the command that makes embeddings/sparse of the small store."""

    def command(*more: object) -> tuple:
        return ("encode_corpus", "--store", world.store, "--encoder", masked, "--name", "sparse", *EXACT, *more)

    return command
