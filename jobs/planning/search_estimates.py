"""Estimates of searches, mining, evaluations and servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from riptide.indexing.search.retrieval import RERANK_DEPTH, RUN_HITS
from riptide.indexing.store.keys import without_generation
from riptide.jobs.planning.backbone_sizes import FORWARD
from riptide.jobs.planning.estimate import NOTHING, Estimate
from riptide.jobs.planning.indexing_estimates import (
    BM25_SHARE,
    ENCODER_MEMORY,
    ENCODER_START_S,
    MIB,
    index_bytes,
)
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.requests import PROBE, READS_PER_ARTIFACT, READS_PER_FETCH, Requests, artifact_requests
from riptide.jobs.planning.sizes import CorpusSize

PROBED_SHARE = 1 / 64  # of the lists of an index, at the search effort that a build chooses
PAIR_TOKENS = 160  # tokens of a query and a passage
PART_QUERIES = 512  # queries of a part of mined candidates
HIT_BYTES, NEGATIVE_BYTES = 7.5, 4.5  # of a hit in a file of candidates, and of a negative
BM25_MEMORY, SEARCH_MEMORY = 450 * MIB, 60 * MIB  # of a search of texts; of a process that searches without a model
BM25_S = 4e-3  # seconds of a core for a query of BM25 over a million passages
QUERY_S = 2e-3  # seconds of a core to pool the hits of a query
EVALUATED_HITS = 100  # hits per query that the default metrics need
MEASURE_START_S = 1.5  # seconds until runs are measured
MEASURE_S = 3e-4  # seconds of a core to read and measure the hits of a query of a run
MEASURE_MEMORY, MEASURED_HIT_BYTES = 200 * MIB, 310  # of a process that measures runs, and of a hit of the largest one
MEASURED_BYTES = 15  # of a value of a query in the file of results
RATE_ROUNDS = 4  # rounds in which the rate of a source is measured, with the one that is not counted
SERVER_MEMORY = 200 * MIB  # of a server, without its models and data, and without the libraries of models
JAVA_MEMORY = 220 * MIB  # of a heap of Java that searches texts: docs/measurements/serving.md
SERVER_START_S = 5.0  # seconds until a server opens its release, with the batches that warm it up
PREPARED_ROWS, PREPARED_BYTES = (
    200_000,
    3,
)  # vectors without an index that a server holds in another form; bytes of a value
WITHOUT = "none"  # the value of options of a server for a release without dense vectors, or without a re-ranker


class Search(NamedTuple):
    """What a search takes: operations of backbones and of comparisons, tokens, core seconds, bytes."""

    forward: float = 0.0
    compared: float = 0.0
    tokens: float = 0.0
    core_s: float = 0.0
    memory: int = 0


def estimate_search(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a search of the queries of a split; those of the command line are answered at once."""
    values = job.values
    if values["query"]:
        return NOTHING
    queries = facts.count_queries(job)
    source = values["source"] or _source_of_mode(job, facts)
    if queries is None or source is None:
        return None
    searches = _searches(job, facts, [source], queries)
    if values["rerank"] is not None:
        pairs = queries * min(values["rerank_depth"] or RERANK_DEPTH, values["k"] or RUN_HITS)
        searches.append(_reranking(job, facts, values["rerank"], pairs))
    return _searches_estimate(queries, searches, HIT_BYTES * (values["k"] or RUN_HITS))


def estimate_mining(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the searches of a mining, and the scores that denoising needs at least."""
    values, queries = job.values, facts.count_queries(job)
    if queries is None:
        return None
    searches = _searches(job, facts, values["sources"], queries)
    pool = values["depth"] * len(values["sources"])
    if values["reranker"] is not None:
        every = values["score_all"] or values["teacher_scores"]
        pairs = queries * (pool if every else min(values["denoised_negatives"], pool))
        searches.append(_reranking(job, facts, values["reranker"], pairs))
    num_negatives = values["pool_negatives"] + (values["denoised_negatives"] if values["reranker"] else 0)
    return _searches_estimate(queries, searches, HIT_BYTES * pool, NEGATIVE_BYTES * num_negatives)


def estimate_evaluation(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the searches of an evaluation whose runs are missing, and the measurement of all runs.

    Args:
        job: The job. `pending` among its values has the sources whose runs are missing; without it, all are.
        facts: What is known of data and models.
    """
    values, queries = job.values, facts.count_queries(job)
    if queries is None:
        return None
    pending = values.get("pending", values["source"])
    searches: list[Search | None] = _searches(job, facts, pending, queries)
    if values["rate_queries"] is not None:
        measured = min(values["rate_queries"], queries) * RATE_ROUNDS
        searches += _searches(job, facts, values["source"], measured)
    searches += [_measured_vectors(job, facts, name, queries) for name in values["embeddings"]]
    searching = _searches_estimate(queries, searches, *[HIT_BYTES * EVALUATED_HITS] * len(pending))
    if searching is None:
        return None
    runs = len(values["run"]) + len(values["source"])
    per_query = len(values["metrics"] or ()) or 3
    results = int(MEASURED_BYTES * queries * (1 + runs * per_query))
    return replace(
        searching,
        start_s=searching.start_s + MEASURE_START_S,
        core_s=searching.core_s + MEASURE_S * queries * runs,
        read_bytes=int(HIT_BYTES * EVALUATED_HITS * queries * runs),
        written_bytes=searching.written_bytes + results,
        requests=searching.requests + Requests(0, (READS_PER_ARTIFACT + READS_PER_FETCH) * runs),
        memory_bytes=searching.memory_bytes + MEASURED_HIT_BYTES * EVALUATED_HITS * queries * (runs > 0),
    )


def estimate_server(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the memory and the start of a server by the artifacts of its release.

    Args:
        job: The job. `served` among its values has the keys of the artifacts, and `served_models` the encoder and the
            re-ranker; without them, the release is that of the options.
        facts: What is known of data and models.
    """
    values, corpus = job.values, facts.sizes.corpus(job.store)
    if corpus is None:
        return None
    keys = {without_generation(key) for key in values.get("served") or _served_keys(job, facts)}
    sizes = _served_bytes(job, facts, corpus, keys)
    if not keys or 0 in sizes.values():
        return None
    embeddings = [key.partition("/")[2] for key in sizes if key.startswith("embeddings/")]
    names = values.get("served_models", [*embeddings[:1], *filter(None, [values["rerank"]])])
    models = [facts.models.find(job.store, name) for name in names if name != WITHOUT]
    weights = sum(model.backbone.parameters for model in models if model is not None)
    if None in models:
        return None
    texts = sum(size for key, size in sizes.items() if key.startswith("bm25/"))
    mapped = sum(sizes.values())
    if values["row_ranges"]:  # each leaf maps all of BM25, and its range of the rest
        mapped = texts + (mapped - texts) // values["row_ranges"]
    prepared = 0
    if embeddings and not any(key.startswith("index/") for key in sizes):
        dim = facts.sizes.dim(job.store, embeddings[0]) or 0
        prepared = PREPARED_BYTES * dim * min(corpus.rows, PREPARED_ROWS)
    java = JAVA_MEMORY if texts or values["sources"] else 0
    return Estimate(
        "passages, served until the job is ended",
        corpus.rows,
        0,
        start_s=SERVER_START_S + (ENCODER_START_S + weights / 2e8 if weights else 0.0),
        read_bytes=mapped,
        requests=Requests(0, READS_PER_ARTIFACT * len(sizes) + READS_PER_FETCH * len(corpus.part_rows) * len(sizes)),
        memory_bytes=SERVER_MEMORY + int(ENCODER_MEMORY + 6 * weights if weights else 0) + prepared + java,
        mapped_bytes=mapped,
        gpu_memory_bytes=int(1024 * MIB + 2 * weights) if weights else 0,
        local_bytes=mapped,
        is_sized=corpus.exists,
        has_exact_bytes=corpus.exists,
        has_end=False,
    )


def _source_of_mode(job: PlannedJob, facts: Facts) -> str | None:
    """Returns the source that the mode of a search stands for; None: unknown."""
    mode, values = job.values["mode"], job.values
    embeddings = values["embeddings"] or facts.only_name(job.store, "embeddings")
    index = values["index"] or facts.only_name(job.store, "index")
    exact = None if embeddings is None else f"exact:{embeddings}"
    dense = exact if index is None else f"index:{index}"
    hybrid = None if dense is None else f"bm25+{dense}"
    return {"bm25": "bm25", "exact": exact, "dense": dense, "hybrid": hybrid, None: hybrid}[mode]


def _searches(job: PlannedJob, facts: Facts, sources: Iterable[str], queries: int) -> list[Search | None]:
    """Returns what each term of sources takes for a number of queries; None for one that is unknown."""
    terms = [term.rpartition("*")[2] for source in sources for term in source.replace(" ", "").split("+")]
    modes = {"dense": ["index"], "hybrid": ["bm25", "index"]}
    return [_search(job, facts, each, queries) for term in terms for each in modes.get(term, [term])]


def _search(job: PlannedJob, facts: Facts, source: str, queries: int) -> Search | None:
    """Returns what a source takes; None if its encoder is unknown."""
    kind, _, name = source.partition(":")
    corpus = facts.sizes.corpus(job.store)
    rows = 0 if corpus is None else corpus.rows
    if kind == "bm25":
        return Search(core_s=queries * BM25_S * rows / 1e6, memory=BM25_MEMORY)
    embeddings = facts.searched_embeddings(job.store, kind, name)
    model = None if embeddings is None else facts.models.find(job.store, embeddings)
    if model is None:
        return None
    length = facts.query_tokens(model, job)
    compared = 2.0 * queries * rows * model.dim * (1.0 if kind == "exact" else PROBED_SHARE)
    memory = int(6 * model.backbone.parameters) + rows * model.dim * 2
    return Search(model.flops(length * queries, length, FORWARD), compared, length * queries, memory=memory)


def _reranking(job: PlannedJob, facts: Facts, name: str, pairs: int) -> Search | None:
    """Returns what a re-ranker takes for a number of pairs; None if its size is unknown."""
    model = facts.models.find(job.store, name)
    if model is None:
        return None
    tokens = float(pairs * PAIR_TOKENS)
    return Search(model.backbone.flops(tokens, PAIR_TOKENS), 0.0, tokens, memory=int(6 * model.backbone.parameters))


def _measured_vectors(job: PlannedJob, facts: Facts, embeddings: str, queries: int) -> Search | None:
    """Returns what the measures of embeddings take: vectors of the queries, and products of samples."""
    model = facts.models.find(job.store, embeddings)
    if model is None:
        return None
    length = facts.query_tokens(model, job)
    compared = 2.0 * 2.0 * job.values["sample"] ** 2 * model.dim  # of pairs of queries, and of pairs of passages
    memory = int(6 * model.backbone.parameters)
    return Search(model.flops(length * queries, length, FORWARD), compared, length * queries, memory=memory)


def _searches_estimate(queries: int, searches: Sequence[Search | None], *bytes_per_query: float) -> Estimate | None:
    """Returns the estimate of searches whose results are in one artifact per figure of bytes for a query.

    None if a search is unknown.
    """
    known = [each for each in searches if each is not None]
    if len(known) < len(searches):
        return None
    parts = -(-queries // PART_QUERIES)
    sizes = [int(queries * size) for size in bytes_per_query]
    tokens = sum(each.tokens for each in known)
    base = ENCODER_MEMORY if tokens else SEARCH_MEMORY if known else MEASURE_MEMORY
    requests = [artifact_requests([size // max(1, parts)] * parts) for size in sizes]
    return Estimate(
        "queries",
        queries,
        parts * len(sizes),
        units=parts,
        start_s=ENCODER_START_S if tokens else 2.0 if known else 0.0,
        tokens=tokens,
        tokenised=tokens,
        forward_flops=sum(each.forward for each in known),
        exact_flops=sum(each.compared for each in known),
        core_s=(QUERY_S * queries if known else 0.0) + sum(each.core_s for each in known),
        written_bytes=sum(sizes),
        requests=sum(requests, PROBE if requests else Requests()),
        memory_bytes=base + sum(each.memory for each in known),
        is_sized=False,
    )


def _served_keys(job: PlannedJob, facts: Facts) -> list[str]:
    """Returns the keys of the artifacts that a server of the options would serve, with the corpus."""
    values = job.values
    names = {
        "embeddings": values["embeddings"] or facts.only_name(job.store, "embeddings"),
        "index": values["index"] or facts.only_name(job.store, "index"),
        "bm25": values["bm25"] or facts.only_name(job.store, "bm25"),
    }
    if names["embeddings"] in (None, WITHOUT):
        names |= {"embeddings": None, "index": None}
    keys = [f"{kind}/{name}" for kind, name in names.items() if name is not None]
    return ["corpus", *keys] if keys else []


def _served_bytes(job: PlannedJob, facts: Facts, corpus: CorpusSize, keys: Iterable[str]) -> Mapping[str, int]:
    """Returns the bytes of the artifacts of a server that it maps; 0 for those that are unknown."""
    mapped = [key for key in keys if key.partition("/")[0] in ("corpus", "embeddings", "index", "bm25")]
    sizes = facts.num_bytes(job.store, mapped)
    dims = [facts.sizes.dim(job.store, key.partition("/")[2]) for key in mapped if key.startswith("embeddings/")]
    dim = next((each for each in dims if each), 0)
    expected: dict[str, Any] = {
        "corpus": corpus.num_bytes,
        "embeddings": 2 * corpus.rows * dim,
        "index": index_bytes(corpus.rows, dim) if dim else 0,
        "bm25": int(BM25_SHARE * corpus.num_bytes),
    }
    return {key: size or expected[key.partition("/")[0]] for key, size in sizes.items()}
