"""Estimates of trainings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.store.model_artifacts import resumable_step
from riptide.indexing.store.store import Store
from riptide.jobs.planning.backbone_sizes import FORWARD, FROZEN, TRAINED
from riptide.jobs.planning.estimate import Estimate
from riptide.jobs.planning.indexing_estimates import ENCODER_START_S, MIB
from riptide.jobs.planning.models import Model, TextBatch, encoder_options
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.requests import PROBE, Requests, artifact_requests
from riptide.retriever.options.loop import GRAPH_TOKENS

MASKED = 0.15  # part of the tokens that masked language modelling predicts
TOPICS = 5  # topics whose number is unknown (Topic-DPR, Fig. 4)
FP32 = 4  # bytes of a weight
TRAINING_MEMORY = 685 * MIB  # of a process that trains, without weights and activations
# Texts of many lengths need more memory than their mean: for the longest batch, and as freed blocks fit no later batch.
SPREAD = 1.6
FROZEN_ACTIVATIONS, TRAINED_ACTIVATIONS = 34, 62  # bytes of a token, layer and dimension that a backward pass needs


def estimate_training(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a training of a retriever."""
    values, store = job.values, job.store
    model = _model(job, facts, values["backbone"])
    queries = facts.count_queries(job)
    for text in values["also_train"]:
        keys = dict(pair.partition("=")[::2] for pair in text.split(","))
        more = facts.sizes.count_queries(keys.get("store", store), keys.get("queries"), keys.get("split", "train"))
        queries = None if queries is None or more is None else queries + more
    if model is None or (queries is None and values["steps"] is None):
        return None
    if values["task_size"] is not None and queries is not None:
        queries = min(queries, values["task_size"] * (1 + len(values["also_train"])))
    steps = values["steps"] or math.ceil(values["epochs"] * (queries or 0) / values["batch"])
    negatives = values["negatives_per_query"]
    if negatives is None:
        negatives = 0 if values["negatives"] == "none" else 1
    corpus = facts.sizes.corpus(store)
    query = facts.query_tokens(model, job)
    passage = facts.passage_tokens(model, corpus) if corpus is not None else float(model.limits[1])
    passages = 0 if values["sides"] == "query" else 1 + negatives
    if values["prompt"] == "topics" and values["positives"] == "categories" and values["topic_loss"]:
        passages += values["topic_sample"] or TOPICS
    is_trained = values["train"] == "all"
    done = min(steps, _done_steps(job, facts, "prompts" if values["train"] == "prompts" else "models"))
    rows = (steps - done) * values["batch"]
    device, texts = _device(values, facts), values["batch"] // values["workers"]
    padded_query = facts.query_tokens(model, job, TextBatch(max(1, texts), device))
    padded_passage = passage
    if corpus is not None and passages:
        padded_passage = facts.passage_tokens(model, corpus, TextBatch(max(1, texts * passages), device))
    factor = _factor(values, is_trained)
    if _runs_twice(values["grad_cache"], texts * (padded_query + passages * padded_passage), device):
        factor += FORWARD
    flops = rows * model.flops(padded_query, padded_query, factor)
    flops += rows * model.flops(passages * padded_passage, padded_passage, factor)
    mining = 0.0
    if values["refresh_epochs"] is not None:
        if corpus is None or queries is None:
            return None
        every = math.ceil(values["refresh_epochs"] * queries / values["batch"])
        minings = (steps - 1) // every - (max(1, done) - 1) // every
        mining = minings * (
            model.flops(corpus.rows * passage, passage, FORWARD)
            + model.flops(queries * query, query, FORWARD)
            + 2.0 * queries * corpus.rows * model.dim
        )
    tokens = rows * (query + passages * passage)
    spread = 1 + SPREAD * (1 - passage / model.limits[1])
    return _training_estimate(job, model, "queries", steps - done, tokens, flops, mining, is_trained, spread)


def estimate_pretraining(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a pretraining."""
    values, corpus = job.values, facts.sizes.corpus(job.store)
    model = _model(job, facts, values["backbone"])
    if model is None or (corpus is None and values["steps"] is None):
        return None
    steps = values["steps"] or math.ceil(values["epochs"] * (corpus.rows if corpus else 0) / values["batch"])
    texts = 2 if values["objective"] in ("rip", "cocondenser", "pairs") else 1
    masked = 0.0 if values["objective"] == "pairs" else MASKED * model.backbone.width * model.backbone.words
    is_trained = values["train"] == "backbone"
    length = float(values["max_length"])
    steps = max(0, steps - _done_steps(job, facts, "models" if is_trained else "prompts", values["objective"]))
    tokens = steps * values["batch"] * texts * length
    factor, of_worker = _factor(values, is_trained), values["batch"] * texts * length / values["workers"]
    if texts == 2 and _runs_twice(values["grad_cache"], of_worker, _device(values, facts)):
        factor += FORWARD
    flops = model.backbone.flops(tokens, length, factor, masked)
    return _training_estimate(job, model, "passages", steps, tokens, flops, 0.0, is_trained)


def estimate_reranker_training(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a training of a re-ranker."""
    values, queries = job.values, facts.count_queries(job)
    model = _model(job, facts, values["backbone"])
    if model is None or (queries is None and values["steps"] is None):
        return None
    steps = values["steps"] or math.ceil(values["epochs"] * (queries or 0) / values["batch"])
    steps = max(0, steps - _done_steps(job, facts, "models", "reranker"))
    length = float(values["max_length"])
    tokens = steps * values["batch"] * (1 + values["negatives_per_query"]) * length
    flops = model.backbone.flops(tokens, length, _factor(values, True))
    return _training_estimate(job, model, "queries", steps, tokens, flops, 0.0, True)


def _training_estimate(
    job: PlannedJob,
    model: Model,
    noun: str,
    steps: int,
    tokens: float,
    flops: float,
    mining: float,
    is_trained: bool,
    spread: float = 1.0,
) -> Estimate:
    """Returns the estimate of a training.

    Args:
        job: The job.
        model: The trained model.
        noun: What its examples are.
        steps: Number of pending steps.
        tokens: Tokens of these steps.
        flops: Operations of these steps.
        mining: Operations of minings in between.
        is_trained: Whether the weights of the backbone are trained; otherwise they are frozen.
        spread: How many times the activations of a mean step a process on a CPU holds at its peak.
    """
    values, weights = job.values, model.backbone.parameters
    trained = weights if is_trained else _prompt_weights(values, model)
    copies = 2 if values.get("sides") == "untied" else 1
    written = int(copies * FP32 * trained)
    checkpoints = steps // (values.get("checkpoint_every") or steps or 1)
    # Weights, gradients and two moments of what is trained; frozen weights in bfloat16. Activations of a step:
    # bytes per token, layer and dimension; with checkpointing, only the input of a layer is kept.
    activations = tokens / max(1, steps) / values["workers"] * model.backbone.width * model.backbone.layers
    activations *= 2 if values["checkpointing"] else TRAINED_ACTIVATIONS if is_trained else FROZEN_ACTIVATIONS
    state = copies * (16 * trained + (0 if is_trained else 2 * weights))
    return Estimate(
        noun,
        steps * values["batch"],
        1,
        limit_s=60 * (values["max_minutes"] or math.inf),
        units=values["workers"],
        start_s=ENCODER_START_S + weights / 1e8,
        tokens=tokens,
        training_flops=flops,
        forward_flops=mining,
        devices=values["workers"],
        written_bytes=written,
        requests=PROBE + artifact_requests([written]) + Requests(checkpoints * 2, checkpoints),
        memory_bytes=int(TRAINING_MEMORY + state + min(spread * activations, CHUNK_ACTIVATIONS)),
        gpu_memory_bytes=int(1024 * MIB + state + activations),
        local_bytes=written + int(12 * trained),
        has_exact_bytes=False,
    )


CHUNK_ACTIVATIONS = 4096 * MIB  # activations of the chunk of a batch that a step on a CPU computes at a time


def _prompt_weights(values: Mapping[str, Any], model: Model) -> float:
    """Returns the weights of a deep prompt, or of LoRA adapters."""
    if values["train"] == "lora":
        return 4.0 * model.backbone.layers * model.backbone.width * (values.get("lora_rank") or 8)
    return 2.0 * (values.get("length") or 32) * model.backbone.layers * model.backbone.width


def _model(job: PlannedJob, facts: Facts, backbone: str) -> Model | None:
    """Returns the backbone of a training, and records that the job makes artifacts with it."""
    options = encoder_options(job.values)
    for key in job.makes:
        facts.models.learn(job.store, key.partition("/")[2], backbone, options)
    return facts.models.find(job.store, backbone, options)


def _done_steps(job: PlannedJob, facts: Facts, kind: str, ending: str = "") -> int:
    """Returns the steps that the last checkpoint of a training has; 0 without one.

    Args:
        job: The training.
        facts: What is known of data and models.
        kind: The kind of artifact that it makes.
        ending: What the default name has behind that of the backbone.
    """
    if not facts.models.reads_stores:
        return 0
    values = job.values
    backbone = values["backbone"].rstrip("/").rpartition("/")[2]
    name = values.get("task") or values.get("name") or f"{backbone}-{ending}"
    with contextlib.suppress(InputError, OSError):
        return resumable_step(Store(job.store), kind, name) or 0
    return 0


def _device(values: Mapping[str, Any], facts: Facts) -> str:
    """Returns the kind of device of a training: a GPU if the machine has one, unless its options ask for none."""
    return "cuda" if facts.has_gpus and values["gpus"] != 0 else "cpu"


def _runs_twice(grad_cache: str, tokens: float, device: str) -> bool:
    """Returns whether a worker with some tokens in a step runs its forward passes twice, instead of keeping graphs."""
    return grad_cache == "on" or (grad_cache == "auto" and tokens > GRAPH_TOKENS[device])


def _factor(values: Mapping[str, Any], is_trained: bool) -> int:
    """Returns the operations per weight and token of a training; activation checkpointing repeats the forward pass."""
    return (TRAINED if is_trained else FROZEN) + (FORWARD if values["checkpointing"] else 0)
