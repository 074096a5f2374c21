"""Pretrain a backbone for retrieval on the corpus: RIP, Condenser, coCondenser or plain MLM. A repeated call resumes.

    python jobs/pretrain_rip.py --store data/squad --backbone google-bert/bert-base-uncased --name rip --epochs 4

coCondenser has two stages; the second starts from the backbone and the head of the first:

    python jobs/pretrain_rip.py --store S --backbone google-bert/bert-base-uncased --objective condenser --name stage1
    python jobs/pretrain_rip.py --store S --backbone models/stage1 --objective cocondenser --name cocondenser
"""

from __future__ import annotations

from jobs.common.cli import human, run, say

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from jobs.common.workers import say_line
from jobs.training.runs import Contrastive, check_name, count_steps, describe_best

import numpy as np

from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import Queries
from indexing.store.models import resolve_model, stored_model
from indexing.store.store import Store
from indexing.training.pretraining import Eligible, RipMaker, count_eligible, no_pairs, training_rows
from indexing.work.local import LocalRunner
from indexing.work.ray_tasks import RayTasks
from retriever.errors import InputError
from retriever.model.configuration import load_config
from retriever.model.files import describe_backbone, resolve, weight_files
from retriever.model.recipe import positions_of
from retriever.options import EncoderOptions
from retriever.systems.condenser import describe_head
from retriever.systems.cross import check_length
from retriever.systems.rip import RipOptions, default_mask, default_unit, encoder_options, fit_batch
from retriever.training.loop import LoopOptions


@dataclass(frozen=True, kw_only=True)
class PretrainRip(Contrastive):
    """--limit N trains on the first N passages."""

    MAKES: ClassVar = ("models", "tasks")
    NAMED_BY: ClassVar = ("name",)
    READS: ClassVar = {"backbone": "models", "queries": "queries"}

    backbone: str
    """Backbone: a Hugging Face name, a folder, or models/NAME of the store."""
    name: str | None = None
    """Name of the model. Default: the last part of the backbone's name, with the objective appended."""
    objective: Literal["rip", "cocondenser", "condenser", "mlm", "pairs"] = "rip"
    """rip: two sentences of a passage retrieve each other, and masked language modelling (DPTDR); condenser: masked
    language modelling with a head that reads the last layer's first token and an early layer's other tokens;
    cocondenser: the same over two spans of a passage that retrieve each other, from a backbone that condenser trained;
    mlm: masked language modelling alone; pairs: two spans of a passage retrieve each other by their cosine, and no word
    is masked (a first stage of GTR without queries; use --pooling mean)."""
    temperature: float | None = None
    """With --objective pairs: cosines are divided by this; default: 0.01 (GTR)."""
    unit: Literal["sentence", "span"] | None = None
    """What a pair of a passage consists of: two sentences, or two spans of words. Default: span with --objective
    cocondenser and pairs, otherwise sentence."""
    mask: Literal["token", "word"] | None = None
    """What is masked: single tokens, or all tokens of a word. Default: word with --objective condenser and cocondenser,
    otherwise token."""
    head_layers: int | None = None
    """Layers of Condenser's head. Default: as the backbone's saved head, or 2."""
    skip_from: int | None = None
    """Layer whose output gives Condenser's head the tokens other than the first. Default: as the backbone's saved head,
    or half of the backbone's layers."""
    late_loss: bool = True
    """With Condenser's head, also predict the masked tokens from the last layer."""
    train: Literal["backbone", "prompts"] = "backbone"
    """backbone: train all weights; prompts: train a deep prompt over the frozen backbone and make prompts/NAME."""
    prompt_length: int | None = None
    """Length of the prompt, in tokens (with --train prompts). Default: 32. `tune_prompts --init` needs the same."""
    queries: str | None = None
    """Name of the query set of --dev-split; may be left out if the store has only one."""
    dev_passages: int = 2000
    """Search the dev queries in N passages: their relevant ones, and random others."""
    epochs: float = 4.0
    """Number of passes over the passages. DPTDR: 8 on MS MARCO, 4 on Wikipedia."""
    steps: int | None = None
    """Number of steps; overrides --epochs."""
    batch: int = 2048
    """Passages per step, summed over all workers (2,048 in DPTDR); at most the number of eligible passages, because
    they are negatives of each other."""
    lr: float | None = None
    """Peak learning rate; default: 1e-4 (DPTDR), 1e-3 with --optimizer adafactor."""
    warm_up: float = 0.1
    """Fraction of the steps in which the learning rate rises."""
    weight_decay: float | None = None
    """Weight decay; default: 0.01, 0 with --optimizer adafactor."""
    mlm_probability: float = 0.15
    """Fraction of the tokens that are masked."""
    max_length: int = 128
    """Maximum number of tokens of a sentence (of a passage with --objective condenser and mlm), special tokens
    included. Longer ones are cut; the job says how many of those in its batches."""
    pooling: Literal["cls", "mean"] = "cls"
    """Pooling of token vectors into the vector of a sentence."""
    min_words: int = 8
    """Minimum number of words of a sentence or span. Shorter ones are not drawn; a passage without two is not
    eligible."""
    language: str = "en"
    """Language of the passages, for the detection of sentence ends."""


def main(options: PretrainRip) -> None:
    store = Store(options.store).require()
    options.check("passage", "--train prompts" if options.train == "prompts" else None)
    corpus = Corpus.open(store)
    folder = resolve(resolve_model(store, options.backbone))
    described = describe_backbone(folder)
    check_length(folder, options.max_length)
    if options.prompt_length is not None and options.train != "prompts":
        raise InputError(f"--prompt-length {options.prompt_length}: expected --train prompts too")
    names = set(RipOptions.__dataclass_fields__) & set(PretrainRip.__dataclass_fields__) - {"steps"}
    if options.prompt_length is None:
        names.remove("prompt_length")
    # The number of eligible passages is not known yet; `prepare` counts the steps again.
    num_passages = min(corpus.num_rows, options.limit or corpus.num_rows)
    steps = count_steps(options.steps, options.epochs, num_passages, options.batch)
    chosen = {name: getattr(options, name) for name in names}
    chosen["lr"] = options.peak_lr(options.lr, 1e-4)
    chosen["unit"] = options.unit or default_unit(options.objective)
    chosen["mask"] = options.mask or default_mask(options.objective)
    rip = RipOptions(steps=steps, **chosen)
    head = describe_head(folder) if rip.has_head else None
    loop = LoopOptions(
        steps=steps,
        lr=rip.lr,
        weight_decay=options.decay(options.weight_decay, 0.01),
        **{
            name: getattr(options, name)
            for name in (
                "seed",
                "warm_up",
                "optimizer",
                "zero",
                "offload",
                "grad_cache",
                "checkpoint_every",
                "checkpoint_minutes",
            )
        },
        evaluate_every=options.steps_per_evaluation,
        patience=options.patience,
    )
    kind = "prompts" if options.train == "prompts" else "models"
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-{options.objective}"
    check_name(kind, name)
    shaping = {key: value for key, value in loop.shaping().items() if key != "steps"}
    unset = "temperature" if rip.temperature is None else None  # earlier artifacts keep their fingerprints
    config = {
        "backbone": described,
        "rip": {key: value for key, value in asdict(rip).items() if key not in ("steps", unset)},
        "loop": shaping,
        "epochs": None if options.steps is not None else options.epochs,
        "steps": options.steps,
        "limit": options.limit,
        "cpus": options.cpus,
        "dtype": options.dtype,
    }
    if rip.has_head:
        config["head"] = head
    inputs = {"corpus": corpus.generations[-1]}
    if options.queries is not None and options.dev_split is None:
        raise InputError(f"--queries {options.queries}: expected --dev-split too; only the measurement uses queries")
    dev = None
    if options.dev_split is not None:
        queries = Queries.open(store, options.queries)
        dev = options.dev_split_of(queries)
        inputs["queries"], config["dev"] = queries.artifact, options.dev_config()
    if backbone := stored_model(store, options.backbone):
        inputs["backbone"] = backbone
    if options.plan:
        if not options.plan_complete(store, kind, name, inputs, config):
            weights = sum(file.stat().st_size for file in weight_files(folder))
            plan(options, rip, count_eligible(corpus, rip, options.limit, LocalRunner()), weights)
            say_head(options, head)
        return

    def prepare(on_ray: bool) -> tuple[RipMaker, LoopOptions, dict[str, Any]]:
        """Finds the passages to train on, which decide the number of steps."""
        runner = RayTasks(options.worker_request(), say_line) if on_ray else LocalRunner()
        rows = training_rows(corpus, rip, options.limit, runner)
        fitted = fit(options, rip, len(rows))
        say_head(options, head)
        exact = replace(loop, steps=count_steps(options.steps, options.epochs, len(rows), fitted.batch))
        maker = RipMaker(
            store=store,
            backbone=options.backbone,
            described=described,
            rows=share(rows) if on_ray else rows,
            options=fitted,
            checkpointing=options.checkpointing,
            head=head,
            dev=dev,
        )
        encoder = (
            encoder_options(rip)
            if kind == "prompts"
            else EncoderOptions(pooling=rip.pooling, normalize=not rip.has_masks)
        )
        facts = {
            "backbone": options.backbone,
            "passages": len(rows),
            "batch": fitted.batch,
            "options": encoder.stored(),
        }
        if rip.has_head:
            facts["head"] = "new" if head is None else "the backbone's"
        return maker, exact, facts

    longest = positions_of(load_config(folder))
    artifact = options.make(store, kind, name, inputs=inputs, config=config, prepare=prepare, longest=longest)
    notes = artifact.notes
    say(
        f"{artifact.url}: {notes['steps']:,} steps of {notes['batch']:,} passages over {notes['passages']:,} eligible "
        f"of {num_passages:,} passages, last loss {notes['loss']:.4f}{describe_best(notes)}, {notes['numerics']}"
    )
    options.draw(artifact)


def share(rows: np.ndarray) -> Any:
    """Returns Ray's reference to an array in the object store."""
    import ray

    return ray.put(rows)


def fit(options: PretrainRip, rip: RipOptions, num_eligible: int) -> RipOptions:
    """Returns the options with a batch that fits the eligible passages, and prints a line if it is smaller.

    Raises:
        InputError: If a worker would have no passage.
    """
    fitted = fit_batch(rip, num_eligible)
    if fitted.batch < options.workers:
        raise InputError(
            f"--workers {options.workers}: only {num_eligible} passages are eligible, and each worker needs one"
        )
    if fitted.batch < rip.batch:
        say(f"batch     {fitted.batch:,} passages instead of {rip.batch:,}: no more are eligible")
    return fitted


def say_head(options: PretrainRip, head: dict[str, str] | None) -> None:
    """Prints a line if the second stage of coCondenser starts without the head of the first one."""
    if options.objective == "cocondenser" and head is None:
        say(f"head      new: {options.backbone} has none; --objective condenser trains a backbone with its head first")


def plan(options: PretrainRip, rip: RipOptions, eligible: Eligible, weights: int) -> None:
    """Prints what a training run reads and writes. The time it takes is unknown before a run."""
    if not eligible.passages:
        raise no_pairs(rip)
    about = "" if eligible.examined == eligible.total else f"about (from {eligible.examined:,} passages) "
    units = f", with two {rip.unit}s of at least {rip.min_words} words" if rip.has_pairs else ""
    say(f"passages  {about}{eligible.passages:,} eligible of {eligible.total:,}{units}")
    fitted = fit(options, rip, eligible.passages)
    steps = count_steps(options.steps, options.epochs, eligible.passages, fitted.batch)
    texts = 2 * fitted.batch if rip.has_pairs else fitted.batch
    say(f"steps     {steps:,} of {texts:,} texts, on {options.workers} workers")
    if options.train == "prompts":
        size = {1: "its size", 3: "three times its size"}[options.checkpoint_bytes(1)]
        say(f"writes    a prompt, and a checkpoint of {size} every {options.checkpoint_every} steps")
    else:
        size, every = human(options.checkpoint_bytes(weights)), options.checkpoint_every
        say(f"writes    {human(weights)}, and a checkpoint of {size} every {every} steps")


if __name__ == "__main__":
    run(main, PretrainRip)
