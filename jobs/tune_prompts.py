r"""Train a task: a deep prompt over a frozen backbone, or all weights of the backbone. An interrupted run resumes.

    python jobs/tune_prompts.py --store data/squad --task squad --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --length 32 --lr 7e-3 --epochs 1 --dev-split dev
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jobs.cli import human, run, say
from jobs.training import QUALITY
from jobs.tuning import Opened, TunePrompts, open_all, serving_warnings

from indexing.artifact import Artifact
from indexing.store import Store
from retriever.files import resolve, weight_files
from retriever.loading.configuration import load_config
from retriever.options import EncoderOptions
from retriever.recipe import read_recipe


def main(options: TunePrompts) -> None:
    store = Store(options.store).require()
    opened = open_all(store, options)
    for warning in serving_warnings(store, options, opened):
        say(f"warning: {warning}")
    kind = "models" if options.method == "finetune" else "prompts"
    if options.plan:
        if not options.plan_complete(store, kind, options.task, opened.inputs, opened.config):
            plan(options, opened)
        return
    notes = {"backbone": options.backbone, "options": asdict(opened.spec.options), "queries": opened.queries}
    artifact = options.make(store, kind, options.task, inputs=opened.inputs, config=opened.config,
                            prepare=lambda on_ray: (opened.maker, opened.loop, notes))  # fmt: skip
    print_summary(options, artifact)


def print_summary(options: TunePrompts, artifact: Artifact) -> None:
    """Prints a summary of the trained artifact, and draws its curves if --curves is set."""
    notes = artifact.notes
    best = "" if notes["best"] is None else f", {QUALITY} {notes['best']:.4f} at step {notes['best_step']:,}"
    size = sum(part.bytes for part in artifact.parts)
    say(f"{artifact.url}: {human(size)}, {notes['steps']:,} steps over {notes['queries']:,} queries, last loss "
        f"{notes['loss']:.4f}{best}, {notes['numerics']}")  # fmt: skip
    options.draw(artifact)


def plan(options: TunePrompts, opened: Opened) -> None:
    """Prints what a training run reads and writes. The time it takes is unknown before a run."""
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
        say(f"tokens    at most {tokens:,}, forward and backward")
    say(f"trains    {human(size)}, over a backbone of {human(weights)}")
    checkpoint = human(options.checkpoint_bytes(size))
    say(f"writes    {human(size)}, and a checkpoint of {checkpoint} every {options.checkpoint_every} steps")


def prompt_bytes(folder: Path | str) -> int:
    """Returns the bytes of one token of a deep prompt: a key and a value in float32 for each layer and head."""
    config = load_config(read_recipe(resolve(folder), EncoderOptions()).backbone)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return 4 * 2 * config.num_hidden_layers * heads * int(head_dim or config.hidden_size // config.num_attention_heads)


if __name__ == "__main__":
    run(main, TunePrompts)
