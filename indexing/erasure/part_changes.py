"""Finds the parts of artifacts that hold given rows of the corpus, and writes each again without them.

A row keeps its number, as those of other passages would change otherwise: its passage becomes empty, its vector zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import safe_open

from riptide.indexing.corpus.corpus import Corpus, document_starts, save_array, write_table
from riptide.indexing.sparse.csr_file import SUFFIX, map_vectors, save_vectors
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowParts, split_rows
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.topics.topics_work import FITTED
from riptide.retriever.encoding.sparse_vectors import SparseVectors
from riptide.retriever.topics.model import NO_TOPIC

_TEXTS = ("id", "title", "text", "metadata", "document")  # columns of a corpus in which an erased passage has ""
_OFFSETS = ("start", "end")


@dataclass(frozen=True)
class PartChange:
    """A part of an artifact that is written again.

    Attributes:
        artifact: The artifact.
        name: The name of the part.
        part: The present part; None: the artifact has none of this name.
        suffix: The suffix of its file.
        write: Writes the new file at a path, and returns its number of rows.
        facts: Facts that replace those of the same names.
    """

    artifact: Artifact
    name: str
    part: ArtifactPart | None
    suffix: str
    write: Callable[[Path], int]
    facts: Mapping[str, Any] = field(default_factory=dict)


def corpus_changes(generations: Sequence[Artifact], rows: np.ndarray) -> Iterator[PartChange]:
    """Yields the parts of a corpus to write again: passages, hashes of ids, typed columns and deleted rows.

    Each generation lists the deletion of the rows that it holds, as a release may be of the first generations only.
    Parts of the last generation come first.

    Args:
        generations: All generations of the corpus.
        rows: The erased rows: int64, ascending.
    """
    corpus = Corpus(generations)
    changes: list[PartChange] = []
    for artifact, artifact_rows in _rows_of_generations(corpus, rows):
        present = artifact.find_part("deleted")
        earlier = np.empty(0, np.int64) if present is None else np.load(artifact.local_path(present))
        if len(np.setdiff1d(artifact_rows, earlier)):
            write = functools.partial(_save_array, np.union1d(artifact_rows, earlier))
            changes.append(PartChange(artifact, "deleted", present, ".npy", write))
    for part, _, local_rows in split_rows(corpus.parts, rows):
        artifact, number = part.artifact, part.part.name.rpartition("-")[2]
        # Hashes of the whole raw lines or passages of a small part would allow to guess an erased text.
        facts: dict[str, Any] = {"source": [[*piece[:3], ""] for piece in part.part.facts.get("source", [])]}
        facts |= {name: "" for name in ("content", "titles_digest") if name in part.part.facts}
        changes.append(_change(artifact, part.part, functools.partial(_blank_table, local_rows), facts))
        if hashes := artifact.find_part(f"hashes-{number}"):
            changes.append(_change(artifact, hashes, functools.partial(_drop_hashes, local_rows)))
    for artifact in generations:
        for bucket in artifact.numbered_parts("ids"):
            if np.isin(np.load(artifact.local_path(bucket), mmap_mode="r")[1].astype(np.int64), rows).any():
                changes.append(_change(artifact, bucket, functools.partial(_drop_hashes, rows)))
        for part, file in zip(corpus.parts, artifact.numbered_parts("filters"), strict=False):
            local_rows = rows[(rows >= part.first_row) & (rows < part.end)] - part.first_row
            if len(local_rows):
                changes.append(_change(artifact, file, functools.partial(_blank_table, local_rows)))
    order = {artifact.key: number for number, artifact in enumerate(generations)}
    yield from sorted(changes, key=lambda change: -order[change.artifact.key])


def _rows_of_generations(corpus: Corpus, rows: np.ndarray) -> Iterator[tuple[Artifact, np.ndarray]]:
    """Yields each generation of a corpus that has some of the rows, with these rows."""
    end = 0
    for artifact in corpus.generations:
        first, end = end, end + artifact.rows
        if len(artifact_rows := rows[(rows >= first) & (rows < end)]):
            yield artifact, artifact_rows


def embedding_changes(generations: Sequence[Artifact], rows: np.ndarray) -> Iterator[PartChange]:
    """Yields the parts of embeddings that hold vectors, or topics, of the rows (int64, ascending)."""
    for part, _, local_rows in split_rows(parts := RowParts(generations), rows[rows < parts.num_rows]):
        artifact, number = part.artifact, part.part.name.rpartition("-")[2]
        facts: dict[str, Any] = {name: "" for name in ("broken_id", "corpus_sha256") if name in part.part.facts}
        yield _change(artifact, part.part, functools.partial(_blank_vectors, local_rows), facts)
        if topics := artifact.find_part(f"topics-{number}"):
            yield _change(artifact, topics, functools.partial(_fill_rows, local_rows, NO_TOPIC))


def topic_changes(generations: Sequence[Artifact], rows: np.ndarray) -> Iterator[PartChange]:
    """Yields the parts of topics that hold topics of the rows (int64, ascending)."""
    for part, _, local_rows in split_rows(parts := RowParts(generations), rows[rows < parts.num_rows]):
        yield _change(part.artifact, part.part, functools.partial(_fill_rows, local_rows, NO_TOPIC))
    for artifact in generations:
        fitted = artifact.find_part(FITTED)
        if fitted and np.isin(np.load(artifact.local_path(fitted), mmap_mode="r")[:, 0], rows).any():
            yield _change(artifact, fitted, functools.partial(_drop_fitted, rows))


def table_changes(generations: Sequence[Artifact], rows: np.ndarray) -> Iterator[PartChange]:
    """Yields the Parquet tables with a line for one of the rows (int64, ascending) in their column `row`."""
    for artifact in generations:
        for part in artifact.parts:
            with pq.ParquetFile(artifact.local_path(part)) as file:
                rows_of_part = file.read(["row"])["row"].to_numpy()
            if np.isin(rows_of_part, rows).any():
                yield _change(artifact, part, functools.partial(_drop_lines, rows))


def covers_rows(artifact: Artifact, rows: np.ndarray) -> bool:
    """Returns whether a shard of an index was built from one of the rows: int64, ascending."""
    ranges = ((part.facts["first_row"], part.facts["end"]) for part in artifact.numbered_parts("shard"))
    return any(np.searchsorted(rows, first) < np.searchsorted(rows, end) for first, end in ranges)


def lists_rows(artifact: Artifact, rows: np.ndarray) -> bool:
    """Returns whether one of the rows (int64, ascending) is in a list of rows of the Parquet tables of an artifact."""
    for part in artifact.parts:
        with pq.ParquetFile(artifact.local_path(part)) as file:
            names = [each.name for each in file.schema_arrow if pa.types.is_list(each.type)]
            table = file.read(names)
        lists = (column for column in table.columns if pa.types.is_integer(column.type.value_type))
        if any(np.isin(pc.list_flatten(column).drop_null().to_numpy(), rows).any() for column in lists):
            return True
    return False


def _change(
    artifact: Artifact,
    part: ArtifactPart,
    write: Callable[[Path, Path], int],
    facts: Mapping[str, Any] | None = None,
) -> PartChange:
    """Returns the change of a part by a function of the paths of the present and of the new file."""
    suffix = part.file[part.file.rindex(".") :]
    return PartChange(
        artifact, part.name, part, suffix, lambda path: write(artifact.local_path(part), path), facts or {}
    )


def _blank_table(rows: np.ndarray, source: Path, path: Path) -> int:
    """Writes an Arrow table whose rows have empty texts and no other values."""
    with pa.memory_map(str(source)) as file:
        table = pa.ipc.open_file(file).read_all()
        places, columns = np.arange(len(table)), []
        is_erased = np.isin(places, rows)
        # Taking no place gives a null without a value below it; `if_else` with a null would keep the value.
        kept_places = pa.array(places, mask=is_erased)
        for name, column in zip(table.column_names, table.columns, strict=True):
            values = column.take(kept_places)
            if name in _TEXTS:
                values = values.fill_null("")
            elif name in _OFFSETS:  # rising within a document, so that documents keep their borders
                starts = document_starts(table)
                values = pc.coalesce(values, pa.array(places - starts[np.searchsorted(starts, places, "right") - 1]))
            columns.append(values)
        write_table(pa.table(columns, schema=table.schema), path)
    return len(is_erased)


def _drop_hashes(rows: np.ndarray, source: Path, path: Path) -> int:
    """Writes an array of hashes and rows, uint64 [2, n], without the entries of the rows."""
    hashes = np.load(source)
    hashes = np.ascontiguousarray(hashes[:, ~np.isin(hashes[1].astype(np.int64), rows)])
    return _save_array(hashes, path, hashes.shape[1])


def _blank_vectors(rows: np.ndarray, source: Path, path: Path) -> int:
    """Writes the vectors of a part, dense or sparse; those of the rows are zero."""
    if source.suffix != SUFFIX:
        return _fill_rows(rows, 0, source, path)
    with safe_open(source, "np") as file:
        width, size = int(file.metadata()["width"]), file.get_slice("offsets").get_shape()[0]
    vectors = map_vectors(source, size - 1, width, str(source))
    counts = vectors.counts
    is_erased = np.zeros(len(vectors), bool)
    is_erased[rows] = True
    is_kept = ~np.repeat(is_erased, counts)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(is_erased, 0, counts))])
    save_vectors(SparseVectors(vectors.indices[is_kept], vectors.values[is_kept], offsets, width), path)
    return len(vectors)


def _fill_rows(rows: np.ndarray, value: int, source: Path, path: Path) -> int:
    """Writes an array with a value in the rows."""
    array = np.load(source)
    array[rows] = value
    return _save_array(array, path)


def _drop_fitted(rows: np.ndarray, source: Path, path: Path) -> int:
    """Writes the pairs of row and topic of a fit, int64 [n, 2], without the rows."""
    pairs = np.load(source)
    return _save_array(pairs[~np.isin(pairs[:, 0], rows)], path)


def _drop_lines(rows: np.ndarray, source: Path, path: Path) -> int:
    """Writes a Parquet table without the lines of the rows."""
    with pq.ParquetFile(source) as file:
        table = file.read()
    table = table.filter(pa.array(~np.isin(table["row"].to_numpy(), rows)))
    pq.write_table(table, path, compression="zstd")
    return len(table)


def _save_array(array: np.ndarray, path: Path, rows: int | None = None) -> int:
    save_array(array, path)
    return len(array) if rows is None else rows
