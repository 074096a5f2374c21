r"""Train a prompt for a task: train-retriever with other defaults and option names.

    riptide tune-prompts --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --dev-split dev
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs import train_retriever
from riptide.jobs.training.training_options import TunePrompts


def main(options: TunePrompts) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: TunePrompts) -> Artifact | None:
    """Trains a prompt for a task. Returns the prompts, the model or the sweep, or None with --plan."""
    return train_retriever.run_job(store, options.as_train_retriever())


if __name__ == "__main__":
    run(main, TunePrompts)
