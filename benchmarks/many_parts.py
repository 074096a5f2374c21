"""Measures operations on a store with many parts: requests, seconds, memory and open files.

    python benchmarks/many_parts.py --store W --parts 100000            # a local folder
    python benchmarks/many_parts.py --store W --parts 100000 --s3       # the same store on moto

The store has a corpus and embeddings of `--parts` parts of `--rows` rows, whose objects are written directly in the
format of docs/format.md, since the jobs would take hours for them, and an index. Each step runs in
a separate process; the memory is the increase of its resident set above that after the imports, at its peak.
A step that writes changes the store, so it is made again for each kind of storage.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.counting_s3 import counting_s3, take_counts
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table

DIM = 8
DELETED = 1_000
FACTORY, SHARDS = "IVF64,SQ8", 4
PENDING = 10  # parts of the interrupted artifact that are not committed
ENCODER = {"pooling": "mean", "dim": DIM, "model_type": "bert"}
EMBEDDINGS = {"encoder": ENCODER, "numerics": "none"}
STEPS = ("list", "open", "resume", "search", "append", "delete")


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
    from riptide.indexing.store.cache import NodeCache
    from riptide.indexing.store.sealed_json import add_own_hash, begun_document, fingerprint_of
    from riptide.indexing.store.storage import LocalStorage

    folder = root / key
    folder.mkdir(parents=True)
    document = begun_document(key.split("/")[0], inputs, config, by_content)
    identity = fingerprint_of(document)
    (folder / "manifest.begun.json").write_bytes(add_own_hash(document))
    committed = []
    for name, suffix, data, rows, facts in parts:
        digest = hashlib.sha256(data).hexdigest()
        file = f"{name}-{digest[:16]}{suffix}"
        (folder / file).write_bytes(data)
        part = {"name": name, "file": file, "rows": rows, "bytes": len(data), "sha256": digest, "facts": facts}
        (folder / f"{name}.json").write_bytes(add_own_hash({**part, "begun": identity}))
        committed.append(part)
    if not is_complete:
        return
    from riptide.indexing.store.artifact import Draft

    draft = Draft(LocalStorage(str(root)), NodeCache(root / "unused", 1), key, document)
    draft.add_notes(**notes)
    draft.committed_parts = lambda: {part["name"]: _part(part) for part in committed}  # type: ignore[method-assign]
    draft.finish()


def _part(fields: dict[str, Any]) -> Any:
    from riptide.indexing.store.sealed_json import ArtifactPart

    return ArtifactPart(**fields)


def write_store(root: Path, parts: int, rows: int) -> None:
    """Writes the store: corpus/g0000, embeddings/E/g0000, index/I, and embeddings/F, of which PENDING parts lack."""
    from riptide.indexing.corpus.corpus import Corpus, save_array
    from riptide.indexing.corpus.ids import merge_bucket, num_buckets, sorted_hashes
    from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
    from riptide.indexing.dense.faiss_index import faiss, fill_shard, train_quantizer
    from riptide.indexing.formats.sources import detect_source
    from riptide.indexing.store.chain import split_range
    from riptide.indexing.store.store import Store
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.indexing.work.work import run_work

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "passages.jsonl"
        source.write_text("".join(json.dumps({"_id": f"p{n}", "text": f"text {n}"}) + "\n" for n in range(rows)))
        small = Store(f"{folder}/small")
        options = ImportOptions(part_size=rows)
        [one] = run_work(
            small, ImportCorpusWork(small, detect_source(str(source)), options, append=False), LocalRunner()
        )
        table, part, config = Corpus([one]).table(Corpus([one]).parts[0]), one.part("part-00000"), one.config
        facts = part.facts
        ids: list[tuple[Path, int]] = []
        hashes = np.empty((2, parts * rows), np.uint64)

        def corpus_parts() -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
            for number in range(parts):
                names = [f"p{number * rows + n}" for n in range(rows)]
                named = table.set_column(0, "id", [names])
                [[file, _, count, digest]] = facts["source"]
                part_facts = {**facts, "source": [[file, 1 + number * rows, count, digest]]}
                yield f"part-{number:05d}", ".arrow", _table_bytes(named), rows, part_facts
                part_hashes = sorted_hashes(names)
                yield f"hashes-{number:05d}", ".npy", array_bytes(part_hashes), rows, {}
                hashes[:, number * rows : (number + 1) * rows] = part_hashes + np.array(
                    [[0], [number * rows]], np.uint64
                )
            order = np.argsort(hashes[0], kind="stable")
            whole = Path(folder) / "whole.npy"
            save_array(np.ascontiguousarray(hashes[:, order]), whole)
            ids.append((whole, 0))
            buckets = num_buckets(parts * rows)
            for bucket in range(buckets):
                merged = merge_bucket(ids, bucket, buckets)
                yield f"ids-{bucket:05d}", ".npy", array_bytes(merged), merged.shape[1], {}

        write_artifact(root, "corpus/g0000", {}, config, corpus_parts(), {}, by_content=True)
        store = Store(str(root))
        corpus = Corpus.open(store)
        random, all_vectors = np.random.default_rng(0), []

        def vector_parts(count: int) -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
            for each in corpus.parts[:count]:
                vectors = random.normal(size=(rows, DIM)).astype(np.float16)
                if count == parts:
                    all_vectors.append(vectors)
                cuts = {"corpus_sha256": each.part.sha256, "cuts": {"cut": 0, "longest": 10, "uncounted": 0}}
                yield each.part.name, ".npy", array_bytes(vectors), rows, cuts

        inputs = {"corpus": corpus.generations[0]}
        notes = {"encoder": "none", "options": {}, "dim": DIM, "similarity": "dot"}
        write_artifact(root, "embeddings/E/g0000", inputs, EMBEDDINGS, vector_parts(parts), notes)
        other = {**EMBEDDINGS, "numerics": "other"}
        write_artifact(
            root, "embeddings/F/g0000", inputs, other, vector_parts(parts - PENDING), notes, is_complete=False
        )
    [made] = store.generations("embeddings", "E")
    vectors = np.concatenate(all_vectors)
    trained = train_quantizer(vectors[:10_000], FACTORY, seed=0)

    def index_parts() -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
        yield "quantizer", ".faiss", faiss.serialize_index(trained).tobytes(), 10_000, {}
        for number, (first, end) in enumerate(split_range(0, len(vectors), SHARDS)):
            filled = fill_shard(trained, [vectors[first:end]], first)
            data = faiss.serialize_index(filled).tobytes()
            yield f"shard-{number:05d}", ".faiss", data, end - first, {"first_row": first, "end": end}

    settings = {"embeddings": "E", "factory": FACTORY, "shards": SHARDS, "recall": 0.5, "seed": 0}
    notes = {"nprobe": 4, "depth": 100, "recall": {"100": 0.9}, "reaches_recall": True}
    write_artifact(root, "index/I/g0000", {"embeddings": made}, settings, index_parts(), notes)


def _table_bytes(table: Any) -> bytes:
    """Returns the bytes that `write_table` writes."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    data: bytes = sink.getvalue().to_pybytes()
    return data


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

        config = {**EMBEDDINGS, "numerics": "other"}
        target = ArtifactTarget("embeddings", "F/g0000", {"corpus": corpus.generations[0]}, config)
        units = [WorkUnit((part.part.name,), part.part.rows, None) for part in corpus.parts]

        class Fill(BaseWork):
            """The interrupted encoding, without an encoder."""

            def __init__(self) -> None:
                self.targets = [target]
                self.stages = [TaskStage("encode", "passages", units, lambda drafts: FillTask(drafts[0]))]

        run_work(store, Fill(), runner)

    class FillTask:
        """Commits vectors of zeros."""

        from riptide.indexing.work.worker_tasks import ONE_CORE as resources

        def __init__(self, draft: Any):
            self.draft = draft

        def open(self, allocation: Any) -> Any:
            def fill(unit: WorkUnit, report: Any) -> None:
                vectors = np.zeros((unit.rows, DIM), np.float16)
                self.draft.commit(unit.names[0], ".npy", lambda path: save_array(vectors, path), rows=unit.rows)

            return fill

    def append() -> None:
        source = folder / "more.jsonl"
        source.write_text("".join(json.dumps({"_id": f"more{n}", "text": "more"}) + "\n" for n in range(10)))
        run_work(store, ImportCorpusWork(store, detect_source(str(source)), ImportOptions(), append=True), runner)

    def delete() -> None:
        corpus = Corpus.open(store)
        step = corpus.generations[0].rows // DELETED
        ids = folder / "ids.txt"
        ids.write_text("".join(f"p{n * step}\n" for n in range(DELETED)))
        work = ImportCorpusWork(store, None, ImportOptions(), append=False, delete=str(ids))
        run_work(store, work, runner)

    def search() -> None:
        corpus, embeddings, index = open_all()
        query = np.ones((1, DIM), np.float32)
        hits = search_dense(index, OpenShards(embeddings, corpus.deleted), query, 10, runner)
        facts["hits"] = len(corpus.passages(hits.rows[0]))

    steps = {"list": list_all, "open": open_all, "resume": resume, "append": append, "delete": delete, "search": search}
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
    if url.startswith("s3://"):
        facts |= take_counts()
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
    parser.add("--rows", 10, "rows of a part")
    parser.add("--s3", False, "copy the store to moto, and measure there")
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
        write_store(root, options.parts, options.rows)
        print(f"wrote the store in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    cache = Path(f"{root}.cache")
    if options.s3:
        with counting_s3(root):
            results = run_all("s3://store", cache, options.steps)
    else:
        results = run_all(str(root), cache, options.steps)
    columns = [
        "step",
        "seconds",
        "cpu_s",
        "memory_mb",
        "open_files",
        *(["GET", "HEAD", "LIST", "PUT", "bytes"] * options.s3),
    ]
    print(f"{cpu_name()}; {options.parts:,} parts of {options.rows} rows")
    print(markdown_table(columns, [[each.get(column, 0) for column in columns] for each in results]))


if __name__ == "__main__":
    main()
