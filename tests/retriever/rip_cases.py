"""Texts and systems that tests of intermediate pretraining share, and their case for two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCABULARY

from riptide.retriever.forward import batching
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.pretraining import RipOptions
from riptide.retriever.systems import rip
from riptide.retriever.systems.rip import RipData, RipSystem
from riptide.retriever.training.loop import Trainer

CPU = torch.device("cpu")


def make_texts(passages: int = 30) -> list[str]:
    """Returns passages of two to five sentences of random words."""
    draw = np.random.default_rng(0)
    texts = []
    for _ in range(passages):
        sizes = draw.integers(3, 12, size=draw.integers(2, 6))
        texts.append(" ".join(" ".join(f"w{n}" for n in draw.integers(VOCABULARY - 1, size=k)) + "." for k in sizes))
    return texts


TEXTS = make_texts()
# Three passages: a batch of seven holds each of them more than once. The second repeats a sentence of the first.
REPEATED = ["w1 w2 w3. w4 w5 w6 w7.", "w1 w2 w3. w8 w9.", "w10 w11. w12 w13. w14 w15 w16."]


def add_mask(folder: Path, piece: str) -> Path:
    """Makes a piece the mask token of a tokenizer; returns its folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": piece})
    tokenizer.save_pretrained(folder)
    return folder


def split_at_periods(text: str, _: object) -> list[str]:
    """Splits sentences without capitals, which `rip.split_sentences` does not find in random words."""
    return [sentence.strip() for sentence in text.split(".") if sentence.strip()]


def options(**changes: Any) -> RipOptions:
    return RipOptions(**{"steps": 4, "batch": 7, "max_length": 16, "min_words": 1, **changes})


def rip_system(folder: Path, texts: list[str] = TEXTS, **changes: Any) -> RipSystem:
    data = RipData(len(texts), lambda rows: [texts[row] for row in rows], np.arange(len(texts)))
    system = RipSystem(folder, options(**changes), data, device=CPU)
    system.module.eval()
    return system


def without_dropout(system: RipSystem) -> RipSystem:
    for module in system.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return system


def four_steps(rank: int, patch: pytest.MonkeyPatch, bert: Path, world: int, zero: int | None) -> dict[str, Any]:
    """Returns the losses of four steps without dropout, and the state of the optimizer after them."""
    patch.setattr(rip, "split_sentences", split_at_periods)
    system = without_dropout(rip_system(bert))
    loop = LoopOptions(steps=6, lr=1e-3, zero=zero)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(4)]
    return {"losses": torch.tensor(losses), **trainer.stepper.state()}


def repeated_steps(rank: int, patch: pytest.MonkeyPatch, bert: Path, world: int) -> list[float]:
    """Returns the losses of three steps with GradCache, in batches that hold the same passage several times."""
    patch.setattr(rip, "split_sentences", split_at_periods)
    patch.setitem(batching.BATCH_TOKENS, "cpu", 64)
    trainer = Trainer(
        without_dropout(rip_system(bert, REPEATED)),
        LoopOptions(steps=4, lr=1e-3, grad_cache="on"),
        device=CPU,
        dtype=torch.float32,
        rank=rank,
        world=world,
    )
    return [trainer.step(number) for number in range(3)]


def encoded(rank: int, patch: pytest.MonkeyPatch, folder: Path, texts: list[str]) -> np.ndarray:
    """Returns the vectors of texts that two workers share."""
    return rip_system(folder).encode(texts, "query", rank, 2)
