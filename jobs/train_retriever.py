r"""Train a retriever: deep prompts or LoRA over a frozen backbone, or all weights.

    riptide train-retriever --store data/squad --task squad --negatives bm25 --train prompts \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --dev-split dev

An interrupted run resumes.

--train says which weights are trained, --prompt whether there is a prompt, and --sides which texts it concerns:

    --train prompts --sides tied      one prompt for queries and passages (DPTDR on MS MARCO)
    --train prompts --sides untied    a prompt of each side (DPTDR on NQ)
    --train prompts --sides query     a prompt for queries; the backbone's index serves the task
      --prompt synthesised            a prompt for each query, computed from its words (HYPER)
      --prompt per-task               a prompt for each of several tasks; their mean for others
    --train prompts --sides tied      queries and passages share the prompts:
      --prompt topics                 a prompt for each topic of topics/NAME (Topic-DPR)
    --train lora                      LoRA adapters in place of prompts, merged into encoders
    --train all --sides tied          one fine-tuned encoder
      --prompt matrix                 and one prompt for all texts, in prompts/TASK-prompt
      --prompt topics                 and a prompt for each topic, in prompts/TASK-prompt
    --train all --sides untied        an encoder of each side (DPR), in models/TASK
      --prompt synthesised            and a prompt for each query, in prompts/TASK-prompt (HYPER)
    --train all --sides query         an encoder of queries, for the backbone's index
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs.training.training_options import TrainRetriever


def main(options: TrainRetriever) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: TrainRetriever) -> Artifact | None:
    """Trains a retriever. Returns the prompts, the model or the sweep, or None with --plan."""
    from riptide.jobs.training.retriever_run import train_retriever  # imports torch, which would delay --help

    return train_retriever(store, options)


if __name__ == "__main__":
    run(main, TrainRetriever)
