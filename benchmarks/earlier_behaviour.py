"""Runs a job or a benchmark with a behaviour from before its correction, to measure what the correction changes.

    python benchmarks/earlier_behaviour.py dropout-per-chunk benchmarks/experiment.py --arms …
    python benchmarks/earlier_behaviour.py rip-own-negatives jobs/pretrain_rip.py --store S …

dropout-per-chunk: all texts of a chunk share one dropout mask of the prompt's keys and values.
rip-own-negatives: a batch of RIP may hold a passage several times, and then has its units as negatives of each other;
units with equal texts are negatives of each other too.

The names of artifacts do not tell which behaviour they were made with, so give other names.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.program import Parser


def dropout_per_chunk() -> None:
    """Draws one mask for all rows of a chunk."""
    from retriever.forward import attention

    draw = attention.dropped_out

    def one_mask(values: torch.Tensor, probability: float, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return draw(values, probability, values.shape[1], dtype).expand(values.shape[0], rows, *values.shape[2:])

    attention.dropped_out = one_mask


def rip_own_negatives() -> None:
    """Does not bound the batch by the number of passages, and masks nothing but a unit's similarity to itself."""
    from retriever.systems import rip

    loss = rip.rip_loss
    rip.limit_batch = lambda options, num_eligible: options
    rip.rip_loss = lambda vectors, *masks: loss(vectors)
    rip.RipSystem.loss = lambda self, outputs, batch: loss(outputs["dense"])  # type: ignore[method-assign]


BEHAVIOURS: dict[str, Callable[[], None]] = {
    "dropout-per-chunk": dropout_per_chunk,
    "rip-own-negatives": rip_own_negatives,
}


def main() -> Any:
    parser = Parser(__doc__)
    parser.add("behaviour", None, "the behaviour", choices=BEHAVIOURS)
    parser.add("script", None, "the job or benchmark")
    parser.add("arguments", None, "its arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    BEHAVIOURS[options.behaviour]()
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
