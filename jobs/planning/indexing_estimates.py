"""Estimates of imports, encodings and indexes."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from riptide.indexing.dense.factory import FLAT, choose_factory, is_graph, num_lists, training_size
from riptide.indexing.dense.kmeans import STRIDES
from riptide.indexing.lucene.bm25_index import SHARD_ROWS
from riptide.indexing.store.chain import split_range
from riptide.indexing.store.store import generation
from riptide.jobs.planning.backbone_sizes import FORWARD
from riptide.jobs.planning.estimate import Estimate
from riptide.jobs.planning.models import Model, encoder_options
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.requests import PROBE, WRITES_PER_ARTIFACT, Requests, artifact_requests, count_parts
from riptide.jobs.planning.sizes import CorpusSize, planned_corpus

MIB = 1 << 20
# Memory of a process without data: Python with the libraries of a job. Measured: docs/measurements/plans.md.
IMPORT_MEMORY, ENCODER_MEMORY, INDEX_MEMORY, BM25_MEMORY = 145 * MIB, 560 * MIB, 230 * MIB, 157 * MIB
# Seconds until the work begins: imports of the libraries; the start of a model.
IMPORT_START_S, ENCODER_START_S, INDEX_START_S, BM25_START_S = 1.8, 8.0, 2.5, 2.0
GZIP_RATIO = 3  # bytes of text in a byte of gzip, of files that are too large to be read for a plan
COUNTED_BYTES = 64 * MIB  # bytes of a file whose lines are counted
LINE_FILES = {".jsonl", ".tsv", ".csv"}
NPY_HEADER = 128  # bytes before the vectors of a part
BM25_SHARE = 0.16  # bytes of a BM25 index in relation to those of the corpus
RECALL_QUERIES = 1_000  # vectors with which a build measures recall
CODE_TRAINING_S = 1.6e-7  # seconds of the one core that trains 4-bit codes, for a dimension of a vector
GRAPH_COMPARISONS = 1_500  # vectors with which a graph compares a new one
PROBED_SHARE = 1 / 64  # of the lists, at the search effort that a build chooses


def estimate_import(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates an import from its files, and records the corpus that it will make; None if it is complete."""
    values, sizes = job.values, facts.sizes
    existing = sizes.corpus(job.store)
    if existing is not None and existing.exists and not values["append"]:
        return None
    corpus = sizes.expected_corpus(values["part_size"])
    text, is_counted = 0, False
    if corpus is None:
        source = values["source"]
        rows, text, is_counted = (None, 0, False) if not source or "://" in source else count_rows(Path(source))
        if rows is None:
            return None
        used = min(rows, values["limit"] or rows)
        corpus = planned_corpus(used, text / rows, None, values["part_size"])
        text = text * used // rows
    if existing is None or not existing.exists:
        sizes.corpora[job.store] = corpus
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
        requests=_import_requests(corpus, values),
        memory_bytes=IMPORT_MEMORY + 4 * min(text or corpus.num_bytes, COUNTED_BYTES),
        local_bytes=max(corpus.part_bytes, default=0),
        is_sized=is_counted,
        has_exact_bytes=False,
    )


def _import_requests(corpus: CorpusSize, values: Mapping[str, Any]) -> Requests:
    """Returns the requests of an import.

    Each part has a file of passages and one of hashes, which are fetched again to merge the ids, and whose records each
    of the stages reads. The reads were counted, as those of `artifact_requests`.
    """
    num_parts = len(corpus.part_bytes)
    of_passages = count_parts([*corpus.part_bytes, *[1] * num_parts, 1])
    requests = PROBE + Requests(WRITES_PER_ARTIFACT + of_passages, 22 + 6 * num_parts)
    splits = [*Path(values["source"]).expanduser().glob("qrels/*")] if values["source"] else []
    if splits:
        files = 1 + len(splits)
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
    is_sparse = model.options.pooling == "splade"
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
    return estimate if rows else None


GIB_OF_CUDA = 512 * MIB  # memory of a GPU that CUDA and its libraries take
BATCH_TOKENS = 32_768  # tokens of a batch on a GPU


def estimate_index(job: PlannedJob, facts: Facts) -> Estimate | None:
    """Estimates the training, the filling and the measurement of recall of an index of dense vectors."""
    values = job.values
    name = values["embeddings"] or facts.only_name(job.store, "embeddings")
    corpus = facts.sizes.corpus(job.store)
    dim = facts.sizes.dim(job.store, name) if name else None
    if corpus is None or dim is None:
        return None
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
    training = sum(2.0 * trained / stride * lists * dim for stride in STRIDES)
    filled = sum(pending)
    compared = GRAPH_COMPARISONS if "HNSW" in factory else lists  # of a graph of vectors, or of centroids
    per_row = 2.0 * dim * compared
    recall = 2.0 * min(RECALL_QUERIES, rows) * rows * dim * (1 + PROBED_SHARE * (3 if is_graph(factory) else 1))
    largest = max(pending, default=0)
    estimate = Estimate(
        "vectors",
        filled,
        len(pending) + ("quantizer" not in done),
        units=max(1, len(pending)),
        start_s=INDEX_START_S + CODE_TRAINING_S * trained * dim * ("x4fs" in factory),
        exact_flops=training + filled * per_row + recall,
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
    return estimate if pending or trained else None


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
        return None
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


def _vector_bytes(rows: int, dim: int, is_sparse: bool) -> int:
    """Returns the bytes of a file of vectors: float16 after a header; of sparse ones about 120 words of 6 bytes."""
    return 720 * rows if is_sparse else NPY_HEADER + 2 * dim * rows


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


def count_rows(source: Path) -> tuple[int | None, int, bool]:
    """Counts the rows of the corpus files of a source by their lines.

    Of files above COUNTED_BYTES, the first lines stand for the others.

    Returns:
        The number of rows (None for files without lines), the bytes of text, and whether all lines were counted.
    """
    rows = size = 0.0
    is_counted = True
    for file in _corpus_files(source.expanduser()):
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


def _corpus_files(source: Path) -> list[Path]:
    """Returns the corpus files of a source: the file itself, or those of a folder except queries and judgements."""
    if source.is_file():
        return [source]
    files = [each for each in source.glob("*") if each.is_file()]
    return [each for each in files if each.name.startswith(("corpus", "collection"))] or files
