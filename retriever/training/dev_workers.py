"""Distributes evaluation forward passes over texts or pairs to the workers of a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from riptide.retriever.training.system import BatchChunk

ITEMS = "dense"  # key in `BatchChunk.rows` for the positions of a chunk's items


@torch.no_grad()
def share_items(
    module: nn.Module,
    make_chunks: Callable[[np.ndarray], Sequence[BatchChunk]],
    forward: Callable[[BatchChunk], torch.Tensor],
    shape: tuple[int, int],
    *,
    device: torch.device,
    rank: int,
    world: int,
) -> np.ndarray:
    """Computes a row of values per item with the current model in evaluation mode; all workers get all rows.

    Each worker computes the rows of every world-th item. All of them run the same number of forward passes, because
    sharded weights are gathered in each pass.

    Args:
        module: The model; it is returned to its mode afterwards.
        make_chunks: Maps positions of items, int64 [n], to chunks whose rows of ITEMS are these positions.
        forward: Maps a chunk to float32 [n, width], for its n rows.
        shape: Number of items, and the width of a row.
        device: The device of the model.
        rank: The rank of this worker.
        world: The number of workers.

    Returns:
        float32 `shape`.
    """
    training = module.training
    module.eval()
    result = torch.zeros(shape, device=device)
    chunks = list(make_chunks(np.arange(rank, shape[0], world)))
    num_chunks = len(chunks)
    if world > 1:
        max_chunks = torch.tensor(num_chunks, device=device)
        dist.all_reduce(max_chunks, dist.ReduceOp.MAX)
        spare = chunks or list(make_chunks(np.arange(1)))
        chunks += spare[-1:] * (int(max_chunks) - num_chunks)
    for place, chunk in enumerate(chunks):
        rows = forward(chunk)
        if place < num_chunks:
            result[torch.from_numpy(chunk.rows[ITEMS]).to(device)] = rows
    if world > 1:
        dist.all_reduce(result)
    module.train(training)
    return result.cpu().numpy()
