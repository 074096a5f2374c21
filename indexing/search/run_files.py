"""Reads and writes run files in TREC format or JSON Lines (for ids with white space), by the file extension."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.files.raw import FilePiece, Lines, short_repr
from riptide.indexing.files.rows import json_objects, text_lines
from riptide.indexing.store.result_files import atomic_files

JSON_LINES = ".jsonl"  # the file extension of JSON Lines; files with other extensions are in TREC format
LINES_AT_ONCE = 1 << 18
_UNFIT = r"^$|[\s\pZ\x0b\x1c-\x1f\x{85}]"  # an empty id, or an id with white space as str.split defines it


def check_run_file(path: str, query_ids: Sequence[str], corpus: Corpus, *, by_document: bool) -> None:
    """Raises InputError if an id cannot be written to a run file; called before the search.

    Args:
        path: The file.
        query_ids: The ids of the queries.
        corpus: The corpus.
        by_document: Whether the hits are documents, not passages.

    Raises:
        InputError: If the form is TREC's, and an id of a query or of the corpus is empty or has white space.
    """
    if is_json_lines(path):
        return
    noun, column = ("document", "document") if by_document else ("passage", "id")
    of_corpus = (corpus.table(part).column(column) for part in corpus.parts)
    for owner, columns in (("query", [pa.array(query_ids, pa.string())]), (noun, of_corpus)):
        for ids in columns:
            unfit = ids.filter(pc.match_substring_regex(ids, _UNFIT))
            if len(unfit):
                raise _unfit_error(path, owner, unfit[0].as_py())


def is_json_lines(path: str) -> bool:
    """Returns whether a run file is in JSON Lines format, by its extension."""
    return path.removesuffix(".gz").endswith(JSON_LINES)


def write_run_file(tables: Iterable[pa.Table], path: str, tag: str, *, overwrite: bool = False) -> None:
    """Writes a run file in the format of its extension, by `write_trec` or `write_json_lines`.

    tag: Name of the run, for TREC's form.
    """
    if is_json_lines(path):
        write_json_lines(tables, path, overwrite=overwrite)
    else:
        write_trec(tables, path, tag, overwrite=overwrite)


def write_trec(tables: Iterable[pa.Table], path: str, tag: str, *, overwrite: bool = False) -> None:
    """Writes a run file in TREC format, `query Q0 passage rank score tag` lines; it appears when it is complete.

    Tools that read TREC files sort by score and order equal scores in their own way. So a score that equals the
    previous one is written as the next smaller float32.

    Args:
        tables: Blocks of a run, in order.
        path: The file.
        tag: Name of the run.
        overwrite: Replace a file that has other content.

    Raises:
        InputError: If an id is empty or contains white space, or if the file exists with other content.
    """

    def write_hit(query: str, id: str, rank: int, score: np.float32) -> str:
        line = f"{query} Q0 {id} {rank} {score} {tag}"
        if len(line.split()) != 6:
            owner, unfit = ("passage", id) if query.split() == [query] else ("query", query)
            raise _unfit_error(path, owner, unfit)
        return line

    _write_lines(tables, path, write_hit, overwrite=overwrite)


def write_json_lines(tables: Iterable[pa.Table], path: str, *, overwrite: bool = False) -> None:
    """Writes JSON Lines, `{"query_id": …, "id": …, "rank": …, "score": …}`, with the scores of `write_trec`.

    Args:
        tables: Blocks of a run, in order.
        path: The file.
        overwrite: Replace a file that has other content.

    Raises:
        InputError: If the file exists with other content.
    """

    def write_hit(query: str, id: str, rank: int, score: np.float32) -> str:
        ids = json.dumps({"query_id": query, "id": id}, ensure_ascii=False)
        return f'{ids[:-1]}, "rank": {rank}, "score": {score}}}'

    _write_lines(tables, path, write_hit, overwrite=overwrite)


def _write_lines(
    tables: Iterable[pa.Table], path: str, write_hit: Callable[[str, str, int, np.float32], str], *, overwrite: bool
) -> None:
    """Writes the line that `write_hit(query_id, id, rank from 1, score)` returns for each hit."""
    with atomic_files([path], overwrite=overwrite) as [temporary], open(temporary, "w", encoding="utf-8") as file:
        for table in tables:
            query_ids, ids = table["query_id"].to_pylist(), table["id"].to_pylist()
            starts = _first_positions(query_ids)
            ranks = np.arange(len(ids)) - np.repeat(starts, np.diff([*starts, len(ids)]))
            scores = strictly_falling(table["score"].to_numpy(), ranks)
            for query, id, rank, score in zip(query_ids, ids, ranks.tolist(), scores, strict=True):
                file.write(write_hit(query, id, rank + 1, score) + "\n")


def _unfit_error(path: str, owner: str, id: str) -> InputError:
    """Returns the error for an id that TREC format cannot hold. owner: "query", "passage" or "document"."""
    return InputError(
        f"{path}: the {owner} id {short_repr(id)} is empty or has white space, which TREC's columns cannot hold; give "
        f"the file the ending {JSON_LINES}: it is then written as JSON lines, which evaluate and compare read too"
    )


def strictly_falling(scores: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Returns float32 scores that decrease strictly within each query; an equal score becomes the next lower float32.

    Args:
        scores: Scores in the order of queries and ranks, [n].
        ranks: Rank of each score, [n]; 0 starts a query.
    """
    falling_scores = scores.astype(np.float32).copy()
    is_not_below = (falling_scores[1:] >= falling_scores[:-1]) & (ranks[1:] > 0)
    while is_not_below.any():
        for at in np.flatnonzero(is_not_below) + 1:
            if falling_scores[at] >= falling_scores[at - 1]:
                falling_scores[at] = np.nextafter(falling_scores[at - 1], np.float32(-np.inf))
        is_not_below = (falling_scores[1:] >= falling_scores[:-1]) & (ranks[1:] > 0)
    return falling_scores


def read_run_file(path: str) -> pa.Table:
    """Reads a run file in either format as a table with columns query_id, id, score.

    Raises:
        InputError: With the line, for a bad file.
    """
    read_hits = _json_hits if is_json_lines(path) else _trec_hits
    lines = Lines(path)
    queries: list[str] = []
    ids: list[str] = []
    scores: list[float] = []
    while piece := lines.take(LINES_AT_ONCE):
        for query, id, score in read_hits(path, piece):
            queries.append(query)
            ids.append(id)
            scores.append(score)
    if not queries:
        raise InputError(f"{path}: the run is empty; search again")
    table = pa.table({"query_id": queries, "id": ids, "score": pa.array(scores, pa.float64())})
    # Numbers of pairs find duplicates; pyarrow's group_by would import pyarrow.dataset, which takes 0.3 s.
    query_codes, id_codes = (table[name].combine_chunks().dictionary_encode() for name in ("query_id", "id"))
    pairs = query_codes.indices.to_numpy().astype(np.int64) * len(id_codes.dictionary) + id_codes.indices.to_numpy()
    if len(np.unique(pairs)) < len(table):
        seen: set[tuple[str, str]] = set()
        for number, hit in enumerate(zip(queries, ids, strict=True), 1):
            if hit in seen:
                query, id = hit
                raise InputError(f"{path}:{number}: passage {id!r} comes a second time for query {query!r}; remove one")
            seen.add(hit)
    return table


def _trec_hits(path: str, piece: FilePiece) -> Iterator[tuple[str, str, float]]:
    """Yields (query id, id, score) of each line in TREC format."""
    for number, line in text_lines(piece):
        try:
            query, _, id, _, value, _ = line.split(maxsplit=6)
            score = float(value)
            if math.isnan(score):
                raise ValueError
        except ValueError:
            raise InputError(
                f"{path}:{number}: found {line[:60]!r}, expected `query Q0 passage rank score tag`; fix the line"
            ) from None
        yield query, id, score


def _json_hits(path: str, piece: FilePiece) -> Iterator[tuple[str, str, float]]:
    """Yields (query id, id, score) of each line in JSON Lines format; ignores other fields, such as the rank."""
    for number, hit in json_objects(piece):
        query, id, score = hit.get("query_id"), hit.get("id"), hit.get("score")
        if type(query) is not str or type(id) is not str or not isinstance(score, int | float):
            raise InputError(
                f"{path}:{number}: found {short_repr(json.dumps(hit, ensure_ascii=False))}, expected an object with "
                "the texts query_id and id and the number score; fix the line"
            )
        yield query, id, float(score)


def _first_positions(query_ids: Sequence[str]) -> np.ndarray:
    """Returns the position of the first hit of each query."""
    return np.array([i for i, query in enumerate(query_ids) if i == 0 or query != query_ids[i - 1]], np.int64)
