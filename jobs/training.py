"""The options that jobs of training share: how much at a time, and on what machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common, say

from indexing.placement import Places, find_places
from indexing.store import artifact_key
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Workers(Common):
    """Of every training."""

    batch: int
    """Rows a step, over all workers."""
    seed: int = 0
    workers: int = 1
    cpus: int = 2
    """Cores of each worker. As sums are rounded by workers and cores, both shape the result."""
    gpus: Literal[0, 1] | None = None
    """Of each worker; default: 1 where the cluster has one for each now."""
    wait: int = 0
    """Seconds that an autoscaler's nodes may take to come; 0: there is room now."""
    checkpoint_every: int = 100
    """Steps."""

    def check_workers(self, row: str) -> None:
        """Raises InputError for workers that cannot be had. row: what a batch is of."""
        if self.workers < 1 or self.cpus < 1 or self.checkpoint_every < 1 or self.batch < self.workers:
            raise InputError(f"--workers {self.workers} --cpus {self.cpus} --batch {self.batch} --checkpoint-every "
                             f"{self.checkpoint_every}: expected 1 at least, and a {row} for each worker")  # fmt: skip
        if self.wait < 0:
            raise InputError(f"--wait {self.wait}: expected seconds")

    def places(self, least: int | None = None) -> Places:
        """Where the workers have room, or `least` of them. Raises InputError where they have none."""
        return find_places(self.workers, self.cpus, say, gpus=self.gpus, least=least, wait=self.wait)


def count_steps(steps: int | None, epochs: float, rows: int, batch: int) -> int:
    """The steps that were asked for, or else those of so many epochs. Raises InputError."""
    if not (epochs > 0 and math.isfinite(epochs)):
        raise InputError(f"--epochs {epochs}: expected more than 0")
    return math.ceil(epochs * rows / batch) if steps is None else steps


def check_name(kind: str, name: str) -> None:
    """Raises InputError for a name that an artifact without generations cannot have."""
    if not name or "/" in name:
        raise InputError(f"name {name!r}: expected one, and without '/', for {kind}/NAME")
    artifact_key(kind, name)


@dataclass(frozen=True, kw_only=True)
class Training(Workers):
    """Of what goes through the one training loop: backbones and prompts."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    min_workers: int | None = None
    """Go on with as few as these where the cluster loses places, on the same batches."""
    zero: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; default: plain data parallelism."""
    offload: bool = False
    """Keep the optimizer in the processor's memory (ZeRO 1 to 3)."""
    checkpointing: bool = False
    """Compute activations again on the way back, instead of keeping them."""
    grad_cache: Literal["auto", "on", "off"] = "auto"

    def check(self, row: str, frozen: str | None) -> None:
        """Raises InputError, as `check_workers` does too. frozen: the option by which the backbone does not train, None
        where it does."""
        self.check_workers(row)
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise InputError(f"--min-workers {self.min_workers}: expected 1 to --workers {self.workers}")
        if frozen and (self.zero or 0) >= 2:
            raise InputError(f"--zero {self.zero} {frozen}: prompts are small and the backbone does not train: "
                             "give 0 or 1")  # fmt: skip
