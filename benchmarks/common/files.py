"""Reads and writes data sets in BEIR form, and writes figures as JSON."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

QRELS_HEADER = "query-id\tcorpus-id\tscore"


class Judgement(NamedTuple):
    """A line of a file of judgements. The score is kept as it is written; a passage is relevant if it is above 0."""

    query: str
    passage: str
    score: str = "1"


def read_documents(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the documents of a file of JSON lines: of FILE.gz if there is one, or of FILE."""
    compressed = file if file.suffix == ".gz" else file.with_name(f"{file.name}.gz")
    is_compressed = compressed.exists()
    with gzip.open(compressed, "rt", encoding="utf-8") if is_compressed else open(file, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


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


def write_json(file: Path | str, document: Any, indent: int | None = 1) -> None:
    """Writes a file of figures, which appears whole, and its folder.

    Args:
        file: The file.
        document: The figures.
        indent: Spaces per level; None: all in one line.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(document, indent=indent) + "\n")
    os.replace(partial, file)
