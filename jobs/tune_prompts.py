"""Train a task: a deep prompt over a frozen backbone, or all of the backbone; killed and started again, it goes on.

    python jobs/tune_prompts.py --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --epochs 1 --dev-split dev
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect
from jobs.tuning import Opened, open_all

from indexing.artifact import Artifact, fingerprint_of
from indexing.curves import write_curves
from indexing.models import Checkpoints
from indexing.reranker_job import check_cores
from indexing.store import Store
from indexing.training_job import TrainingTask, run_training
from retriever.files import resolve, weight_files


@dataclass(frozen=True, kw_only=True)
class TunePrompts(Common):
    """--limit N takes the first N queries of the split."""

    task: str
    """The task's name: what comes of it is prompts/TASK, or models/TASK with --method finetune."""
    backbone: str
    """A Hugging Face name, a folder, or models/NAME of the store."""
    method: Literal["prompt", "finetune"] = "prompt"
    side: Literal["query", "both"] = "both"
    """query: passages are encoded by the backbone as it is, so that an index of it serves the task."""
    untied: bool = False
    """A prompt for queries and another one for passages."""
    length: int = 32
    """Of a prompt, in tokens."""
    init: str | None = None
    """Begin from prompts/NAME, of the same backbone and length (such as pretrain_rip --train prompts makes)."""
    parametrisation: Literal["embedding", "mlp"] = "embedding"
    prompt_dropout: float = 0.1
    negatives: str | None = None
    """May be left out where the store has one only, as --queries may."""
    queries: str | None = None
    split: str = "train"
    dev_split: str | None = None
    """Judge the model by this split (MRR@10) while it trains, and keep the best."""
    dev_limit: int | None = 500
    dev_passages: int = 2000
    """The dev split's questions are looked for in so many passages: those that answer them, and others at random."""
    epochs: float = 1.0
    steps: int | None = None
    """Instead of --epochs."""
    refresh_epochs: float | None = None
    """Mine negatives anew by the model as it is, each time so many epochs are done (ANCE); the mined ones are for the
    time before. Known answers are not looked for in their texts."""
    refresh_depth: int = 100
    """Negatives of each query that are mined then, to draw from."""
    batch: int = 32
    """Queries a step, over all workers."""
    negatives_per_query: int = 1
    lr: float | None = None
    """Default: 7e-3 for prompts (DPTDR), 2e-5 for fine-tuning."""
    warm_up: float = 0.1
    weight_decay: float | None = None
    """Default: 0 for prompts, 0.01 for fine-tuning."""
    temperature: float | None = None
    """Divides similarities; default: 1, or 0.05 where vectors have length 1."""
    seed: int = 0
    pooling: Literal["cls", "mean", "last"] | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    title: Literal["space", "newline", "sep", "none"] = "space"
    query_length: int | None = None
    passage_length: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    workers: int = 1
    min_workers: int | None = None
    """Go on with as few as these where the cluster loses places, on the same batches."""
    cpus: int = 2
    """Cores of each worker."""
    zero: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage; default: plain data parallelism."""
    offload: bool = False
    """Keep the optimizer in the processor's memory (ZeRO 1 to 3)."""
    checkpointing: bool = False
    """Compute activations again on the way back, instead of keeping them."""
    grad_cache: Literal["auto", "on", "off"] = "auto"
    checkpoint_every: int = 100
    """Steps, as --evaluate-every."""
    evaluate_every: int = 100
    patience: int = 0
    """Evaluations without a better one before training ends; 0: never."""
    curves: str | None = None
    """Write a picture of the training, and TensorBoard's events, to this folder."""


def main(options: TunePrompts) -> None:
    store = Store(options.store).require()
    opened = open_all(store, options)
    if options.plan:
        return plan(options, opened)
    kind = "models" if options.method == "finetune" else "prompts"
    name = options.task if options.limit is None else f"{options.task}-limit{options.limit}"
    if name not in store.names(kind):
        connect(store)
        if told := check_cores(options.min_workers or options.workers, options.cpus):
            say(told)
    identity = fingerprint_of([{role: a.fingerprint for role, a in opened.inputs.items()}, opened.config])
    last, best = (Checkpoints(store, f"{name}.{end}", identity) for end in (kind, f"{kind}.best"))
    with store.create(kind, name, inputs=opened.inputs, config=opened.config) as draft:
        if not draft.complete:
            task = TrainingTask(draft=draft, last=last, best=best, loop=opened.loop, maker=opened.maker,
                                dtype=options.dtype, cpus=options.cpus)  # fmt: skip
            draft.note(backbone=options.backbone, options=asdict(opened.spec.options), queries=opened.queries)
            with Stage("train", opened.loop.steps, "steps") as stage:
                draft.note(**run_training(task, options.workers, stage.count, min_workers=options.min_workers))
    for checkpoints in (last, best):
        checkpoints.clear()
    tell(options, store.open(kind, name))
    return None


def tell(options: TunePrompts, artifact: Artifact) -> None:
    notes = artifact.notes
    best = "" if notes["best"] is None else f", dev MRR@10 {notes['best']:.4f} at step {notes['best_step']:,}"
    size = sum(part.bytes for part in artifact.parts)
    say(f"{artifact.url}: {human(size)}, {notes['steps']:,} steps over {notes['queries']:,} queries, last loss "
        f"{notes['loss']:.4f}{best}, {notes['numerics']}")  # fmt: skip
    if options.curves:
        say(str(write_curves(Path(options.curves), notes["curve"], title=artifact.key, quality="dev MRR@10")))


def plan(options: TunePrompts, opened: Opened) -> None:
    """What a training reads and writes; the time only a first run can tell."""
    weights = sum(file.stat().st_size for file in weight_files(resolve(opened.spec.folder)))
    loop, batch = opened.loop, options.batch * (2 + options.negatives_per_query)
    say(f"queries   {opened.queries:,} of {options.split}, with negatives in {opened.inputs['negatives'].key}")
    say(f"steps     {loop.steps:,} of {options.batch} queries and up to {batch - options.batch:,} passages, on "
        f"{options.workers} workers")  # fmt: skip
    trained = "the prompt" if options.method == "prompt" else human(weights)
    say(f"trains    {trained}, over a backbone of {human(weights)}")
    say(f"writes    a checkpoint of three times what trains every {options.checkpoint_every} steps")


if __name__ == "__main__":
    run(main, TunePrompts)
