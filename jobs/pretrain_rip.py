r"""Pretrain a backbone on the corpus: RIP, Condenser, coCondenser or plain MLM.

    riptide pretrain-rip --store data/squad --backbone google-bert/bert-base-uncased --name rip

A repeated call resumes.

coCondenser has two stages; the second starts from the backbone and the head of the first:

    riptide pretrain-rip --store S --objective condenser --name stage1 \
        --backbone google-bert/bert-base-uncased
    riptide pretrain-rip --store S --objective cocondenser --name stage2 --backbone models/stage1
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs.training.training_options import PretrainRip


def main(options: PretrainRip) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: PretrainRip) -> Artifact | None:
    """Pretrains a backbone or a prompt. Returns the artifact, or None with --plan."""
    from riptide.jobs.training.pretraining_run import pretrain  # imports torch, which would delay --help

    return pretrain(store, options)


if __name__ == "__main__":
    run(main, PretrainRip)
