"""Question sets: queries/NAME holds the questions, and the judgements (qrels) of each split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from indexing.artifact import Artifact, differences
from indexing.corpus import Corpus, write_table
from indexing.importing import file_identity
from indexing.parse import read_qrels, read_queries
from indexing.sources import Source
from indexing.store import Store
from retriever.errors import InputError

ALL = "all"  # the split that every set has: all of its queries


class Split(NamedTuple):
    """Some queries, in the order of their file."""

    ids: list[str]
    texts: list[str]


class Queries:
    """A complete question set, for reading."""

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self.splits = sorted(part.name.removeprefix("qrels-") for part in _qrels_parts(artifact))

    @classmethod
    def open(cls, store: Store, name: str | None = None) -> Queries:
        """`name` may be left out where the store has one set only. Raises InputError."""
        return cls(store.open("queries", store.only("queries", name)))

    @property
    def table(self) -> pa.Table:
        """Columns id, text, metadata (JSON text or "")."""
        parts = [
            pa.ipc.open_file(pa.memory_map(str(self.artifact.local(p)))).read_all() for p in self.artifact.group("part")
        ]
        return pa.concat_tables(parts)

    def split(self, split: str, limit: int | None = None) -> Split:
        """The first `limit` queries that the split's qrels judge ("all": every one). Raises InputError."""
        table = self.table.select(["id", "text"])
        if split != ALL:
            table = table.filter(pc.is_in(table["id"], self.qrels(split)["query_id"].combine_chunks().unique()))
        table = table.slice(0, limit)
        return Split(table["id"].to_pylist(), table["text"].to_pylist())

    def qrels(self, split: str) -> pa.Table:
        """Columns query_id, corpus_id, score (int32). Raises InputError where the split has none."""
        if split not in self.splits:
            have = ", ".join(self.splits) or "no split"
            raise InputError(
                f"{self.artifact.url}: no split {split!r} with qrels; it has {have} (and {ALL}, without qrels)"
            )
        return pq.read_table(self.artifact.local(f"qrels-{split}"))


def import_queries(store: Store, source: Source, name: str, *, limit: int | None = None) -> Queries:
    """Commit queries/NAME from a source's question and qrels files; find it done.

    Every judged query and passage must be known; with `limit` (the first so many queries), or over a corpus that was
    imported with one, judgements of what was left out are left out too. Raises InputError with file and line.
    """
    corpus = Corpus.open(store)
    files = [*source.queries, *source.qrels.values()]
    config = {"format": source.format, "limit": limit, "source": [file_identity(file) for file in files]}
    if name in store.names("queries"):
        found = Queries.open(store, name)
        if found.artifact.config != config:
            changed = differences(found.artifact.config, config)
            raise InputError(f"{found.artifact.url} was imported otherwise ({changed}): give it another name")
        return found
    # Everything is read and checked before the set is begun, so that a mended source is not refused as another one.
    table = pa.concat_tables(read_queries(source)).slice(0, limit)
    ids = table["id"].to_pylist()
    _refuse_doubles(source, ids)
    partial = limit is not None or any(g.config["limit"] is not None for g in corpus.generations)
    qrels = {split: _checked_qrels(file, ids, corpus, partial) for split, file in sorted(source.qrels.items())}
    inputs = {"corpus": _judged_generation(corpus, qrels.values())}
    with store.create("queries", name, inputs=inputs, config=config, by_content=True) as draft:
        draft.commit("part-00000", ".arrow", lambda path: write_table(table, path), rows=len(table))
        for split, judged in qrels.items():
            if len(judged):
                draft.commit(f"qrels-{split}", ".parquet", _parquet_writer(judged), rows=len(judged))
    return Queries.open(store, name)


def _judged_generation(corpus: Corpus, qrels: Iterable[pa.Table]) -> Artifact:
    """The first generation that, with those before it, has all judged passages: the set needs no later one."""
    judged = [table["corpus_id"].combine_chunks().unique().to_pylist() for table in qrels]
    last = max((int(corpus.rows_of(ids).max()) for ids in judged if ids), default=0)
    end = 0
    for artifact in corpus.generations:
        end += artifact.rows
        if last < end:
            return artifact
    return corpus.generations[-1]


def _parquet_writer(table: pa.Table) -> Callable[[Path], None]:
    return lambda path: pq.write_table(table, path, compression="zstd")


def _checked_qrels(file: str, ids: Sequence[str], corpus: Corpus, partial: bool) -> pa.Table:
    qrels = read_qrels(file)
    query_known = pc.is_in(qrels["query_id"], pa.array(ids, pa.string())).to_numpy()
    passages = qrels["corpus_id"].combine_chunks().dictionary_encode()
    known = corpus.rows_of(passages.dictionary.to_pylist()) >= 0
    passage_known = known[passages.indices.to_numpy()]
    if not partial:
        for column, mask, what, where in (
            ("query_id", query_known, "query", "the query file"),
            ("corpus_id", passage_known, "passage", "the corpus"),
        ):
            if not mask.all():
                first = int(np.flatnonzero(~mask)[0])
                more = int((~mask).sum()) - 1
                raise InputError(
                    f"{file}:{qrels['line'][first]}: judges {what} {qrels[column][first].as_py()!r}, which is not in "
                    f"{where}{f' (and {more} more lines like it)' if more else ''}; add the {what} or remove the line"
                )
    return qrels.filter(pa.array(query_known & passage_known)).drop_columns(["line"])


def _refuse_doubles(source: Source, ids: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for number, id in enumerate(ids, 1):
        if id in seen:
            name = Path(source.queries[0]).name if len(source.queries) == 1 else source.name
            raise InputError(
                f"{name}: query id {id!r} comes a second time (as query {number}, first as {seen[id]}); rename one"
            )
        seen[id] = number


def _qrels_parts(artifact: Artifact) -> list:
    return [part for part in artifact.parts if part.name.startswith("qrels-")]
