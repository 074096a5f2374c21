"""Trains a retriever, or every run of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import remove_command
from riptide.indexing.store.model_artifacts import commit_files, model_folder
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.retriever_data import RetrieverMaker
from riptide.indexing.training.training_sets import TrainingSetSpec
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.work import check_targets, complete_artifact, run_work
from riptide.jobs.common.printing import WARNING, print_complete, print_stages, say
from riptide.jobs.common.session import cluster_reports
from riptide.jobs.common.stage_progress import StageProgress
from riptide.jobs.training.opening import RetrieverSetup, open_retriever_setup
from riptide.jobs.training.serving import serving_warnings
from riptide.jobs.training.sweep import SweepRun, SweepWork, choose_run, read_outcomes
from riptide.jobs.training.sweep_report import chosen_line, draw_sweep, table_lines
from riptide.jobs.training.training_options import TrainRetriever
from riptide.jobs.training.training_runs import QUALITY, describe_best, draw_curves, make_artifact, report_if_complete
from riptide.process.extras import TRAINING, require
from riptide.process.memory import format_bytes
from riptide.retriever.encoding.backbones import empty_backbone, encoder_bytes
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.model_folder import find_model_folder, weight_files
from riptide.retriever.model.recipe import Recipe, read_recipe
from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.topic_term import num_topics_of_loss
from riptide.retriever.objectives.tune_options import offsets_of
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.synthesiser import Synthesiser
from riptide.retriever.systems.dual import PROMPT, TASKS
from riptide.retriever.systems.encoders import trained_recipe
from riptide.retriever.systems.lora import adapter_bytes
from riptide.retriever.topics.model import TopicModel


def train_retriever(store: Store, options: TrainRetriever) -> Artifact | None:
    """Trains a retriever or a sweep. Returns the prompts, the model or the sweep, or None with --plan."""
    require("training", *TRAINING)
    store.require_not_empty()
    if options.sweep:
        return train_sweep(store, options)
    setup = open_retriever_setup(store, options)
    say(*(f"{WARNING}{warning}" for warning in serving_warnings(store, options, setup)))
    if options.plan:
        check_derived_names(store, options, setup)
        if not report_if_complete(options, store, setup.target):
            print_plan(options, setup)
        return None
    artifact = train_one_task(store, options, setup)
    print_summary(options, artifact)
    return artifact


def train_sweep(store: Store, options: TrainRetriever) -> Artifact | None:
    """Trains each combination of the values in --sweep, and chooses one by the dev split. Returns None with --plan."""
    check_name("sweeps", options.task)
    runs = options.sweep_runs()
    if not options.steps_per_evaluation:
        raise InputError(
            f"{Parameter('sweep', ' '.join(options.sweep))}: expected {Parameter('dev_split')} too, which chooses "
            f"a run, and {Parameter('evaluate_every')}"
        )
    cache = ProcessCache()
    setup_by_task = {run.options.task: open_retriever_setup(store, run.options, cache) for run in runs}
    for each in runs:
        check_derived_names(store, each.options, setup_by_task[each.options.task])
    first_setup = setup_by_task[runs[0].options.task]
    configs = [setup_by_task[run.options.task].target.config for run in runs]
    inputs = merge_inputs([(run.suffix, setup_by_task[run.options.task].target.inputs) for run in runs])

    def train_run(each: SweepRun) -> Artifact:
        artifact = train_one_task(store, each.options, setup_by_task[each.options.task])
        draw_curves(each.options, artifact)
        return artifact

    work = SweepWork(options.task, runs, inputs, configs, train_run)
    if options.plan:
        if (artifact := complete_artifact(store, work)) is not None:
            print_complete(artifact.url, options.curves)
            return None
        check_targets(store, work)
        print_stages(work)
        for run in runs:
            say(f"run      {run.options.kind}/{run.options.task}")
        say("the first run:")
        print_plan(runs[0].options, first_setup)
        return None
    [artifact] = run_work(store, work, LocalRunner(), StageProgress)
    outcomes = read_outcomes(artifact)
    choice = choose_run(outcomes)
    say(*table_lines(outcomes, QUALITY))
    say(f"{artifact.url}: {chosen_line(choice, QUALITY)}")
    if options.curves:
        say(str(draw_sweep(outcomes, choice, Path(options.curves), artifact.key, QUALITY)))
    return artifact


def merge_inputs(
    runs: Sequence[tuple[str, Mapping[str, Artifact | ArtifactReference]]],
) -> dict[str, Artifact | ArtifactReference]:
    """Returns the inputs of all runs of a sweep by role; by RUN/ROLE if the artifacts in a role differ between runs.

    Args:
        runs: The name and the inputs of each run.
    """
    artifacts: dict[str, set[str]] = {}
    for _, inputs in runs:
        for role, artifact in inputs.items():
            artifacts.setdefault(role, set()).add(artifact.fingerprint)
    return {
        role if len(artifacts[role]) == 1 else f"{name}/{role}": artifact
        for name, inputs in runs
        for role, artifact in inputs.items()
    }


def derived_prompt_names(options: TrainRetriever, setup: RetrieverSetup) -> list[str]:
    """Returns the names of further prompts that a run makes from prompts/TASK or models/TASK."""
    tuning = setup.maker.tuning
    if tuning.parametrisation == "per-task":
        return [f"{options.task}-{task}" for task in sorted({name.task or name.queries for name in setup.maker.sets})]
    return [f"{options.task}-prompt"] if tuning.trains_prompt_with_weights else []


def check_derived_names(store: Store, options: TrainRetriever, setup: RetrieverSetup) -> None:
    """Raises InputError before any training if another prompt has a name of `derived_prompt_names`."""
    if options.task in store.names(options.kind):
        return  # the task is complete, so these prompts may be its own
    for name in sorted({*derived_prompt_names(options, setup)} & {*store.names("prompts")}):
        raise InputError(
            f"{Parameter('task', options.task)}: {store.url}/prompts/{name} exists, and training makes a prompt of "
            f"this name: give another {Parameter('task')}, or, if nobody needs it, remove it: "
            f"{remove_command(store.storage, f'prompts/{name}')}"
        )


def train_one_task(store: Store, options: TrainRetriever, setup: RetrieverSetup) -> Artifact:
    """Trains a task unless it is complete, and returns its artifact."""
    check_derived_names(store, options, setup)
    notes: dict[str, Any] = {
        "backbone": options.backbone,
        "options": setup.spec.options.to_dict(),
        "queries": setup.num_queries,
    }
    if setup.topic_agreement is not None:
        notes["topic_agreement"] = setup.topic_agreement

    def prepare(on_ray: bool) -> tuple[RetrieverMaker, LoopOptions, dict[str, Any]]:
        maker = setup.maker
        if setup.dev_hits is not None:
            runner = RayTasks(options.worker_request(), cluster_reports(), store) if on_ray else LocalRunner()
            maker = replace(maker, dev_hits=tuple(hits.search(runner) for hits in setup.dev_hits))
        if on_ray:  # workers open the data in their own processes, so this process frees its memory
            setup.maker.cache.clear()
        return maker, setup.loop, notes

    artifact = make_artifact(
        options,
        store,
        setup.target,
        prepare=prepare,
        max_length=max_text_length(setup),
    )
    tuning = setup.maker.tuning
    if tuning.parametrisation == "per-task":
        commit_task_prompts(store, artifact)
    elif tuning.trains_prompt_with_weights:
        commit_trained_prompt(store, artifact, setup.spec.options)
    return artifact


def max_text_length(setup: RetrieverSetup) -> int | None:
    """Returns the largest length limit of the texts after a prompt that the backbone allows; None: unlimited."""
    tuning = setup.maker.tuning
    positions = trained_recipe(find_model_folder(setup.spec.folder), setup.spec.options, tuning).max_positions
    return None if positions is None else positions - max(offsets_of(tuning).values(), default=0)


def commit_trained_prompt(store: Store, artifact: Artifact, options: EncoderOptions) -> Artifact:
    """Returns prompts/TASK-prompt, the prompt that was trained together with models/TASK; makes it if it is missing."""
    name = f"{artifact.key.partition('/')[2]}-prompt"
    config = {"backbone": EncoderSpec(store, artifact.key, options).settings("query"), "with": artifact.key}
    inputs: dict[str, Artifact | ArtifactReference] = {"model": artifact}
    if (topics := artifact.inputs.get("topics")) is not None:
        inputs["topics"] = ArtifactReference(topics["artifact"], topics["fingerprint"])
    with store.create("prompts", name, inputs=inputs, config=config) as draft:
        if not draft.is_complete:
            draft.add_notes(backbone=artifact.key, options=artifact.notes["options"])
            commit_files(draft, model_folder(artifact) / PROMPT)
    return store.open("prompts", name)


def commit_task_prompts(store: Store, artifact: Artifact) -> list[Artifact]:
    """Returns prompts/TASK-NAME for each task NAME of prompts/TASK; makes those that are missing."""
    result = []
    for folder in sorted((model_folder(artifact) / TASKS).iterdir()):
        name = f"{artifact.key.partition('/')[2]}-{folder.name}"
        config = {"backbone": artifact.config["backbone"], "task": folder.name}
        with store.create("prompts", name, inputs={"tasks": artifact}, config=config) as draft:
            if not draft.is_complete:
                draft.add_notes(backbone=artifact.notes["backbone"], options=artifact.notes["options"])
                commit_files(draft, folder)
        result.append(store.open("prompts", name))
    return result


def print_summary(options: TrainRetriever, artifact: Artifact) -> None:
    """Prints a summary of the trained artifact, and draws its training curves if --curves is set."""
    notes = artifact.notes
    size = sum(part.bytes for part in artifact.parts)
    learned = f", temperature {notes['temperature']:.4f}" if "temperature" in notes else ""
    say(
        f"{artifact.url}: {format_bytes(size)}, {notes['steps']:,} steps over {notes['queries']:,} queries, last loss "
        f"{notes['loss']:.4f}{learned}{describe_best(notes)}, {notes['numerics']}"
    )
    if "topic_agreement" in notes:
        say(f"the text of {notes['topic_agreement']:.0%} of the queries has the topic of their passage")
    if options.prompt == "per-task":
        say(f"{artifact.url}-NAME: the prompt of the task NAME; {artifact.url} is their mean")
    if options.trains_prompt_with_weights:
        prompts = {
            "synthesised": "the prompts of queries, over the encoder of queries of",
            "topics": "the prompts of topics, over",
            "matrix": "the prompt of all texts, over",
        }
        say(f"prompts/{options.task}-prompt: {prompts[options.prompt_kind]} {artifact.url}")
    draw_curves(options, artifact)


def print_plan(options: TrainRetriever, setup: RetrieverSetup) -> None:
    """Prints the plan of a training run: what it reads and writes."""
    weights = sum(file.stat().st_size for file in weight_files(find_model_folder(setup.spec.folder)))
    loop, passages = setup.loop, options.rows_per_step * (1 + setup.maker.tuning.negatives_per_query)
    encoder, topics = setup.spec.options, setup.maker.tuning.topics
    size, written = trained_bytes(options, setup)
    sets = setup.maker.sets
    say(f"queries   {setup.num_queries:,} of {'; '.join(describe_set(spec, several=len(sets) > 1) for spec in sets)}")
    under_topics = 0
    if topics is not None and setup.topics is not None:
        num_topics = setup.topics.model.num_topics
        topic_of = "its text" if topics.queries == "own" else "its passage"
        say(
            f"topics    {num_topics} of topics/{setup.topics.name}; a query has that of {topic_of}; the text of "
            f"{setup.topic_agreement:.0%} of the queries has the topic of their passage"
        )
        if under_topics := num_topics_of_loss(setup.maker.tuning, num_topics) * passages:
            say(f"          their loss encodes up to {under_topics:,} passages more in each step")
    if (categories := setup.maker.tuning.term_options(CategoryOptions)) is not None:
        say(f"positives passages of the batch with a common category in the metadata field {categories.field!r}")
    say(
        f"steps     {options.describe_steps(loop.steps)} of {options.rows_per_step} queries and up to {passages:,} "
        f"passages, on {options.workers} workers"
    )
    if setup.maker.embeddings is not None:
        names = " and ".join(f"embeddings/{name}" for name in dict.fromkeys(setup.maker.embeddings))
        say(f"passages  are not encoded: their vectors are those of {names}")
        passages = 0
    if options.dev_split is not None:
        say(options.describe_dev(setup.num_dev_queries))
    if encoder.query_length and (encoder.passage_length or not passages):
        encoded = passages + under_topics
        tokens = loop.steps * (options.rows_per_step * encoder.query_length + encoded * (encoder.passage_length or 0))
        say(f"tokens    at most {tokens:,}, forward and backward")
    say(f"trains    {format_bytes(size)}, over a backbone of {format_bytes(weights)}")
    checkpoint_size = format_bytes(options.checkpoint_bytes(size))
    say(
        f"writes    {format_bytes(written)}, and a checkpoint of {checkpoint_size} every "
        f"{options.loop.checkpoint_every} steps"
    )


def trained_bytes(options: TrainRetriever, setup: RetrieverSetup) -> tuple[int, int]:
    """Returns the size in bytes of the trained and of the written weights, in float32. Loads no weights."""
    tuning = setup.maker.tuning
    recipe = trained_recipe(find_model_folder(setup.spec.folder), setup.spec.options, tuning)
    synthesis, topics = tuning.synthesis, tuning.topics
    of_topics = (0, 0)
    if topics is not None and setup.topics is not None:
        of_topics = topic_bytes(recipe, setup, setup.topics.model, topics.hidden)
    has_matrix = options.train == "prompts" or tuning.joint_prompt
    of_matrix = tuning.length * prompt_bytes(setup.spec.folder) if has_matrix else 0
    of_synthesis = (0, 0) if synthesis is None else synthesiser_weight_bytes(recipe, setup.spec.folder, synthesis)
    if options.train == "prompts" and synthesis is not None:
        size, written = of_synthesis
        if tuning.parametrisation == "per-task":
            written = (synthesis.prompts + 1) * synthesis.length * prompt_bytes(setup.spec.folder)
    elif options.train == "prompts" and topics is not None:
        size, written = of_topics
    elif options.train == "prompts":
        written = size = of_matrix
    else:
        written = size = encoder_bytes(recipe)
    if (lora := tuning.lora) is not None:
        size = adapter_bytes(recipe, lora)
        written += size
    copies = 2 if options.weights.sides == "untied" else 1
    size, written = copies * size, copies * written
    if options.train == "all":
        size += of_synthesis[0] + of_topics[0] + of_matrix
        written += of_synthesis[1] + of_topics[1] + of_matrix
    return size, written


def describe_set(spec: TrainingSetSpec, *, several: bool) -> str:
    """Returns a description of a training set; with several sets, it names the query set."""
    negatives = "without negatives" if spec.negatives is None else f"with negatives in negatives/{spec.negatives}"
    weight = "" if spec.weight == 1 else f", weight {spec.weight:g}"
    split = f"{spec.split} in queries/{spec.queries}" if several else spec.split
    store = f" of {spec.store}" if spec.store else ""
    return f"{split}{store}, {negatives}{weight}"


def prompt_bytes(folder: Path | str) -> int:
    """Returns the size in bytes of one token of a deep prompt: float32 keys and values for each layer and head."""
    config = load_config(read_recipe(find_model_folder(folder), EncoderOptions()).backbone)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return 4 * 2 * config.num_hidden_layers * heads * int(head_dim or config.hidden_size // config.num_attention_heads)


def synthesiser_weight_bytes(recipe: Recipe, folder: Path | str, options: SynthesisOptions) -> tuple[int, int]:
    """Returns the size in bytes of the trained weights and of all weights of a prompt network, in float32.

    Loads no weights. The layers that compute weights of basic prompts are not trained if all weights are the same.
    """
    with torch.device("meta"):
        width = empty_backbone(recipe).get_input_embeddings().weight.shape[1]
        # the meta device needs only the size, so one layer and one head stand for those of the backbone
        shape = PromptShape(layers=1, heads=1, head_dim=prompt_bytes(folder) // 8)
        module = Synthesiser(shape, width, options)
    numbers = {name: parameter.numel() for name, parameter in module.named_parameters()}
    frozen_prefixes = ("adapter.", "norm.") if options.attention == "uniform" else ()
    size = sum(number for name, number in numbers.items() if not name.startswith(frozen_prefixes))
    return 4 * size, 4 * sum(numbers.values())


def topic_bytes(recipe: Recipe, setup: RetrieverSetup, model: TopicModel, hidden: int) -> tuple[int, int]:
    """Returns the size in bytes of a topic prompt network, and of the written prompts and topic model, in float32.

    Loads no weights.
    """
    with torch.device("meta"):
        width = empty_backbone(recipe).get_input_embeddings().weight.shape[1]
    per_token = prompt_bytes(setup.spec.folder)
    arrays = sum(array.nbytes for array in model.arrays_by_name().values())
    written = model.num_topics * setup.maker.tuning.length * per_token + arrays
    return 4 * 2 * width * hidden + width * per_token, written
