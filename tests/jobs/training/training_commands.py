"""Commands of short trainings: of prompts, of a re-ranker, and pretraining."""

from __future__ import annotations

from typing import Any

# Options of a small training of a retriever, in float32 and with one thread, so that its bytes repeat.
COMMON = (
    "--split",
    "train",
    "--batch",
    8,
    "--negatives-per-query",
    2,
    "--length",
    4,
    "--cpus",
    1,
    "--dtype",
    "float32",
    "--seed",
    3,
)
_NEGATIVES = ("--negatives", "hand", "--negatives-per-query", 2)
TUNE = (
    "tune_prompts",
    "--task",
    "NAME",
    "--length",
    4,
    "--split",
    "train",
    "--dev-split",
    "test",
    "--evaluate-every",
    2,
    *_NEGATIVES,
)
RERANK = ("train_reranker", "--name", "NAME", "--split", "all", "--max-length", 48, "--lr", "1e-3", *_NEGATIVES)
RIP = ("pretrain_rip", "--name", "NAME", "--unit", "span", "--max-length", 32)


def command(form: tuple, world: Any, name: str, *more: object) -> tuple:
    """Returns a job and its arguments, on the store of `world`.

    Args:
        form: TUNE, RERANK or RIP.
        world: The fixture `world`; TUNE and RERANK also need the fixture `mined`.
        name: The name of the artifact.
        *more: Further arguments.
    """
    job, *arguments = (name if argument == "NAME" else argument for argument in form)
    return (job, "--store", world.store, "--backbone", world.model, "--batch", 8, "--cpus", 1, *arguments, *more)
