"""The interface between the training loop and a trained system: a model with its loss and its data.

The texts of a batch go through the model in chunks, on one or more workers. A chunk gives named outputs, which the loop
puts together for the loss of the batch, and a loss of the chunk alone. A system with sparse vectors, for example,
declares these outputs of each batch:

    outputs = {
        "dense": BatchOutput(width=768, rows=num_queries + num_passages),
        "attention": BatchOutput(width=20, rows=num_queries),  # queries only
        "activations": BatchOutput(width=30_522),  # summed over the batch, so that no worker holds a row for each text
    }

A chunk of queries names the rows that it fills, `BatchChunk(rows={"dense": [0, 2], "attention": [0, 2]}, ...)`.
`forward` returns tensors for it, "dense" [2, 768], "attention" [2, 20] and "activations" [2, 30522], and `loss` gets
the outputs of the whole batch by name. SPLADE's FLOPS is then `(outputs["activations"] / num_texts).square().sum()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from riptide.base.cuts import Cuts

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class BatchOutput:
    """The declaration of a named output of the whole batch, over all chunks and workers.

    Attributes:
        width: The number of columns.
        rows: The number of rows, each of which one chunk fills; rows that no chunk fills are 0. None: the rows of all
            chunks are added up to a single row.
    """

    width: int
    rows: int | None = None


@dataclass(frozen=True)
class BatchChunk:
    """The texts of a batch that go through the model together.

    Attributes:
        rows: For each output that has rows: the rows of the whole output that this chunk fills, int64 [n]. Outputs that
            are summed have none.
        inputs: The arguments of `System.forward`, on the CPU.
        tokens: The number of tokens, padding included.
        cuts: The counts of its texts that were cut to a length limit, by their kind (`riptide.base.cuts.NOUNS`).
            Texts that are cut by design, or that other chunks count too, are left out.
    """

    rows: Mapping[str, np.ndarray]
    inputs: Any
    tokens: int = 0
    cuts: Mapping[str, Cuts] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """One worker's share of the batch of a step.

    Attributes:
        outputs: The outputs of the whole batch by name, the same on every worker. Empty if the loss is the sum of the
            chunks' losses: each chunk then runs forward and backward alone.
        chunks: The worker's chunks.
        arguments: Further arguments of the loss, the same on every worker.
    """

    outputs: Mapping[str, BatchOutput]
    chunks: Sequence[BatchChunk]
    arguments: dict[str, Any] = field(default_factory=dict)


def check_outputs(outputs: Mapping[str, torch.Tensor], chunk: BatchChunk, batch: Batch) -> None:
    """Raises ValueError unless the outputs of a chunk match those that the batch declares.

    Raises:
        ValueError: If an output is missing, is not declared, or has another shape.
    """
    if missing := chunk.rows.keys() - outputs.keys():
        raise ValueError(f"a chunk has rows of {', '.join(sorted(missing))}, which forward did not return")
    for name, output in outputs.items():
        declared = batch.outputs.get(name)
        if declared is None or (declared.rows is not None) != (name in chunk.rows):
            raise ValueError(
                f"output {name!r} of a chunk: expected it in Batch.outputs; in BatchChunk.rows if it has rows"
            )
        length = "any" if declared.rows is None else len(chunk.rows[name])
        if output.ndim != 2 or output.shape[1] != declared.width or length not in ("any", len(output)):
            expected = f"[{length}, {declared.width}]"
            raise ValueError(f"output {name!r} of a chunk: expected {expected}, got {[*output.shape]}")


class System(Protocol):
    """The interface of a trained system: a model, its loss and its data.

    `module` holds the whole model; parameters that do not require gradients are frozen and are not written to
    checkpoints. The batch of a step is a function of (seed, step, size of the whole batch); the number of workers
    decides only about the share of each.

    Under stages 2 and 3 of DeepSpeed's ZeRO all workers must use the same parameters in the same order: `forward` has
    to use all parameters for each chunk, and the chunk's outputs or its loss have to depend on all that are trained.

    A System that has a method `parameter_groups` too (`riptide.retriever.training.parameter_groups.GroupedSystem`)
    gives some of its parameters their own learning rate, weight decay or optimizer.
    """

    module: nn.Module

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns the share of worker `rank` of `world` in the batch of `step`, counted from 0.

        Every worker calls it at every step.
        """

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Returns the outputs of a chunk by name, and the loss of the chunk, or None without chunk losses.

        An output with rows is float [n, width] for the n rows that the chunk fills; one that is summed is float
        [any, width]. The loss of the chunk is a scalar, already divided by counts of the whole batch, so that losses
        add up over chunks and workers.
        """

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the loss over the outputs of the whole batch, a scalar that is equal on every worker.

        Args:
            outputs: Each output of the batch, float32 [rows, width]; [1, width] if it is summed.
            batch: The worker's share. Its `outputs` and `arguments` are the same on every worker.
        """

    def save(self, folder: Path) -> None:
        """Saves the trained model in an empty folder, in the layout that users load."""


class NegativesRefresh(Protocol):
    """The interface that mines new training data with the current model (ANCE, Xiong et al. 2021)."""

    def mine(self) -> torch.Tensor:
        """Mines rows: returns an integer tensor, equal on every worker. All workers must call it at the same step."""

    def train_on(self, mined_rows: torch.Tensor) -> None:
        """Replaces the negatives by the mined rows from the next batch on."""


Evaluate = Callable[[], float]  # returns a quality of the current model; higher is better


def checkpoint_activations(model: Any) -> None:
    """Makes a transformers model recompute its activations in the backward pass instead of keeping them."""
    # transformers 5.17 knows only the older method name; later versions warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
