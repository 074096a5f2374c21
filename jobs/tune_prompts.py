r"""Train a task: a deep prompt over a frozen backbone, or all of the backbone; killed and started again, it goes on.

    python jobs/tune_prompts.py --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --epochs 1 --dev-split dev
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jobs.cli import human, run, say
from jobs.training import QUALITY
from jobs.tuning import Opened, TunePrompts, open_all

from indexing.artifact import Artifact
from indexing.store import Store
from retriever.files import resolve, weight_files


def main(options: TunePrompts) -> None:
    store = Store(options.store).require()
    opened = open_all(store, options)
    if options.plan:
        return plan(options, opened)
    kind = "models" if options.method == "finetune" else "prompts"
    name = options.task if options.limit is None else f"{options.task}-limit{options.limit}"
    notes = {"backbone": options.backbone, "options": asdict(opened.spec.options), "queries": opened.queries}
    tell(options, options.make(store, kind, name, inputs=opened.inputs, config=opened.config,
                               prepare=lambda: (opened.maker, opened.loop, notes)))  # fmt: skip
    return None


def tell(options: TunePrompts, artifact: Artifact) -> None:
    notes = artifact.notes
    best = "" if notes["best"] is None else f", {QUALITY} {notes['best']:.4f} at step {notes['best_step']:,}"
    size = sum(part.bytes for part in artifact.parts)
    say(f"{artifact.url}: {human(size)}, {notes['steps']:,} steps over {notes['queries']:,} queries, last loss "
        f"{notes['loss']:.4f}{best}, {notes['numerics']}")  # fmt: skip
    options.draw(artifact)


def plan(options: TunePrompts, opened: Opened) -> None:
    """What a training reads and writes; the time only a first run can tell."""
    weights = sum(file.stat().st_size for file in weight_files(resolve(opened.spec.folder)))
    loop, passages = opened.loop, options.batch * (1 + options.negatives_per_query)
    encoder = opened.spec.options
    size = weights
    if options.method == "prompt":
        size = options.length * prompt_bytes(opened.spec.folder) * (2 if options.untied else 1)
    say(f"queries   {opened.queries:,} of {options.split}, with negatives in {opened.inputs['negatives'].key}")
    say(f"steps     {loop.steps:,} of {options.batch} queries and up to {passages:,} passages, on "
        f"{options.workers} workers")  # fmt: skip
    if encoder.query_length and encoder.passage_length:
        tokens = loop.steps * (options.batch * encoder.query_length + passages * encoder.passage_length)
        say(f"tokens    at most {tokens:,}, there and back")
    say(f"trains    {human(size)}, over a backbone of {human(weights)}")
    say(f"writes    {human(size)}, and a checkpoint of {human(3 * size)} every {options.checkpoint_every} steps")


def prompt_bytes(folder: Path | str) -> int:
    """Of one token of a deep prompt: a key and a value in float32 for each layer and head."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    each = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return 4 * 2 * config.num_hidden_layers * heads * int(each or config.hidden_size // config.num_attention_heads)


if __name__ == "__main__":
    run(main, TunePrompts)
