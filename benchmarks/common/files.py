"""Reads and writes data sets in BEIR form, and writes figures as JSON."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

QRELS_HEADER = "query-id\tcorpus-id\tscore"


class Judgement(NamedTuple):
    """A line of a file of judgements. The score is kept as it is written; a passage is relevant if it is above 0."""

    query: str
    passage: str
    score: str = "1"


def read_documents(file: Path, ids: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the documents of a file of JSON lines: of FILE.gz if there is one, or of FILE.

    Args:
        file: The file.
        ids: The ids of the documents; None: all documents.
    """
    compressed = file if file.suffix == ".gz" else file.with_name(f"{file.name}.gz")
    is_compressed = compressed.exists()
    with gzip.open(compressed, "rt", encoding="utf-8") if is_compressed else open(file, encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            if ids is None or document["_id"] in ids:
                yield document


def read_texts(file: Path | str, count: int) -> list[str]:
    """Returns the first `count` texts of a file of JSON lines; see `read_documents`."""
    return [document["text"] for document in itertools.islice(read_documents(Path(file)), count)]


def write_documents(file: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines, which appears whole, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    with open(partial, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(document) + "\n" for document in documents)
    os.replace(partial, file)


def read_qrels(file: Path) -> list[Judgement]:
    """Returns the judgements of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    return [Judgement(*line.split("\t")) for line in lines]


def write_qrels(file: Path, judgements: Iterable[Judgement]) -> None:
    """Writes a file of judgements, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [QRELS_HEADER, *("\t".join(judgement) for judgement in judgements)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judgements_of(queries: Collection[str], judgements: Iterable[Judgement]) -> list[Judgement]:
    """Returns the judgements of some queries."""
    ids = set(queries)
    return [judgement for judgement in judgements if judgement.query in ids]


def write_data_set(
    folder: Path,
    queries: Iterable[Mapping[str, Any]],
    qrels: Mapping[str, Iterable[Judgement]],
    corpus: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Writes a folder in BEIR form, which appears whole.

    Args:
        folder: The folder.
        queries: The queries.
        qrels: The judgements by split.
        corpus: The passages; None: the folder is a query set.

    Raises:
        SystemExit: If the folder exists.
    """
    if folder.exists():
        raise SystemExit(f"error: {folder}: already exists; give another folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if corpus is not None:
        write_documents(partial / "corpus.jsonl", corpus)
    write_documents(partial / "queries.jsonl", queries)
    for split, judgements in qrels.items():
        write_qrels(partial / "qrels" / f"{split}.tsv", judgements)
    partial.rename(folder)


def write_json(file: Path | str, document: Any, indent: int | None = 1) -> None:
    """Writes a file of figures, which appears whole, and its folder; compressed by gzip if its name ends with .gz.

    Args:
        file: The file.
        document: The figures; paths become texts.
        indent: Spaces per level; None: all in one line.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(document, indent=indent, default=str) + "\n").encode()
    partial = file.with_suffix(".tmp")
    partial.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
    os.replace(partial, file)


def read_json(file: Path) -> Any:
    """Reads a file that `write_json` wrote. Raises OSError, EOFError, zlib.error or ValueError if it is another one."""
    data = file.read_bytes()
    return json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
