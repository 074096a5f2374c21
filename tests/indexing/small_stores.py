"""Small corpora and BM25 indexes in a store, as jobs leave them, built in this process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from runners import InlineRunner

from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.corpus.ids import merge_bucket, sorted_hashes
from riptide.indexing.formats.parse import CORPUS_SCHEMA
from riptide.indexing.lucene.bm25_index import Bm25, BuildBm25Work
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store, generation
from riptide.indexing.work.work import run_work


def build_corpus(root: Path, generations: Sequence[Sequence[list[str]]], deleted: Mapping[int, list[int]]) -> Corpus:
    """Builds a corpus in the store `root`.

    Args:
        root: Folder of the store.
        generations: For each generation, for each of its parts, the ids of the passages; see `passages_of`.
        deleted: For each generation that deletes passages, their rows.
    """
    store, row = Store(str(root)), 0
    for number, parts in enumerate(generations):
        with store.create("corpus", generation(number), config={"limit": None}) as draft:
            _commit_parts(draft, [passages_of(ids) for ids in parts], row)
            if number in deleted:
                _commit_deleted(draft, deleted[number])
        row += sum(map(len, parts))
    return Corpus.open(store)


def build_corpus_of(root: Path, generations: Sequence[Sequence[str]], deleted: Mapping[int, Sequence[int]]) -> Corpus:
    """Builds a corpus in the store `root` whose passages have these metadata; row n has the id i<n> and the text w<n>.

    Args:
        root: Folder of the store.
        generations: For each generation, of one part, the metadata of its passages: JSON objects, or "".
        deleted: For each generation that deletes passages, their rows.
    """
    store, row = Store(str(root)), 0
    for number, metadata in enumerate(generations):
        rows = range(row, row + len(metadata))
        columns = [[f"i{row}" for row in rows], [""] * len(rows), [f"w{row}" for row in rows], metadata]
        with store.create("corpus", generation(number), config={"limit": None}) as draft:
            _commit_parts(draft, [pa.table(columns, schema=CORPUS_SCHEMA)], row)
            if number in deleted:
                _commit_deleted(draft, deleted[number])
        row += len(metadata)
    return Corpus.open(store)


def passages_of(ids: list[str]) -> pa.Table:
    """Returns passages with these ids, and titles and texts that contain the id."""
    columns = [ids, [f"T{id}" for id in ids], [f"text {id}" for id in ids], [""] * len(ids)]
    return pa.table(columns, schema=CORPUS_SCHEMA)


def extend_corpus(
    root: Path, parts: Sequence[Sequence[str]], deleted: Sequence[int] = (), titles: bool = False
) -> Corpus:
    """Adds a generation to the corpus of the store `root`/store, which is created if there is none.

    Args:
        root: Folder that contains the store.
        parts: For each part, the texts of the passages; row n has the id p<n>.
        deleted: Rows that the generation deletes.
        titles: Use the first word of a text as the title.
    """
    store = Store(str(root / "store"))
    before = Corpus(store.generations("corpus"))
    inputs = {"previous": before.generations[-1]} if before.generations else {}
    number, row = len(before.generations), before.num_rows
    tables = []
    for texts in parts:
        ids = [f"p{row + n}" for n in range(len(texts))]
        split = [text.split(" ", 1) if titles and " " in text else ["", text] for text in texts]
        columns = [ids, [title for title, _ in split], [text for _, text in split], [""] * len(texts)]
        tables.append(pa.table(columns, schema=CORPUS_SCHEMA))
        row += len(texts)
    with store.create("corpus", generation(number), inputs=inputs, by_content=True) as draft:
        _commit_parts(draft, tables, before.num_rows)
        if deleted:
            _commit_deleted(draft, deleted)
    return Corpus.open(store)


def build_bm25(corpus: Corpus, root: Path, name: str = "bm25", **options: Any) -> Bm25:
    """Builds or extends bm25/NAME in the store `root`/store; `options` are those of BuildBm25Work."""
    store = Store(str(root / "store"))
    work = BuildBm25Work(store, corpus, name, **options)
    if not work.is_complete:
        work.pin_versions(shuffling_runner())
        run_work(store, work, shuffling_runner())
    return Bm25.open(store, work.name, corpus)


def shuffling_runner() -> InlineRunner:
    """Returns a runner that runs items in a random order, and claims three workers of two cores each."""
    return InlineRunner(cores=2, order=shuffled)


def shuffled(items: Iterable[Any]) -> list[Any]:
    """Returns the items in a random order, the same in each call."""
    items = list(items)
    return random.Random(0).sample(items, len(items))


def _commit_parts(draft: Draft, tables: Sequence[pa.Table], first_row: int) -> None:
    """Commits the parts of a generation, and its ids."""
    files, row = [], first_row
    with tempfile.TemporaryDirectory() as folder:
        for number, table in enumerate(tables):
            name = f"part-{number:05d}"
            draft.commit(name, ".arrow", lambda path, table=table: write_table(table, path), rows=len(table))
            np.save(Path(folder) / f"{name}.npy", sorted_hashes(table["id"].to_pylist()))
            files.append((Path(folder) / f"{name}.npy", row))
            row += len(table)
        ids = merge_bucket(files, 0, 1) if files else np.empty((2, 0), np.uint64)
    draft.commit("ids-00000", ".npy", lambda path: np.save(path, ids), rows=ids.shape[1])


def _commit_deleted(draft: Draft, rows: Sequence[int]) -> None:
    array = np.array(rows, np.int64)
    draft.commit("deleted", ".npy", lambda path: np.save(path, array), rows=len(array))
