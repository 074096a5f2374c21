"""Trains the prompts or the model of a run, through the job `train_retriever`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jobs import train_retriever
from jobs.common.options import build
from jobs.training.options import TrainRetriever

from benchmarks.common.models import MINILM
from benchmarks.transfer.runs import Run, store_of
from benchmarks.transfer.sets import EMBEDDINGS, NEGATIVES
from indexing.store.models import model_folder
from indexing.store.store import Store


def train(run: Run, options: argparse.Namespace) -> None:
    """Trains the prompts or the model of a run, unless the store of its first set has them."""
    first = run.sets[0]
    settings: dict[str, Any] = {
        **kind_options(run),
        "queries": first,
        "negatives": first,
        "negatives_per_query": NEGATIVES,
        "also_train": tuple(set_option(run, data, options) for data in run.sets[1:]),
        "batch": options.batch,
        "steps": options.steps,
        "checkpoint_every": options.steps,
        "query_length": options.query_length,
        "passage_length": options.passage_length,
        "seed": run.seed,
        "cpus": options.cpus,
        **run.settings,
    }
    train_retriever.main(
        build(TrainRetriever, dict(store=store_of(first, options), task=run.name, backbone=MINILM, **settings))
    )


def folder_of(run: Run, name: str, options: argparse.Namespace) -> Path:
    """Returns the folder of a prompt of a trained run, or of its model."""
    return Path(model_folder(Store(store_of(run.sets[0], options)).open(run.kind, name)))


def kind_options(run: Run) -> dict[str, Any]:
    """Returns which weights are trained, as options of the job."""
    if run.kind == "models":
        return {"train": "all", "sides": "tied", "embeddings": None}
    return {"train": "prompts", "sides": "query", "embeddings": EMBEDDINGS}


def set_option(run: Run, data: str, options: argparse.Namespace) -> str:
    """Returns a training set as a value of --also-train."""
    option = f"queries={data},negatives={data},store={store_of(data, options)}"
    return option if run.kind == "models" else f"{option},embeddings={EMBEDDINGS}"
