"""Pretrains a backbone, or a prompt over a frozen backbone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import resolve_model, stored_model
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.training.dev_splits import DevHits, DevSplit, open_dev_pairs
from riptide.indexing.training.pretraining_data import (
    EligibleCount,
    RipMaker,
    count_eligible,
    no_pairs_error,
    training_rows,
)
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.work import ArtifactTarget
from riptide.jobs.common.printing import note_for_estimate, say
from riptide.jobs.common.session import cluster_reports
from riptide.jobs.training.training_options import PretrainRip
from riptide.jobs.training.training_runs import (
    describe_best,
    dev_split_of,
    draw_curves,
    make_artifact,
    report_if_complete,
)
from riptide.process.extras import TRAINING, require
from riptide.process.memory import format_bytes
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.model_folder import describe_backbone, find_model_folder, weight_files
from riptide.retriever.model.recipe import max_positions_of
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.pretraining import RipOptions
from riptide.retriever.systems.condenser import describe_head
from riptide.retriever.systems.cross import open_pair_tokenizer
from riptide.retriever.systems.rip import encoder_options, limit_batch


@dataclass(frozen=True)
class PretrainingSetup:
    """The artifacts and settings of a pretraining run, opened and checked.

    Attributes:
        corpus: The passages.
        folder: The folder of the backbone.
        backbone_settings: The settings of the backbone.
        rip: The options of the objective.
        loop: The options of the loop. Its number of steps is that of all passages; `find_eligible` counts it again.
        head: The files of the head in the backbone's folder; None if training has or finds none.
        dev: The dev split; None: quality is not measured.
        num_dev_queries: The number of its queries.
        dev_hits: The hits of BM25 in its pool; None: there are none.
        cache: The data that this process has opened.
        target: The prompts or the model to make.
    """

    corpus: Corpus
    folder: Path
    backbone_settings: dict[str, Any]
    rip: RipOptions
    loop: LoopOptions
    head: dict[str, str] | None
    dev: DevSplit | None
    num_dev_queries: int
    dev_hits: DevHits | None
    cache: ProcessCache
    target: ArtifactTarget


def pretrain(store: Store, options: PretrainRip) -> Artifact | None:
    """Pretrains a backbone or a prompt. Returns the artifact, or None with --plan."""
    require("training", *TRAINING)
    store.require_not_empty()
    setup = open_pretraining_setup(store, options)
    corpus = setup.corpus
    if options.plan:
        if not report_if_complete(options, store, setup.target):
            weights = sum(file.stat().st_size for file in weight_files(setup.folder))
            print_plan(options, setup.rip, count_eligible(corpus, setup.rip, options.limit, LocalRunner()), weights)
            if setup.dev is not None:
                say(options.describe_dev(setup.num_dev_queries))
            print_head(options, setup.head)
        return None
    artifact = make_artifact(
        options,
        store,
        setup.target,
        prepare=partial(find_eligible, store, options, setup),
        max_length=max_positions_of(load_config(setup.folder)),
    )
    notes = artifact.notes
    say(
        f"{artifact.url}: {notes['steps']:,} steps of {notes['batch']:,} passages over {notes['passages']:,} eligible "
        f"of {num_passages(options, corpus):,} passages, last loss {notes['loss']:.4f}{describe_best(notes)}, "
        f"{notes['numerics']}"
    )
    draw_curves(options, artifact)
    return artifact


def num_passages(options: PretrainRip, corpus: Corpus) -> int:
    """Returns the number of passages that are searched for eligible ones."""
    return min(corpus.num_rows, options.limit or corpus.num_rows)


def open_pretraining_setup(store: Store, options: PretrainRip) -> PretrainingSetup:
    """Opens and checks the artifacts that the options name for a pretraining run.

    Raises:
        InputError: If an artifact is missing, or cannot be used for training.
    """
    corpus = Corpus.open(store)
    folder = find_model_folder(resolve_model(store, options.backbone))
    backbone_settings = describe_backbone(folder)
    open_pair_tokenizer(folder, options.pretraining.max_length)
    # The number of eligible passages is unknown here, so `find_eligible` computes the number of steps again.
    steps = options.count_steps(num_passages(options, corpus), options.pretraining.batch)
    loop = options.loop_options(steps, lr=1e-4)
    chosen = {name: value for name, value in vars(options.pretraining).items() if value is not None}
    defaults = {"unit": options.pretraining.default_unit, "mask": options.pretraining.default_mask}
    rip = RipOptions(**{**defaults, **chosen}, steps=steps, lr=loop.lr, seed=loop.seed)
    head = describe_head(folder) if rip.trains_condenser_head else None
    kind = "prompts" if rip.train == "prompts" else "models"
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-{options.pretraining.objective}"
    check_name(kind, name)
    config = artifact_config(options, backbone_settings, rip, loop, head)
    inputs: dict[str, Artifact | ArtifactReference] = {"corpus": corpus.generations[-1]}
    if options.queries is not None and options.dev_split is None:
        raise InputError(
            f"{Parameter('queries', options.queries)}: expected {Parameter('dev_split')} too; only the measurement "
            f"uses queries"
        )
    dev, num_dev_queries, dev_hits, cache = None, 0, None, ProcessCache()
    if options.dev_split is not None:
        queries = Queries.open(store, options.queries)
        dev = dev_split_of(options, queries)
        pairs = open_dev_pairs(corpus, queries, options.dev_split, options.dev_limit, cache)
        inputs["queries"], config["dev"] = queries.artifact, options.dev_config()
        num_dev_queries = len(pairs.ids)
        if depth := options.dev_passages.hits_per_query:
            dev_hits = DevHits.open(store, corpus, pairs, depth)
            inputs |= dev_hits.inputs()
    if backbone := stored_model(store, options.backbone):
        inputs["backbone"] = backbone
    models = dict.fromkeys(("backbone", "head"), ("backbone", options.backbone))
    target = ArtifactTarget(kind, name, inputs, config, models=models)
    return PretrainingSetup(
        corpus, folder, backbone_settings, rip, loop, head, dev, num_dev_queries, dev_hits, cache, target
    )


def artifact_config(
    options: PretrainRip,
    backbone_settings: dict[str, Any],
    rip: RipOptions,
    loop: LoopOptions,
    head: dict[str, str] | None,
) -> dict[str, Any]:
    """Returns the configuration of the artifact, without its dev split."""
    # An option that older artifacts lack: their fingerprints stay the same.
    unset = "temperature" if rip.temperature is None else None
    config = {
        "backbone": backbone_settings,
        "rip": {key: value for key, value in asdict(rip).items() if key not in ("steps", unset)},
        "loop": {key: value for key, value in loop.fingerprint_options().items() if key != "steps"},
        "epochs": None if options.steps is not None else options.epochs,
        "steps": options.steps,
        "limit": options.limit,
        "cpus": options.worker_cpus,
        "dtype": options.dtype,
    }
    if rip.trains_condenser_head:
        config["head"] = head
    return config


def find_eligible(
    store: Store, options: PretrainRip, setup: PretrainingSetup, on_ray: bool
) -> tuple[RipMaker, LoopOptions, dict[str, Any]]:
    """Finds the eligible passages, whose number determines the number of steps.

    Args:
        store: The store.
        options: The options of the job.
        setup: The artifacts of the run.
        on_ray: Whether Ray's workers read the passages.

    Returns:
        The maker of the system, the options of the loop, and notes for the artifact.
    """
    rip, head = setup.rip, setup.head
    runner = RayTasks(options.worker_request(), cluster_reports(), store) if on_ray else LocalRunner()
    rows = training_rows(setup.corpus, rip, options.limit, runner)
    fitted = limit_batch_to_corpus(options, rip, len(rows))
    print_head(options, head)
    maker = RipMaker(
        store=store,
        backbone=options.backbone,
        backbone_settings=setup.backbone_settings,
        rows=put_in_ray(rows) if on_ray else rows,
        options=fitted,
        checkpointing=options.checkpointing,
        head=head,
        dev=setup.dev,
        dev_hits=None if setup.dev_hits is None else setup.dev_hits.search(runner),
        cache=ProcessCache() if on_ray else setup.cache,  # workers open the data in their own processes
    )
    encoder = (
        encoder_options(rip)
        if setup.target.kind == "prompts"
        else EncoderOptions(pooling=rip.pooling, normalize=not rip.has_masks)
    )
    facts = {
        "backbone": options.backbone,
        "passages": len(rows),
        "batch": fitted.batch,
        "options": encoder.to_dict(),
    }
    if rip.trains_condenser_head:
        facts["head"] = "new" if head is None else "the backbone's"
    return maker, replace(setup.loop, steps=options.count_steps(len(rows), fitted.batch)), facts


def put_in_ray(rows: np.ndarray) -> Any:
    """Puts an array into Ray's object store and returns its reference."""
    import ray

    return ray.put(rows)


def limit_batch_to_corpus(options: PretrainRip, rip: RipOptions, num_eligible: int) -> RipOptions:
    """Reduces the batch to the number of eligible passages if necessary, and prints that.

    Raises:
        InputError: If a worker would have no passage.
    """
    fitted = limit_batch(rip, num_eligible)
    if fitted.batch < options.workers:
        raise InputError(
            f"{Parameter('workers', options.workers)}: only {num_eligible} passages are eligible, and each worker "
            f"needs one"
        )
    if fitted.batch < rip.batch:
        say(f"batch     {fitted.batch:,} passages instead of {rip.batch:,}: no more are eligible")
    return fitted


def print_head(options: PretrainRip, head: dict[str, str] | None) -> None:
    """Prints a line if the second stage of coCondenser starts without the head of the first stage."""
    if options.pretraining.objective == "cocondenser" and head is None:
        say(
            f"head      new: {options.backbone} has none; {Parameter('objective', 'condenser')} trains a backbone "
            f"with its head first"
        )


def print_plan(options: PretrainRip, rip: RipOptions, eligible: EligibleCount, weights: int) -> None:
    """Prints the plan of a pretraining run: what it reads and writes."""
    if not eligible.num_eligible:
        raise no_pairs_error(rip)
    is_exact = eligible.num_examined == eligible.num_passages
    about = "" if is_exact else f"about (from {eligible.num_examined:,} passages) "
    units = f", with two {rip.unit}s of at least {rip.min_words} words" if rip.has_pairs else ""
    say(f"passages  {about}{eligible.num_eligible:,} eligible of {eligible.num_passages:,}{units}")
    fitted = limit_batch_to_corpus(options, rip, eligible.num_eligible)
    steps = options.count_steps(eligible.num_eligible, fitted.batch)
    note_for_estimate(steps=steps, batch=fitted.batch)
    texts = 2 * fitted.batch if rip.has_pairs else fitted.batch
    say(f"steps     {options.describe_steps(steps)} of {texts:,} texts, on {options.workers} workers")
    if rip.train == "prompts":
        size = {1: "its size", 3: "three times its size"}[options.checkpoint_bytes(1)]
        say(f"writes    a prompt, and a checkpoint of {size} every {options.loop.checkpoint_every} steps")
    else:
        size, every = format_bytes(options.checkpoint_bytes(weights)), options.loop.checkpoint_every
        say(f"writes    {format_bytes(weights)}, and a checkpoint of {size} every {every} steps")
