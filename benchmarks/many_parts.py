"""Measures operations on a store with many parts: requests, seconds, memory and open files, each with its budget.

    python benchmarks/many_parts.py --store W --parts 100000 --s3       # on moto; the folder W stays as it is
    python benchmarks/many_parts.py --store W --parts 100000            # the same store in the folder, which changes
    python benchmarks/many_parts.py --store V --parts 100 --full-parts --steps search --s3      # a cold query's bytes

The store has a corpus, embeddings and an index. Their objects are written directly in the format of docs/format.md,
since the jobs would take hours for them. Parts have 10 rows, with records as long as those of 10,000 rows. Each step
runs in a separate process with an empty node cache; the memory is the increase of its resident set above that after the
imports, at its peak. Exits with 1 if a step is not within its budget.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.counting_s3 import counting_s3, take_counts
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table

DELETED = 1_000
PENDING = 10  # parts of the interrupted artifact that are not committed
CHECKSUMS = 46  # checksums of blocks in the record of a part of 10,000 passages of 550 characters


@dataclass(frozen=True)
class StoreShape:
    """The size of a store.

    Attributes:
        parts: Parts of the corpus.
        rows: Rows of a part.
        dim: Length of a vector.
        text_length: Characters of a passage, at least.
        factory, shards, nprobe, depth: The index, and how it is searched.
        sample: Vectors that train the index.
        has_draft: Whether there is an artifact to resume.
    """

    parts: int = 10_000
    rows: int = 10
    dim: int = 8
    text_length: int = 0
    factory: str = "IVF64,SQ8"
    shards: int = 4
    nprobe: int = 4
    depth: int = 100
    sample: int = 10_000
    has_draft: bool = True

    def settings(self, numerics: str) -> dict[str, Any]:
        """Returns the configuration of embeddings."""
        return {"encoder": {"pooling": "mean", "dim": self.dim, "model_type": "bert"}, "numerics": numerics}


# The shape of which one query is measured: that of a store of 21 million passages with fewer parts.
FULL_PARTS = {"rows": 10_000, "dim": 384, "text_length": 553, "factory": "IVF1024,RaBitQ", "shards": 8}
FULL_PARTS |= {"nprobe": 64, "depth": 800, "sample": 50_000, "has_draft": False}


@dataclass(frozen=True)
class Budget:
    """What a step may take.

    Attributes:
        requests: Requests, for any number of parts.
        requests_per_part: Further requests for each part of the corpus.
        seconds: Seconds, for any number of parts.
        ms_per_part: Further milliseconds for each part.
        memory_mb: Memory for any number of parts, for example of libraries that the step loads.
        kb_per_part: Further kB of memory for each part.
        open_files: File descriptors.
        fetched_mb: MB that are fetched without the files of the index, for any number of parts.
        fetched_kb_per_part: Further kB for each part.
    """

    requests: int
    requests_per_part: float = 0
    seconds: float = 20
    ms_per_part: float = 0.1
    memory_mb: int = 60
    kb_per_part: float = 3
    open_files: int = 200
    fetched_mb: float = math.inf
    fetched_kb_per_part: float = 1.5

    def excess(self, parts: int, figures: Mapping[str, float]) -> list[str]:
        """Returns the names of the figures of a step that exceed the budget, for a store with this number of parts."""
        limits = {
            "requests": self.requests + self.requests_per_part * parts,
            "seconds": self.seconds + self.ms_per_part * parts / 1000,
            "memory_mb": self.memory_mb + self.kb_per_part * parts / 1024,
            "open_files": self.open_files,
            "bytes": 1e6 * self.fetched_mb + 1e3 * self.fetched_kb_per_part * parts,
        }
        return [name for name, limit in limits.items() if figures.get(name, 0) > limit]

    def __str__(self) -> str:
        per_part = f" + {self.requests_per_part:g} a part" if self.requests_per_part else ""
        return f"{self.requests:,}{per_part}; {self.seconds:g} s + {self.ms_per_part:g} ms a part"


# A step that adds parts lists the objects of a draft, 1,000 in a request: two for each part, three times. A resume also
# reads a list for each 250 parts, and at most 249 records. A step that removes an artifact lists them once, and deletes
# as many in a request.
STEPS = {
    "list": Budget(60),
    "open": Budget(20),
    "search": Budget(1_000),
    "resume": Budget(450, 0.011, ms_per_part=1),
    "append": Budget(100),
    "delete": Budget(50 + 3 * DELETED),
    "remove": Budget(60, 0.01),
}
# A query in a store of FULL_PARTS reads a range for each of its 6,400 candidates. With the manifests of 2,102 parts, 21
# million rows, that is 20 MB.
COLD_QUERY = Budget(6_600, seconds=300, memory_mb=150, fetched_mb=16.8)


def write_artifact(
    root: Path,
    key: str,
    inputs: dict[str, Any],
    config: dict[str, Any],
    parts: Iterator[tuple[str, str, bytes, int, dict[str, Any]]],
    notes: dict[str, Any],
    *,
    by_content: bool = False,
    is_complete: bool = True,
) -> None:
    """Writes an artifact with the given parts (name, suffix, bytes, rows, facts) to a folder, as its job would."""
    from riptide.indexing.storage.cache import NodeCache
    from riptide.indexing.storage.storage import LocalStorage
    from riptide.indexing.store.draft import Draft
    from riptide.indexing.store.sealed_json import (
        ArtifactPart,
        PartRecords,
        add_own_hash,
        begun_document,
        fingerprint_of,
    )

    folder = root / key
    folder.mkdir(parents=True)
    document = begun_document(key.split("/")[0], inputs, config, by_content)
    identity = fingerprint_of(document)
    (folder / "manifest.begun.json").write_bytes(add_own_hash(document))
    committed = PartRecords()
    for name, suffix, data, rows, facts in parts:
        digest = hashlib.sha256(data).hexdigest()
        file = f"{name}-{digest[:16]}{suffix}"
        (folder / file).write_bytes(data)
        part = ArtifactPart(name, file, rows, len(data), digest, facts)
        (folder / f"{name}.json").write_bytes(add_own_hash({**part.document(), "begun": identity}))
        committed.add(part)
    draft = Draft(LocalStorage(str(root)), NodeCache(root / "unused", 1), key, document)
    draft._known = committed
    if is_complete:
        draft.add_notes(**notes)
        draft.finish()
    else:
        draft.list_records(committed)


def write_store(root: Path, shape: StoreShape) -> None:
    """Writes the store: corpus/g0000, embeddings/E/g0000, index/I, and embeddings/F, of which PENDING parts lack."""
    import pyarrow as pa

    from riptide.indexing.corpus.corpus import Corpus, save_array, write_table
    from riptide.indexing.corpus.ids import merge_bucket, num_buckets, sorted_hashes
    from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
    from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
    from riptide.indexing.dense.faiss_index import faiss
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.formats.parse import CORPUS_SCHEMA
    from riptide.indexing.formats.sources import detect_source
    from riptide.indexing.store.chain import split_range
    from riptide.indexing.store.store import Store
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.indexing.work.work import run_work

    parts, rows = shape.parts, shape.rows
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder) / "passages.jsonl", Path(folder) / "file"
        source.write_text('{"_id": "p0", "text": "text"}\n')
        small, options = Store(f"{folder}/small"), ImportOptions(part_size=rows)
        [one] = run_work(
            small, ImportCorpusWork(small, detect_source(str(source)), options, append=False), LocalRunner()
        )
        facts = one.part("part-00000").facts
        columns = [
            [""] * rows,
            [f"text {number} ".ljust(shape.text_length, "x") for number in range(rows)],
            [""] * rows,
        ]
        hashes = np.empty((2, parts * rows), np.uint64)

        def corpus_parts() -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
            for number in range(parts):
                first = number * rows
                names = [f"p{row}" for row in range(first, first + rows)]
                write_table(pa.table([names, *columns], schema=CORPUS_SCHEMA), file)
                data = file.read_bytes()
                [[name, _, _, digest]] = facts["source"]
                part_facts = {"source": [[name, 1 + first, rows, digest]], "crc32": checksums_of(data, CHECKSUMS)}
                yield f"part-{number:05d}", ".arrow", data, rows, {**facts, **part_facts}
                part_hashes = sorted_hashes(names)
                yield f"hashes-{number:05d}", ".npy", array_bytes(part_hashes), rows, {}
                hashes[:, first : first + rows] = part_hashes + np.array([[0], [first]], np.uint64)
            save_array(np.ascontiguousarray(hashes[:, np.argsort(hashes[0], kind="stable")]), file)
            buckets = num_buckets(parts * rows)
            for bucket in range(buckets):
                merged = merge_bucket([(file, 0)], bucket, buckets)
                data = array_bytes(merged)
                yield f"ids-{bucket:05d}", ".npy", data, merged.shape[1], {"crc32": checksums_of(data)}

        write_artifact(root, "corpus/g0000", {}, one.config, corpus_parts(), {}, by_content=True)
    store = Store(str(root))
    corpus = Corpus.open(store)
    random = np.random.default_rng(0)

    def vector_parts(count: int) -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
        for each in corpus.parts[:count]:
            vectors = random.normal(size=(rows, shape.dim)).astype(np.float16)
            cuts = {"corpus_sha256": each.part.sha256, "cuts": {"cut": 0, "longest": 10, "uncounted": 0}}
            yield each.part.name, ".npy", array_bytes(vectors), rows, cuts

    inputs = {"corpus": corpus.generations[0]}
    notes = {"encoder": "none", "options": {}, "dim": shape.dim, "similarity": "dot"}
    write_artifact(root, "embeddings/E/g0000", inputs, shape.settings("none"), vector_parts(parts), notes)
    interrupted = vector_parts(parts - PENDING)
    if shape.has_draft:
        write_artifact(
            root, "embeddings/F/g0000", inputs, shape.settings("other"), interrupted, notes, is_complete=False
        )
    embeddings = Embeddings.open(store, "E", corpus)
    sample = embeddings.take(np.arange(min(shape.sample, embeddings.num_rows)))
    trained = train_quantizer(sample, shape.factory, seed=0)

    def index_parts() -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
        yield "quantizer", ".faiss", faiss.serialize_index(trained).tobytes(), len(sample), {}
        for number, (first, end) in enumerate(split_range(0, embeddings.num_rows, shape.shards)):
            vectors = (piece for _, piece in embeddings.read_range(first, end))
            data = faiss.serialize_index(fill_shard(trained, vectors, first)).tobytes()
            yield f"shard-{number:05d}", ".faiss", data, end - first, {"first_row": first, "end": end}

    settings = {"embeddings": "E", "factory": shape.factory, "shards": shape.shards, "recall": 0.5, "seed": 0}
    notes = {"nprobe": shape.nprobe, "depth": shape.depth, "recall": {"100": 0.9}, "reaches_recall": True}
    write_artifact(root, "index/I/g0000", {"embeddings": embeddings.generations[0]}, settings, index_parts(), notes)


def checksums_of(data: bytes, num_blocks: int = 0) -> str:
    """Returns the checksums of the blocks of a file, as `block_checksums`, padded to those of `num_blocks` blocks."""
    from riptide.indexing.storage.cache import BLOCK_BYTES

    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(f"{zlib.crc32(data[start : start + BLOCK_BYTES]):08x}" for start in starts).ljust(
        8 * num_blocks, "0"
    )


def array_bytes(array: np.ndarray) -> bytes:
    """Returns the bytes of a .npy file."""
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def run_step(step: str, url: str, folder: Path) -> dict[str, Any]:
    """Runs one step in this process and returns its figures."""
    from riptide.indexing.corpus.corpus import Corpus, save_array
    from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
    from riptide.indexing.dense.dense_search import search_dense
    from riptide.indexing.dense.index import Index
    from riptide.indexing.dense.shard import OpenShards
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.formats.sources import detect_source
    from riptide.indexing.store.store import Store
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.indexing.work.work import ArtifactTarget, BaseWork, TaskStage, WorkUnit, run_work
    from riptide.jobs.store import list_artifacts

    store, runner = Store(url), LocalRunner()
    facts: dict[str, Any] = {}

    def open_all() -> tuple[Corpus, Embeddings, Index]:
        corpus = Corpus.open(store)
        embeddings = Embeddings.open(store, "E", corpus)
        return corpus, embeddings, Index.open(store, "I", embeddings)

    def list_all() -> None:
        list_artifacts(store, None)

    def resume() -> None:
        corpus = Corpus.open(store)

        dim = Embeddings.open(store, "E", corpus).dim
        config = StoreShape(dim=dim).settings("other")
        target = ArtifactTarget("embeddings", "F/g0000", {"corpus": corpus.generations[0]}, config)
        units = [WorkUnit((part.part.name,), part.part.rows, None) for part in corpus.parts]

        class Fill(BaseWork):
            """The interrupted encoding, without an encoder."""

            def __init__(self) -> None:
                self.targets = [target]
                self.stages = [TaskStage("encode", "passages", units, lambda drafts: FillTask(drafts[0], dim))]

        run_work(store, Fill(), runner)

    class FillTask:
        """Commits vectors of zeros."""

        from riptide.indexing.work.worker_tasks import ONE_CORE as resources

        def __init__(self, draft: Any, dim: int):
            self.draft, self.dim = draft, dim

        def open(self, allocation: Any) -> Any:
            def fill(unit: WorkUnit, report: Any) -> None:
                vectors = np.zeros((unit.rows, self.dim), np.float16)
                self.draft.commit(unit.names[0], ".npy", lambda path: save_array(vectors, path), rows=unit.rows)

            return fill

    def append() -> None:
        source = folder / "more.jsonl"
        source.write_text("".join(json.dumps({"_id": f"more{n}", "text": "more"}) + "\n" for n in range(10)))
        run_work(store, ImportCorpusWork(store, detect_source(str(source)), ImportOptions(), append=True), runner)

    def delete() -> None:
        corpus = Corpus.open(store)
        rows = corpus.generations[0].rows
        deleted = min(DELETED, rows // 2)
        ids = folder / "ids.txt"
        ids.write_text("".join(f"p{number * (rows // deleted)}\n" for number in range(deleted)))
        work = ImportCorpusWork(store, None, ImportOptions(), append=False, delete=str(ids))
        run_work(store, work, runner)

    def remove() -> None:
        store.remove("embeddings/F")

    def search() -> None:
        corpus, embeddings, index = open_all()
        query = np.ones((1, embeddings.dim), np.float32)
        hits = search_dense(index, OpenShards(embeddings, corpus.deleted), query, 10, runner)
        facts["hits"] = len(corpus.passages(hits.rows[0]))

    steps = {
        "list": list_all,
        "open": open_all,
        "resume": resume,
        "append": append,
        "delete": delete,
        "search": search,
        "remove": remove,
    }
    import boto3  # noqa: F401

    import riptide.indexing.dense.faiss_index  # noqa: F401

    Store(url).storage.is_empty()  # opens the clients of S3
    baseline, files = memory_mb("VmRSS"), FilesWatch()
    if url.startswith("s3://"):
        take_counts()
    started, cpu = time.perf_counter(), time.process_time()
    steps[step]()
    facts["cpu_s"] = round(time.process_time() - cpu, 2)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    facts["memory_mb"] = round(memory_mb("VmHWM") - baseline)
    facts["open_files"] = files.most()
    counts = take_counts() if url.startswith("s3://") else {}
    facts["requests"] = sum(count for kind, count in counts.items() if kind != "bytes")
    facts |= counts
    if "bytes" in counts:
        facts["index_bytes"] = sum(file.stat().st_size for file in store.cache.folder.rglob("*.faiss"))
        facts["bytes"] -= facts["index_bytes"]
    return facts


def memory_mb(field: str) -> float:
    """Returns the resident memory of this process (VmRSS), or its peak (VmHWM), in MB."""
    [line] = [
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(field)
    ]
    return int(line.split()[1]) / 1024


class FilesWatch:
    """Samples the number of open file descriptors of this process."""

    def __init__(self) -> None:
        self._most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._most = max(self._most, len(os.listdir("/proc/self/fd")))

    def most(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._most


def run_all(url: str, cache: Path, steps: list[str]) -> list[dict[str, Any]]:
    """Runs each step in a separate process, with an empty node cache."""
    results = []
    for step in steps:
        shutil.rmtree(cache, ignore_errors=True)
        environment = {**os.environ, "RIPTIDE_CACHE": str(cache)}
        command = [sys.executable, "-m", "benchmarks.many_parts", "--step", step, "--store", url]
        answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.append({"step": step, **json.loads(answer.splitlines()[-1])})
        print(results[-1], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--store", "", "folder for the store, which is made if it does not exist")
    parser.add("--parts", 10_000, "parts of the corpus")
    parser.add("--full-parts", False, "parts of 10,000 passages and vectors of 384 dimensions, instead of 10 rows")
    parser.add("--s3", False, "measure on moto, which begins with the objects of the store")
    parser.add("--steps", list(STEPS), "steps to measure")
    parser.add("--step", "", "run one step on the store")
    options = parser.parse_args()
    if options.step:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_step(options.step, options.store, Path(folder))))
        return
    root = Path(options.store)
    if not root.exists():
        os.environ["RIPTIDE_CACHE"] = f"{root}.cache"
        started = time.perf_counter()
        write_store(root, StoreShape(options.parts, **(FULL_PARTS if options.full_parts else {})))
        print(f"wrote the store in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    cache = Path(f"{root}.cache")
    if options.s3:
        with counting_s3(root):
            results = run_all("s3://store", cache, options.steps)
    else:
        results = run_all(str(root), cache, options.steps)
    print(f"{cpu_name()}; {options.parts:,} parts of {10_000 if options.full_parts else 10:,} rows")
    kinds = ["requests", "LIST", "GET", "HEAD", "PUT", "POST", "DELETE"] * options.s3
    columns = ["seconds", "cpu_s", "memory_mb", "open_files", *kinds, *(["bytes", "index_bytes"] * options.s3)]
    rows, excess = [], False
    for each in results:
        budget = COLD_QUERY if options.full_parts and each["step"] == "search" else STEPS[each["step"]]
        exceeded = budget.excess(options.parts, each)
        excess = excess or bool(exceeded)
        verdict = f"no: {', '.join(exceeded)}" if exceeded else "yes"
        rows.append([each["step"], *(each.get(column, 0) for column in columns), budget, verdict])
    print(markdown_table(["step", *columns, "budget of requests; of time", "within budget"], rows))
    sys.exit(int(excess))


if __name__ == "__main__":
    main()
