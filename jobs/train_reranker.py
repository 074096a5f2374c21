r"""Train a cross-encoder on mined negatives, for re-ranking.

    riptide train-reranker --store data/squad --split train --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --name minilm-reranker

An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

from jobs.common.cli import run

from jobs.training.options import TrainReranker


def main(options: TrainReranker) -> None:
    from jobs.training.reranker import train_reranker  # imports torch, which takes longer than --help

    train_reranker(options)


if __name__ == "__main__":
    run(main, TrainReranker)
