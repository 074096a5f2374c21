"""Estimates of trainings, searches and mining."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from riptide.jobs.planning.backbone_sizes import FORWARD, FROZEN, TRAINED
from riptide.jobs.planning.estimate import Estimate
from riptide.jobs.planning.indexing_estimates import ENCODER_MEMORY, ENCODER_START_S, MIB, PROBED_SHARE
from riptide.jobs.planning.models import Model, encoder_options
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.requests import PROBE, Requests, artifact_requests

TEST = "test"  # the split of a search that names none
MASKED = 0.15  # part of the tokens that masked language modelling predicts
TOPICS = 5  # topics whose number is unknown (Topic-DPR, Fig. 4)
PAIR_TOKENS = 160  # tokens of a query and a passage
PART_QUERIES = 512  # queries of a part of mined candidates
HIT_BYTES, NEGATIVE_BYTES = 7.5, 4.5  # of a hit in a file of candidates, and of a negative
BM25_MEMORY = 450 * MIB  # of a process that searches texts, besides that of its libraries
BM25_S = 4e-3  # seconds of a core for a query of BM25 over a million passages
FP32 = 4  # bytes of a weight
TRAINING_MEMORY = 685 * MIB  # of a process that trains, without weights and activations
FROZEN_ACTIVATIONS, TRAINED_ACTIVATIONS = 34, 62  # bytes of a token, layer and dimension that a backward pass needs
QUERY_S = 2e-3  # seconds of a core to pool the hits of a query


def estimate_training(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a training of a retriever."""
    values, store = job.values, job.store
    model = _model(job, facts, values["backbone"])
    queries = _count_queries(job, facts)
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
    rows = steps * values["batch"]
    flops = rows * model.flops(query, query, _factor(values, is_trained))
    flops += rows * model.flops(passages * passage, passage, _factor(values, is_trained))
    mining = 0.0
    if values["refresh_epochs"] is not None:
        if corpus is None or queries is None:
            return None
        minings = (steps - 1) // math.ceil(values["refresh_epochs"] * queries / values["batch"])
        mining = minings * (
            model.flops(corpus.rows * passage, passage, FORWARD)
            + model.flops(queries * query, query, FORWARD)
            + 2.0 * queries * corpus.rows * model.dim
        )
    return _training_estimate(
        job, model, "queries", steps, values["batch"], rows * (query + passages * passage), flops, mining, is_trained
    )


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
    tokens = steps * values["batch"] * texts * length
    flops = model.backbone.flops(tokens, length, _factor(values, is_trained), masked)
    return _training_estimate(job, model, "passages", steps, values["batch"], tokens, flops, 0.0, is_trained)


def estimate_reranker_training(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a training of a re-ranker."""
    values, queries = job.values, _count_queries(job, facts)
    model = _model(job, facts, values["backbone"])
    if model is None or (queries is None and values["steps"] is None):
        return None
    steps = values["steps"] or math.ceil(values["epochs"] * (queries or 0) / values["batch"])
    length = float(values["max_length"])
    tokens = steps * values["batch"] * (1 + values["negatives_per_query"]) * length
    flops = model.backbone.flops(tokens, length, _factor(values, True))
    return _training_estimate(job, model, "queries", steps, values["batch"], tokens, flops, 0.0, True)


def estimate_search(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a search of the queries of a split."""
    queries = None if job.values["query"] else _count_queries(job, facts)
    source = job.values["source"] or {"bm25": "bm25:bm25"}.get(job.values["mode"] or "", "")
    if queries is None:
        return None
    estimates = [_search(job, facts, term, queries) for term in source.replace(" ", "").split("+")]
    return _searches_estimate(queries, estimates, HIT_BYTES * (job.values["k"] or 100))


def estimate_mining(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the searches of a mining, and the scores that denoising needs at least."""
    values, queries = job.values, _count_queries(job, facts)
    if queries is None:
        return None
    searches = [_search(job, facts, source, queries) for source in values["sources"]]
    pool = values["depth"] * len(values["sources"])
    pairs = 0
    if values["reranker"] is not None:
        model = facts.models.find(job.store, values["reranker"])
        if model is None:
            return None
        pairs = queries * (
            pool if values["score_all"] or values["teacher_scores"] else min(values["denoised_negatives"], pool)
        )
        tokens = float(pairs * PAIR_TOKENS)
        scoring = model.backbone.flops(tokens, PAIR_TOKENS)
        searches.append(Search(scoring, 0.0, tokens, memory=int(6 * model.backbone.parameters)))
    num_negatives = values["pool_negatives"] + (values["denoised_negatives"] if values["reranker"] else 0)
    return _searches_estimate(queries, searches, HIT_BYTES * pool, NEGATIVE_BYTES * num_negatives)


class Search(NamedTuple):
    """What the search of a source takes: operations of backbones and of comparisons, tokens, core seconds, bytes."""

    forward: float = 0.0
    compared: float = 0.0
    tokens: float = 0.0
    core_s: float = 0.0
    memory: int = 0


def _search(job: PlannedJob, facts: Facts, source: str, queries: int) -> Search:
    """Returns what a source takes; zeros if its encoder is unknown."""
    kind, _, name = source.rpartition("*")[2].partition(":")
    corpus = facts.sizes.corpus(job.store)
    rows = 0 if corpus is None else corpus.rows
    if kind == "bm25":
        return Search(core_s=queries * BM25_S * rows / 1e6, memory=BM25_MEMORY)
    model = facts.models.find(job.store, name)
    if model is None:
        return Search()
    tokens = facts.query_tokens(model, job) * queries
    compared = 2.0 * queries * rows * model.dim * (1.0 if kind == "exact" else PROBED_SHARE)
    memory = int(6 * model.backbone.parameters) + rows * model.dim * 2
    return Search(model.flops(tokens, facts.query_tokens(model, job), FORWARD), compared, tokens, memory=memory)


def _searches_estimate(queries: int, searches: Sequence[Search], *bytes_per_query: float) -> Estimate:
    """Returns the estimate of searches whose results are in one artifact per figure of bytes for a query."""
    parts = -(-queries // PART_QUERIES)
    sizes = [int(queries * size) for size in bytes_per_query]
    tokens = sum(each.tokens for each in searches)
    requests = [artifact_requests([size // max(1, parts)] * parts) for size in sizes]
    return Estimate(
        "queries",
        queries,
        parts * len(sizes),
        units=parts,
        start_s=ENCODER_START_S if tokens else 2.0,
        tokens=tokens,
        tokenised=tokens,
        forward_flops=sum(each.forward for each in searches),
        exact_flops=sum(each.compared for each in searches),
        core_s=QUERY_S * queries + sum(each.core_s for each in searches),
        written_bytes=sum(sizes),
        requests=sum(requests, PROBE),
        memory_bytes=ENCODER_MEMORY + sum(each.memory for each in searches),
        is_sized=False,
    )


def _training_estimate(
    job: PlannedJob,
    model: Model,
    noun: str,
    steps: int,
    batch: int,
    tokens: float,
    flops: float,
    mining: float,
    is_trained: bool,
) -> Estimate:
    """Returns the estimate of a training.

    Args:
        job: The job.
        model: The trained model.
        noun: What its examples are.
        steps: Number of steps.
        batch: Examples of a step.
        tokens: Tokens of all steps.
        flops: Operations of all steps.
        mining: Operations of minings in between.
        is_trained: Whether the weights of the backbone are trained; otherwise they are frozen.
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
        steps * batch,
        1,
        units=values["workers"],
        start_s=ENCODER_START_S + weights / 1e8,
        tokens=tokens,
        training_flops=flops,
        forward_flops=mining,
        devices=values["workers"],
        written_bytes=written,
        requests=PROBE + artifact_requests([written]) + Requests(checkpoints * 2, checkpoints),
        memory_bytes=int(TRAINING_MEMORY + state + min(activations, CHUNK_ACTIVATIONS)),
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


def _count_queries(job: PlannedJob, facts: Facts) -> int | None:
    """Returns the number of queries of a job, at most its limit; None if it is unknown."""
    queries = facts.sizes.count_queries(job.store, job.values["queries"], job.values["split"] or TEST)
    limit = job.values["limit"]
    return queries if queries is None or limit is None else min(queries, limit)


def _factor(values: Mapping[str, Any], is_trained: bool) -> int:
    """Returns the operations per weight and token of a training; activation checkpointing repeats the forward pass."""
    return (TRAINED if is_trained else FROZEN) + (FORWARD if values["checkpointing"] else 0)
