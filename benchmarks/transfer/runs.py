"""A training run of the experiment: an arm on some sets, with a seed and settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARMS = ("shared", "per-task", "hyper", "hyper-uniform", "hyper-free")
FEW_SHOT_SETS = ("squad", "medquad")  # sets with 2,304 training queries


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        name: Its name, also of the prompt.
        arm: One of ARMS, or fine-tune.
        sets: The training sets.
        seed: The seed.
        settings: Options of `train_retriever`.
    """

    name: str
    arm: str
    sets: tuple[str, ...]
    seed: int
    settings: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The kind of the trained artifact."""
        return "models" if self.arm == "fine-tune" else "prompts"

    def name_for(self, data: str) -> str:
        """Returns the name of the prompt for a set: that of the set, if it has a separate one, or that of the run."""
        return f"{self.name}-{data}" if self.arm == "per-task" and data in self.sets else self.name


def store_of(data: str, options: argparse.Namespace) -> str:
    """Returns the folder of the store of a set."""
    return str(Path(options.folder) / "stores" / data)
