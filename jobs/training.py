"""The options that jobs of training share: how much at a time, and on what machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common

from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Training(Common):
    """Of a training over Ray's workers."""

    batch: int
    """Rows a step, over all workers."""
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    workers: int = 1
    min_workers: int | None = None
    """Go on with as few as these where the cluster loses places, on the same batches."""
    cpus: int = 2
    """Cores of each worker."""
    zero: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; default: plain data parallelism."""
    offload: bool = False
    """Keep the optimizer in the processor's memory (ZeRO 1 to 3)."""
    checkpointing: bool = False
    """Compute activations again on the way back, instead of keeping them."""
    grad_cache: Literal["auto", "on", "off"] = "auto"
    checkpoint_every: int = 100
    """Steps."""

    def check(self, row: str, frozen: str | None) -> None:
        """Raises InputError for workers that cannot be had. row: what a batch is of; frozen: the option by which the
        backbone does not train, None where it does."""
        if self.workers < 1 or self.cpus < 1 or self.batch < self.workers:
            raise InputError(f"--workers {self.workers} --cpus {self.cpus} --batch {self.batch}: expected 1 at "
                             f"least, and a {row} for each worker")  # fmt: skip
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise InputError(f"--min-workers {self.min_workers}: expected 1 to --workers {self.workers}")
        if frozen and (self.zero or 0) >= 2:
            raise InputError(f"--zero {self.zero} {frozen}: prompts are small and the backbone does not train: "
                             "give 0 or 1")  # fmt: skip
