"""Pretrain a backbone for retrieval on the corpus: RIP, Condenser, coCondenser or plain MLM. A repeated call resumes.

    python jobs/pretrain_rip.py --store data/squad --backbone google-bert/bert-base-uncased --name rip --epochs 4

coCondenser has two stages; the second starts from the backbone and the head of the first:

    python jobs/pretrain_rip.py --store S --backbone google-bert/bert-base-uncased --objective condenser --name stage1
    python jobs/pretrain_rip.py --store S --backbone models/stage1 --objective cocondenser --name cocondenser
"""

from __future__ import annotations

from jobs.common.cli import run

from jobs.training.options import PretrainRip


def main(options: PretrainRip) -> None:
    from jobs.training.pretraining import pretrain  # imports torch, which takes longer than --help

    pretrain(options)


if __name__ == "__main__":
    run(main, PretrainRip)
