r"""Train a cross-encoder on mined negatives, for re-ranking.

    riptide train-reranker --store data/squad --split train --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --name minilm-reranker

An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs.training.training_options import TrainReranker


def main(options: TrainReranker) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: TrainReranker) -> Artifact | None:
    """Trains a re-ranker. Returns the model, or None with --plan."""
    from riptide.jobs.training.reranker_run import train_reranker  # imports torch, which would delay --help

    return train_reranker(store, options)


if __name__ == "__main__":
    run(main, TrainReranker)
