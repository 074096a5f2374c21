r"""Train a task: the job train_retriever with --train prompts as the default, and with other names of some options.

    python jobs/tune_prompts.py --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --epochs 1 --dev-split dev
"""

from __future__ import annotations

from jobs.common.cli import run

from jobs import train_retriever
from jobs.training.options import TunePrompts


def main(options: TunePrompts) -> None:
    train_retriever.main(options.as_train_retriever())


if __name__ == "__main__":
    run(main, TunePrompts)
