"""Tiny random models of several kinds, and two pairs of workers that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import WORDS, save_encoder
from two_workers import TwoWorkers


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread: models are too small for more, and threads that wait for each other on busy cores make
    a step of training a hundred times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """tiny(kind, name, **options) returns the folder of a model that `save_encoder` saves with these options."""

    def build(kind: str, name: str = "tiny", **options: Any) -> Path:
        return save_encoder(tmp_path / f"{name}-{kind}", kind, **options)

    return build


@pytest.fixture
def texts() -> list[str]:
    """Texts of many lengths in no order, among them empty ones and ones with unusual characters."""
    plain = [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(1 + (i * 11) % 50)) for i in range(40)]
    return [*plain, "", " ", "\0 a \0 b", "é 漢字 \U0001f600 ‮", "the RIVER Bank", "bank " * 300]


@pytest.fixture(scope="session")
def two_workers() -> Iterator[TwoWorkers]:
    """Two workers for cases of plain torch."""
    pair = TwoWorkers()
    yield pair
    pair.end()


@pytest.fixture(scope="session")
def two_deepspeed_workers() -> Iterator[TwoWorkers]:
    """Two workers for cases of DeepSpeed, which changes torch in its process."""
    pair = TwoWorkers()
    yield pair
    pair.end()
