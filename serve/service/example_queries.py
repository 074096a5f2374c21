"""The example queries that the page offers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store

MAX_EXAMPLES = 12  # maximum number of lines in a file
MAX_CHARACTERS = 300  # maximum number of characters of an example
MAX_FILE_BYTES = 64 << 10
NUM_QUERIES = 6  # number of examples that are taken from a query set


def read_examples(store: Store, source: str | None) -> list[str]:
    """Reads the example queries of a service.

    Args:
        store: The store of the service.
        source: A text file with one query per line, or queries/NAME of the store, of which some are taken at equal
            distances. None: no examples, as queries may be private.

    Raises:
        InputError: If the file or the query set is missing, or if a query of the file cannot be an example.
    """
    if source is None:
        return []
    kind, name = Key.parse(source)
    return _examples_of_set(store, name) if kind == "queries" and name else _examples_of_file(source)


def _examples_of_set(store: Store, name: str) -> list[str]:
    texts = Queries.open(store, name).table["text"]
    rows = np.linspace(0, len(texts), NUM_QUERIES, endpoint=False).astype(int)
    chosen = dict.fromkeys(text.as_py().strip() for text in texts.take(rows)) if len(texts) else {}
    return [text for text in chosen if 0 < len(text) <= MAX_CHARACTERS]


def _examples_of_file(file: str) -> list[str]:
    origin = f"{Parameter('examples', file)}"
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputError(f"{origin}: expected up to {MAX_FILE_BYTES:,} bytes of text")
        lines = content.decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise InputError(f"{origin}: no such file; give a text file, or queries/NAME of the store") from None
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{origin}: cannot be read as text in UTF-8") from None
    examples = {line.strip(): number for number, line in enumerate(lines, 1) if line.strip()}
    for text, number in examples.items():
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"{origin}, line {number}: expected up to {MAX_CHARACTERS} characters, found {len(text):,}"
            )
    if not 1 <= len(examples) <= MAX_EXAMPLES:
        raise InputError(f"{origin}: expected 1 to {MAX_EXAMPLES} queries, one per line, found {len(examples):,}")
    return list(examples)
