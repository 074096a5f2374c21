"""Measures the memory and the open files that filling an index shard takes, for embeddings of more and more parts.

    python benchmarks/fill_memory.py --parts 100 1000 10000

The shard holds the same number of vectors each time, in parts of equal size, whose objects are written directly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table
from benchmarks.many_parts import FilesWatch, array_bytes, memory_mb, write_artifact


def write_embeddings(root: Path, parts: int, rows: int, dim: int) -> None:
    """Writes embeddings of `rows` rows in `parts` parts."""
    random = np.random.default_rng(0)

    def vectors() -> Iterator[tuple[str, str, bytes, int, dict[str, Any]]]:
        for number in range(parts):
            part = random.normal(size=(rows // parts, dim)).astype(np.float16)
            yield f"part-{number:05d}", ".npy", array_bytes(part), len(part), {}

    notes = {"encoder": "none", "options": {}, "dim": dim, "similarity": "dot"}
    write_artifact(root, "embeddings/E/g0000", {}, {"encoder": {"dim": dim}}, vectors(), notes)


def fill(root: Path) -> dict[str, Any]:
    """Fills a shard with all rows, as the worker of build_index does, and returns its figures."""
    from riptide.indexing.dense.building import FillTask
    from riptide.indexing.dense.faiss_filling import train_quantizer
    from riptide.indexing.dense.faiss_index import write_index
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.store.store import Store
    from riptide.indexing.work.work import WorkUnit
    from riptide.indexing.work.worker_tasks import Allocation, ignore_progress

    store = Store(str(root))
    embeddings = Embeddings("E", store.generations("embeddings", "E"))
    draft = store.create("index", "I")
    trained = train_quantizer(embeddings.take(np.arange(2_000)), "IVF16,SQ4", seed=0, threads=1)
    quantizer = draft.commit("quantizer", ".faiss", lambda path: write_index(trained, path), rows=2_000)
    before, files = memory_mb("VmRSS"), FilesWatch()
    task = FillTask(draft, embeddings, (draft, quantizer))
    unit = WorkUnit(("shard-00000",), embeddings.num_rows, (0, embeddings.num_rows))
    task.open(Allocation(1))(unit, ignore_progress)
    return {"memory_mb": round(memory_mb("VmHWM") - before), "open_files": files.most()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--parts", [100, 1_000, 10_000], "numbers of parts")
    parser.add("--rows", 1_000_000, "rows of the shard")
    parser.add("--dim", 64, "length of the vectors")
    parser.add("--store", "", "measure this store")
    options = parser.parse_args()
    if options.store:
        print(json.dumps(fill(Path(options.store))))
        return
    rows = []
    for parts in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "store"
            write_embeddings(root, parts, options.rows, options.dim)
            command = [sys.executable, "-m", "benchmarks.fill_memory", "--store", str(root)]
            environment = {**os.environ, "RIPTIDE_CACHE": f"{folder}/cache"}
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append([f"{parts:,}", *json.loads(answer.splitlines()[-1]).values()])
            print(rows[-1], file=sys.stderr, flush=True)
    print(f"{cpu_name()}; {options.rows:,} vectors of {options.dim}")
    print(markdown_table(["parts", "memory above the start, MB", "open files"], rows))


if __name__ == "__main__":
    main()
