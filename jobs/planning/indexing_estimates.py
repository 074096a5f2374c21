"""Estimates of imports, encodings, indexes and topics."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from riptide.base.arguments import expand_home
from riptide.indexing.dense.factory import (
    FLAT,
    candidate_depths,
    choose_factory,
    is_graph,
    num_lists,
    search_efforts,
    training_size,
)
from riptide.indexing.dense.kmeans import strides_of
from riptide.indexing.lucene.bm25_index import SHARD_ROWS
from riptide.indexing.queries.hold_out import HoldOut
from riptide.indexing.queries.queries import ALL
from riptide.indexing.store.chain import split_range
from riptide.indexing.store.store import generation
from riptide.jobs.planning.backbone_sizes import FORWARD
from riptide.jobs.planning.estimate import NOTHING, Estimate
from riptide.jobs.planning.models import SPLADE, Model, encoder_options
from riptide.jobs.planning.planned_job import TEST, Facts, PlannedJob
from riptide.jobs.planning.requests import PROBE, WRITES_PER_ARTIFACT, Requests, artifact_requests, count_parts
from riptide.jobs.planning.sizes import CorpusSize, planned_corpus

MIB = 1 << 20
# Memory of a process without data: Python with the libraries of a job. Measured: docs/measurements/plans.md.
IMPORT_MEMORY, ENCODER_MEMORY, INDEX_MEMORY, BM25_MEMORY = 145 * MIB, 560 * MIB, 230 * MIB, 157 * MIB
# Seconds until the work begins: imports of the libraries; the start of a model.
IMPORT_START_S, ENCODER_START_S, INDEX_START_S, BM25_START_S = 1.8, 8.0, 1.0, 2.0
GZIP_RATIO = 3  # bytes of text in a byte of gzip, of files that are too large to be read for a plan
COUNTED_BYTES = 64 * MIB  # bytes of a file whose lines are counted
LINE_FILES = {".jsonl", ".tsv", ".csv"}
NPY_HEADER = 128  # bytes before the vectors of a part
BM25_SHARE = 0.16  # bytes of a BM25 index in relation to those of the corpus
RECALL_QUERIES = 1_000  # vectors with which a build measures recall
# Codes of 4 and of 8 bits: most vectors that train them, as FAISS takes 256 for each centroid, and seconds of the one
# core that trains them, for a dimension of a vector.
CODES_OF_4_BITS, CODES_OF_8_BITS = (4_096, 1.6e-7), (65_536, 2.5e-7)
# Vectors with which a graph compares a new one, and a query for each candidate that it keeps; seconds of a core for a
# dimension of a comparison, most of which wait for memory.
GRAPH_COMPARISONS, GRAPH_VISITS, GRAPH_S = 1_500, 20, 1.5e-10
# The measurement of recall, without the exact search: the effort at which it ends (docs/measurements/plans.md), and the
# time of a query at each effort.
SQUARED_EFFORT_PER_LIST, MOST_LISTS = 8, 128  # the last effort: min(sqrt(8 x number of lists), 128) lists
FIND_S, SCORE_S = 4e-8, 3.1e-10  # seconds of a core for a scanned vector, and for a dimension of a candidate
CALL_S = 1.2e-5  # seconds of a core to open the candidates of a query, a shard and a depth
MERGE_S, COMPARE_S = 5e-6, 8.5e-5  # seconds of the driver to merge them, and to compare the hits of a depth


def estimate_import(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates an import from its files, and records the corpus that it will make; None if it is complete."""
    values, sizes = job.values, facts.sizes
    existing = sizes.corpus(job.store)
    if existing is not None and existing.exists and not values["append"]:
        return NOTHING
    corpus = sizes.expected_corpus(values["part_size"])
    text, is_counted = 0, False
    if corpus is None:
        rows, text, is_counted = count_rows(values["source"])
        if rows is not None:
            used = min(rows, values["limit"] or rows)
            corpus = planned_corpus(used, text / rows, None, values["part_size"])
            text = text * used // rows
        elif existing is not None and not existing.exists:  # of a data set whose size is known
            corpus = existing
        else:
            return None
    if existing is None or not existing.exists:
        sizes.corpora[job.store] = corpus
    splits = [] if sizes.expected else _judgement_files(values["source"])
    if splits:
        sizes.add_queries(job.store, source_name(values["source"]), count_judged_queries(splits), hold_out_of(values))
    ids = [2 * 8 * rows + NPY_HEADER for rows in corpus.part_rows]
    return Estimate(
        "passages",
        corpus.rows,
        len(corpus.part_rows),
        units=len(corpus.part_rows),
        start_s=IMPORT_START_S,
        parsed_bytes=text or corpus.num_bytes,
        read_bytes=text or corpus.num_bytes,
        written_bytes=corpus.num_bytes + sum(ids) + 2 * 8 * corpus.rows + NPY_HEADER,
        requests=_import_requests(corpus, len(splits)),
        memory_bytes=IMPORT_MEMORY + 4 * min(text or corpus.num_bytes, COUNTED_BYTES),
        local_bytes=max(corpus.part_bytes, default=0),
        is_sized=is_counted,
        has_exact_bytes=False,
    )


def _import_requests(corpus: CorpusSize, num_splits: int) -> Requests:
    """Returns the requests of an import, with queries that have judgements by split.

    Each part has a file of passages and one of hashes, which are fetched again to merge the ids, and whose records each
    of the stages reads. The reads were counted, as those of `artifact_requests`.
    """
    num_parts = len(corpus.part_bytes)
    of_passages = count_parts([*corpus.part_bytes, *[1] * num_parts, 1])
    requests = PROBE + Requests(WRITES_PER_ARTIFACT + of_passages, 22 + 6 * num_parts)
    if num_splits:
        files = 1 + num_splits
        requests += Requests(WRITES_PER_ARTIFACT + count_parts([1] * files), 16 + 2 * files + 2 * num_parts)
    return requests


def estimate_encoding(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates an encoding from the pending parts of the corpus and the tokens of sampled passages."""
    values = job.values
    model = facts.models.find(job.store, values["task"] or values["encoder"] or "", encoder_options(values))
    corpus = facts.sizes.corpus(job.store)
    if values["task"] and (trained := facts.models.options.get((job.store, values["task"]))) and model is not None:
        model = Model(model.name, model.backbone, trained, model.folder)
    name = values["name"] or values["task"] or (values["encoder"] or "").rstrip("/").rpartition("/")[2]
    if model is not None:
        facts.models.learn(job.store, name, model.name, model.options)
        facts.sizes.dims[job.store, name] = model.dim
    if model is None or corpus is None:
        return None
    pending = _pending_parts(facts, job.store, name, corpus.first_rows(values["limit"]))
    rows = sum(pending.part_rows)
    mean = facts.passage_tokens(model, corpus)
    tokens = mean * rows
    is_sparse = model.options.pooling == SPLADE
    sizes = [_vector_bytes(each, model.dim, is_sparse) for each in pending.part_rows]
    weights = model.backbone.parameters
    largest = max(pending.part_rows, default=0)
    text = max(pending.part_bytes, default=0)
    estimate = Estimate(
        "passages",
        rows,
        len(sizes),
        units=len(sizes),
        start_s=ENCODER_START_S + weights / 2e8,
        tokens=tokens,
        tokenised=tokens,
        forward_flops=model.flops(tokens, mean, FORWARD),
        read_bytes=pending.num_bytes,
        written_bytes=sum(sizes),
        # The record of the corpus, and its ids, are read too.
        requests=PROBE + artifact_requests(sizes, fetched=len(sizes)) + Requests(0, 8),
        memory_bytes=int(ENCODER_MEMORY + 6 * weights + 4 * text + largest * (8 * mean + 6 * model.dim)),
        gpu_memory_bytes=int(2 * GIB_OF_CUDA + 2 * weights + 64 * model.backbone.width * BATCH_TOKENS),
        local_bytes=pending.num_bytes + sum(sizes),
        is_sized=corpus.exists,
    )
    return estimate if rows else NOTHING


GIB_OF_CUDA = 512 * MIB  # memory of a GPU that CUDA and its libraries take
BATCH_TOKENS = 32_768  # tokens of a batch on a GPU


def estimate_index(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the training, the filling and the measurement of recall of an index of dense vectors."""
    values = job.values
    name = values["embeddings"] or facts.only_name(job.store, "embeddings")
    corpus = facts.sizes.corpus(job.store)
    dim = facts.sizes.dim(job.store, name) if name else None
    facts.sizes.searched[job.store, values["name"] or name or ""] = name or ""
    if corpus is None or dim is None or name is None:
        return None
    if facts.models.is_sparse(job.store, name):
        return _estimate_impacts(job, facts, corpus)
    from riptide.indexing.dense.faiss_index import row_bytes

    rows = min(corpus.rows, values["limit"] or corpus.rows)
    factory = values["factory"]
    if factory == "auto":
        budget = None if values["memory_gb"] is None else int(values["memory_gb"] * 1e9)
        factory = choose_factory(rows, dim, values["recall"], budget, values["shards"])
    shards = [int(end - first) for first, end in split_range(0, rows, max(1, min(values["shards"], rows)))]
    done = facts.committed(job.store, f"index/{values['name'] or name}/{generation(0)}")
    pending = [size for number, size in enumerate(shards) if f"shard-{number:05d}" not in done]
    trained = 0 if "quantizer" in done else training_size(factory, rows)
    lists = num_lists(factory)
    row_size, quantizer = row_bytes(factory, dim), quantizer_bytes(factory, dim)
    sizes = [FAISS_HEADER + quantizer + row_size * size + padding_bytes(factory, dim) for size in pending]
    training = sum(2.0 * trained / stride * lists * dim for stride in (strides_of(trained, lists) if lists else ()))
    filled = sum(pending)
    has_graph = "HNSW" in factory  # of vectors, or of centroids
    exact = 2.0 * min(RECALL_QUERIES, rows) * rows * dim
    measuring_s, comparing_s = _recall_seconds(factory, dim, shards)
    largest = max(pending, default=0)
    if not pending and not trained:
        return NOTHING
    return Estimate(
        "vectors",
        filled,
        len(pending) + ("quantizer" not in done),
        units=max(1, len(pending)),
        start_s=INDEX_START_S,
        serial_s=_code_training_s(factory, trained, dim) + comparing_s,
        exact_flops=training + exact,
        core_s=measuring_s,
        unit_flops=0.0 if has_graph else 2.0 * filled * lists * dim,
        unit_s=GRAPH_S * GRAPH_COMPARISONS * filled * dim if has_graph else 0.0,
        read_bytes=2 * filled * dim * 2,
        written_bytes=sum(sizes) + (0 if "quantizer" in done else quantizer),
        requests=PROBE
        + artifact_requests(
            [*sizes, *([quantizer] if "quantizer" not in done else [])],
            fetched=len(corpus.part_rows) + len(shards) + 1,
        )
        + Requests(0, 5 + 3 * len(shards)),  # the records of the first stage are read again in the second one
        memory_bytes=int(INDEX_MEMORY + max(6 * trained * dim, largest * (row_size + 2 * dim) + quantizer)),
        local_bytes=rows * dim * 2 + sum(sizes),
        is_sized=corpus.exists,
        has_exact_bytes=factory == FLAT,
    )


def _code_training_s(factory: str, trained: int, dim: int) -> float:
    """Returns the seconds that the training of product codes takes; other codes have next to no parameters."""
    most, seconds = CODES_OF_4_BITS if "x4fs" in factory else CODES_OF_8_BITS
    return seconds * min(trained, most) * dim * ("PQ" in factory)


def _recall_seconds(factory: str, dim: int, shards: Sequence[int]) -> tuple[float, float]:
    """Returns the seconds of cores, and of the driver, that the measurement of recall takes after the exact search.

    A build tries efforts from the smallest one until an effort reaches the recall. At each effort it searches all
    shards, scores the candidates of each depth exactly, and compares the hits of each depth with the exact ones.

    Args:
        factory: The factory string.
        dim: Dimensions of a vector.
        shards: The number of vectors of each shard.
    """
    queries, lists = min(RECALL_QUERIES, sum(shards)), num_lists(factory)
    of_cores = of_driver = 0.0
    for effort in search_efforts(factory):
        depths = candidate_depths(factory, effort)
        for size in shards:
            scanned = size * effort / lists if lists else size
            finding_s = FIND_S * scanned
            if is_graph(factory):
                finding_s = GRAPH_S * dim * min(size, GRAPH_VISITS * effort)
            candidates = sum(min(depth, scanned) for depth in depths)
            of_cores += queries * (finding_s + SCORE_S * dim * candidates + CALL_S * len(depths))
        of_driver += queries * len(depths) * (MERGE_S * len(shards) + COMPARE_S)
        if effort >= min(math.sqrt(SQUARED_EFFORT_PER_LIST * lists), MOST_LISTS):
            break
    return of_cores, of_driver


def _estimate_impacts(job: PlannedJob, facts: Facts, corpus: CorpusSize) -> Estimate:
    """Estimates an index of sparse vectors in Lucene, which takes their weights as it takes the words of a text."""
    corpus = corpus.first_rows(job.values["limit"])
    name = job.values["name"] or job.values["embeddings"] or facts.only_name(job.store, "embeddings")
    done = facts.committed(job.store, f"index/{name}/{generation(0)}")
    shards = max(1, min(job.values["shards"], corpus.rows))
    pending = sum(f"shard-{number:05d}" not in done for number in range(shards))
    if not pending:
        return NOTHING
    vectors = SPARSE_BYTES * corpus.rows * pending // shards
    return Estimate(
        "sparse vectors",
        corpus.rows * pending // shards,
        pending,
        units=pending,
        start_s=BM25_START_S,
        indexed_bytes=vectors,
        read_bytes=vectors,
        written_bytes=int(IMPACTS_SHARE * vectors),
        requests=PROBE
        + artifact_requests([int(IMPACTS_SHARE * vectors) // pending] * pending, fetched=len(corpus.part_rows)),
        memory_bytes=BM25_MEMORY + 4 * min(vectors // pending, COUNTED_BYTES),
        local_bytes=vectors,
        is_sized=corpus.exists,
        has_exact_bytes=False,
    )


def index_bytes(rows: int, dim: int) -> int:
    """Returns the bytes of an index that `build-index` makes by default over some vectors."""
    from riptide.indexing.dense.faiss_index import row_bytes

    factory = choose_factory(rows, dim, DEFAULT_RECALL, None, DEFAULT_SHARDS)
    shards = DEFAULT_SHARDS * (FAISS_HEADER + quantizer_bytes(factory, dim) + padding_bytes(factory, dim))
    return shards + row_bytes(factory, dim) * rows


DEFAULT_RECALL, DEFAULT_SHARDS = 0.95, 4  # of `build-index`

FAISS_HEADER = 45  # bytes of a Flat index without its vectors, and of the map from its rows to those of the corpus


def estimate_bm25(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a BM25 index, whose size is about a sixth of that of the text."""
    corpus = facts.sizes.corpus(job.store)
    if corpus is None:
        return None
    corpus = corpus.first_rows(job.values["limit"])
    shards = max(1, min(job.values["shards"] or -(-corpus.rows // SHARD_ROWS), corpus.rows))
    done = facts.committed(job.store, f"bm25/{job.values['name'] or 'bm25'}/{generation(0)}")
    pending = [number for number in range(shards) if f"shard-{number:05d}" not in done]
    if not pending:
        return NOTHING
    share = len(pending) / shards
    sizes = [int(BM25_SHARE * corpus.num_bytes / shards)] * len(pending)
    return Estimate(
        "passages",
        int(corpus.rows * share),
        len(pending),
        units=len(pending),
        start_s=BM25_START_S,
        indexed_bytes=corpus.num_bytes * share,
        read_bytes=int(corpus.num_bytes * share),
        written_bytes=sum(sizes),
        requests=PROBE + artifact_requests(sizes, fetched=len(corpus.part_rows)),
        memory_bytes=BM25_MEMORY + 4 * min(corpus.num_bytes // shards, COUNTED_BYTES),
        local_bytes=corpus.num_bytes + sum(sizes),
        is_sized=False,
    )


SPARSE_BYTES = 720  # of a sparse vector: about 120 words of 6 bytes
IMPACTS_SHARE = 0.5  # bytes of an index of sparse vectors in relation to theirs; not measured


def _vector_bytes(rows: int, dim: int, is_sparse: bool) -> int:
    """Returns the bytes of a file of vectors: float16 after a header; or the sparse vectors."""
    return SPARSE_BYTES * rows if is_sparse else NPY_HEADER + 2 * dim * rows


def quantizer_bytes(factory: str, dim: int) -> int:
    """Returns the bytes of a trained, empty index: header, centroids, lists, and centroids of 4-bit codes."""
    lists = num_lists(factory)
    return FAISS_HEADER + (lists * (4 * dim + 16) + 4 * 16 * dim * ("x4fs" in factory) if lists else 0)


def padding_bytes(factory: str, dim: int) -> int:
    """Returns the bytes that fill up lists of fast-scan codes, which have blocks of 32 vectors, in a shard."""
    from riptide.indexing.dense.faiss_index import row_bytes

    return num_lists(factory) * 14 * (row_bytes(factory, dim) - 8) if "x4fs" in factory else 0


def _pending_parts(facts: Facts, store: str, name: str, corpus: CorpusSize) -> CorpusSize:
    """Returns the size of the parts of a corpus without vectors in embeddings/NAME."""
    if not corpus.parts:
        return corpus
    done = facts.committed(store, f"embeddings/{name}")
    pending = [number for number, part in enumerate(corpus.parts) if part.label not in done]
    rows, sizes = ([values[number] for number in pending] for values in (corpus.part_rows, corpus.part_bytes))
    return CorpusSize(rows, sizes, corpus.expected_tokens)


def count_rows(source: str | None, kinds: tuple[str, ...] = ("corpus", "collection")) -> tuple[int | None, int, bool]:
    """Counts the rows of the files of a local source by their lines.

    Of files above COUNTED_BYTES, the first lines stand for the others.

    Args:
        source: A file, or a folder.
        kinds: The beginnings of the names of the files that count in a folder; without such files, all count.

    Returns:
        The number of rows (None for files without lines), the bytes of text, and whether all lines were counted.
    """
    rows = size = 0.0
    is_counted = True
    for file in _source_files(source, kinds):
        if not LINE_FILES.intersection(file.suffixes):
            return None, 0, False
        read: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
        with read(file, "rb") as stream:
            data = stream.read(COUNTED_BYTES)
            is_whole = not stream.read(1)
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        total = len(data) if is_whole else file.stat().st_size * (GZIP_RATIO if file.suffix == ".gz" else 1)
        rows, size, is_counted = rows + lines * total / len(data), size + total, is_counted and is_whole
    return int(rows) or None, int(size), is_counted


def _source_files(source: str | None, kinds: tuple[str, ...]) -> list[Path]:
    """Returns the files of a local source: the file itself, or those of a folder whose names begin in some ways."""
    if not source or "://" in source:
        return []
    path = expand_home(source)
    files = [path] if path.is_file() else [each for each in path.glob("*") if each.is_file()]
    return [each for each in files if each.name.startswith(kinds)] or files


def source_name(source: str) -> str:
    """Returns the name of the query set that an import makes of a source by default."""
    return Path(source).name.partition(".")[0]


def hold_out_of(values: Mapping[str, Any]) -> HoldOut | None:
    """Returns the queries that an import holds out, by its options; None: it holds none out."""
    return None if values["hold_out"] is None else HoldOut(values["hold_out"], values["hold_out_split"])


def _judgement_files(source: str | None) -> list[Path]:
    """Returns the files of judgements of a local folder, one for each split; [] without any."""
    return sorted(expand_home(source).glob("qrels/*")) if source and "://" not in source else []


def count_judged_queries(files: Iterable[Path]) -> dict[str, int]:
    """Counts the judged queries of splits, by the names of the files of their judgements.

    Of files above COUNTED_BYTES, the first lines stand for the others.
    """
    counts = {}
    for file in files:
        read: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
        with read(file, "rb") as stream:
            lines = stream.read(COUNTED_BYTES).splitlines()[1:]
        share = min(1.0, COUNTED_BYTES / file.stat().st_size)
        counts[file.name.partition(".")[0]] = int(len({line.partition(b"\t")[0] for line in lines}) / share)
    return counts


def estimate_query_import(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates an import of queries from its files, and records the query set that it will make."""
    values, sizes = job.values, facts.sizes
    name = values["queries"] or source_name(values["source"])
    counts = {split: count for (*place, split), count in sizes.queries.items() if place == [job.store, name]}
    size, is_counted = 0, False
    if sizes.expected or counts:  # of a data set whose size is known
        rows = int(sizes.expected.get("queries", 0)) or counts.get(ALL) or sum(counts.values())
    else:
        counted, size, is_counted = count_rows(values["source"], ("queries",))
        rows = min(counted or 0, values["limit"] or counted or 0)
        counts = count_judged_queries(_judgement_files(values["source"])) or {values["split"] or TEST: rows}
        sizes.add_queries(job.store, name, {ALL: rows, **counts}, hold_out_of(values))
    if not rows:
        return None
    written = [rows * QUERY_BYTES, *[count * JUDGEMENT_BYTES for split, count in counts.items() if split != ALL]]
    return Estimate(
        "queries",
        rows,
        len(written),
        start_s=IMPORT_START_S,
        parsed_bytes=size or sum(written),
        read_bytes=size or sum(written),
        written_bytes=sum(written),
        requests=PROBE
        + artifact_requests(written, fetched=2 * len(counts)),  # the ids of the judged passages are looked up
        memory_bytes=IMPORT_MEMORY + 8 * sum(written),
        is_sized=is_counted,
        has_exact_bytes=False,
    )


def estimate_topics(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates a fit of topics, which one thread does, and the inference of the topics of other passages."""
    values, corpus = job.values, facts.sizes.corpus(job.store)
    if corpus is None:
        return None
    corpus = corpus.first_rows(values["limit"])
    done = facts.committed(job.store, f"topics/{values['name']}/{generation(0)}")
    pending = [rows for number, rows in enumerate(corpus.part_rows) if f"part-{number:05d}" not in done]
    if not pending:
        return NOTHING
    fitted = min(corpus.rows, values["sample"])
    text = corpus.num_bytes / max(1, corpus.rows)
    is_fitted = "model" in done
    inferred = max(0, sum(pending) - (0 if is_fitted else fitted))
    sizes = [8 * rows + NPY_HEADER for rows in pending]
    return Estimate(
        "passages",
        sum(pending),
        len(sizes) + 2 * (not is_fitted),
        units=len(sizes),
        start_s=TOPICS_START_S,
        serial_s=0.0 if is_fitted else TOPIC_S * fitted * text * values["iterations"],
        core_s=INFERENCE_S * inferred * text,
        read_bytes=corpus.num_bytes * (1 if is_fitted else 2),
        written_bytes=sum(sizes) + (0 if is_fitted else FITTED_BYTES * fitted),
        requests=PROBE
        + artifact_requests([*sizes, *[FITTED_BYTES * fitted // 2] * (2 * (not is_fitted))], fetched=2 * len(sizes)),
        memory_bytes=TOPICS_MEMORY + int(TOPICS_BYTES * fitted * text),
        local_bytes=corpus.num_bytes,
        is_sized=corpus.exists,
        has_exact_bytes=False,
    )


QUERY_BYTES, JUDGEMENT_BYTES = 110, 40  # of an imported query, and of its judgements
FITTED_BYTES = 56  # of a fitted passage: its topic, and its share of the model
TOPICS_START_S = 2.0  # seconds until the passages are read
TOPIC_S = 1e-8  # seconds of a byte of text in an iteration of a fit: docs/measurements/plans.md
INFERENCE_S = 5e-8  # seconds of a core to infer the topic of a passage, for a byte of its text
TOPICS_MEMORY, TOPICS_BYTES = 140 * MIB, 11.0  # of a process, and of a byte of fitted text
