r"""Train a prompt for a task: train-retriever with other defaults and option names.

    riptide tune-prompts --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --dev-split dev
"""

from __future__ import annotations

from jobs.common.cli import run

from jobs import train_retriever
from jobs.training.options import TunePrompts


def main(options: TunePrompts) -> None:
    train_retriever.main(options.as_train_retriever())


if __name__ == "__main__":
    run(main, TunePrompts)
