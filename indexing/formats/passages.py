"""Passages from tables: the rows of CSV, TSV, JSON lines or Parquet, read by the columns that were chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from indexing.formats.columns import ID_NAMES, PassageColumns, listed
from indexing.formats.delimited import read_fields
from indexing.formats.parquet import parquet_names
from indexing.formats.raw import Piece
from indexing.formats.readers import Row, bad, documents, flatten, integer_id, metadata_text, wrong_text
from retriever.errors import InputError

HASH_DIGITS = 32  # hexadecimal, of SHA-256


def hash_id(text: str, title: str = "") -> str:
    """Returns the id of a passage without an id: 32 hexadecimal digits of SHA-256 over its UTF-8 text.

    A title, if there is one, comes first, with a NUL between the two.
    """
    content = f"{title}\0{text}" if title else text
    return hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]


def wanted_columns(columns: PassageColumns) -> list[str] | None:
    """Returns the columns of Parquet that are read; None: all."""
    return None if columns.metadata is None else list(dict.fromkeys((*columns.used, *columns.metadata)))


def read_passages(block: Piece, columns: PassageColumns) -> Iterator[Row]:
    """Yields the passages of a block. Raises InputError with the file and line of an unfit row."""
    if columns.table.delimiter:
        return _delimited(block, columns)
    if block.batch is not None:
        _check_names(block, columns)
    return _named(block, columns)


def _delimited(piece: Piece, columns: PassageColumns) -> Iterator[Row]:
    number_of = {name: number for number, name in enumerate(columns.table.names)}
    used = columns.used
    rest = list(dict.fromkeys(columns.metadata or ()))
    if columns.metadata is None:
        rest = [name for name in number_of if name not in used]
    text, title, id = columns.text, columns.title or columns.text, columns.id or columns.text
    lines, values = read_fields(piece, columns.table, [number_of[name] for name in (id, title, text, *rest)])
    ids, titles, texts = values[:3]
    if not columns.title:
        titles = [""] * len(texts)
    if not columns.id:
        ids = [hash_id(text, title) for title, text in zip(titles, texts, strict=True)]
    elif "" in ids:
        integer_id(piece, lines[ids.index("")], "", columns.id)
    if not rest:
        for line, id, title, text in zip(lines, ids, titles, texts, strict=True):
            yield line, id, title, text, {}
        return
    for line, id, title, text, *others in zip(lines, ids, titles, texts, *values[3:], strict=True):
        fields: dict[str, Any] = {name: value for name, value in zip(rest, others, strict=True) if value}
        if "metadata" in fields:
            fields["metadata"] = metadata_text(piece, line, fields["metadata"])
            fields = flatten(piece, line, fields)
        yield line, id, title, text, fields


def _named(piece: Piece, columns: PassageColumns) -> Iterator[Row]:
    used, metadata = columns.used, columns.metadata
    expects_no_id = columns.id is None
    for line, document in documents(piece):
        if expects_no_id and any(name.lower() in ID_NAMES for name in document):
            name = next(name for name in document if name.lower() in ID_NAMES)
            raise bad(piece, line, f"a field {name!r}", "none, as in the first lines", "name the id by parameter id")
        text = document.get(columns.text)
        if type(text) is not str:
            raise wrong_text(piece, line, columns.text, text)
        title = document.get(columns.title, "") if columns.title else ""
        if type(title) is not str:
            if title is not None:
                raise wrong_text(piece, line, columns.title or "title", title)
            title = ""
        if columns.id:
            id = document.get(columns.id)
            if type(id) is not str or not id:
                id = integer_id(piece, line, id, columns.id)
        else:
            id = hash_id(text, title)
        if metadata is None:
            for name in used:
                document.pop(name, None)
            fields = flatten(piece, line, document) if document else document
        else:
            nested = document.get("metadata")
            named = {**nested, **document} if type(nested) is dict else document
            fields = flatten(piece, line, {name: named[name] for name in metadata if name in named})
        yield line, id, title, text, {name: value for name, value in fields.items() if value is not None}


def _check_names(block: Piece, columns: PassageColumns) -> None:
    """Raises InputError if a file of Parquet lacks a column that the first file has."""
    existing = frozenset(block.batch.schema.names)
    if missing := [name for name in wanted_columns(columns) or columns.used if name not in existing]:
        raise InputError(
            f"{block.file}: found {listed(parquet_names(block.file))}, expected {missing[0]} as in the first file; "
            "rename the column"
        )
