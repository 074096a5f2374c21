"""The format of folders of plain text, Markdown and HTML documents; each file is a passage."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeVar

from riptide.base.errors import InputError, RowError
from riptide.base.wording import list_first
from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns, TableColumns
from riptide.indexing.files.listing import file_identity, walk_files
from riptide.indexing.files.markup import READERS, read_document
from riptide.indexing.files.raw import BOM, FilePiece, check_path, open_input, unreadable_error
from riptide.indexing.files.rows import Row, RowReader, halve_batch
from riptide.indexing.formats.format import CorpusFormat

READS = 16  # files that are read concurrently, since each read from S3 takes about 30 ms
SHOWN_ENDINGS = 5
QUERY_FILES = ("queries.", "qrels/")  # prefixes of files with queries and judgements
T = TypeVar("T")


class DocumentFile(NamedTuple):
    """A document file. name: its path within the folder, which is the passage id; size: in bytes."""

    name: str
    size: int


class FolderListing(NamedTuple):
    """The documents of a folder and its subfolders, and counts of the other files.

    Attributes:
        documents: The documents, sorted by their paths.
        hidden: Number of files that are hidden, or in a hidden folder: a name begins with a dot.
        others: Number of other files, without queries, by ending in lower case; "": without one.
        unread: Number of files that are never opened, by `FolderFile.unread`.
    """

    documents: list[DocumentFile]
    hidden: int
    others: Counter[str]
    unread: Counter[str]


class DocumentRows:
    """Returns the documents of a folder in ranges, without reading the files.

    Args:
        folder: The folder.
        documents: Consecutive documents of the folder.
        first_row: The 1-based number of the first of them.
    """

    def __init__(self, folder: str, documents: Sequence[DocumentFile], first_row: int = 1):
        self.folder, self.documents, self.first_row = folder, documents, first_row
        self.used = 0

    def take(self, num_rows: int, max_bytes: int = sys.maxsize) -> FilePiece | None:
        """Returns the next files within the limits that `Lines.take` has; `batch` has their names and sizes."""
        first, size = self.used, 0
        while self.used < min(len(self.documents), first + num_rows) and size < max_bytes:
            size += max(1, self.documents[self.used].size)
            self.used += 1
        taken = self.documents[first : self.used]
        return FilePiece(self.folder, self.first_row + first, len(taken), size, None, taken) if taken else None


class DocumentFolders(CorpusFormat):
    """The format of folders of documents; a row is a file, which a worker reads."""

    name = "documents"
    title = "Folders of documents"
    endings = tuple(READERS)
    is_compressible = False
    corpus_files = tuple(f"*.{ending}" for ending in READERS)
    is_folder = True
    section: ClassVar[str] = r"""
A folder of plain text (`.txt`), Markdown (`.md`) and HTML (`.html`, `.htm`), also in its subfolders: each file is a
passage. Its id is its path within the folder, with the ending. Files are sorted by their paths.

- `.txt`: the title is the name of the file without its ending; the text is the whole file.
- `.md`: the title is the first heading of level 1 (`#`), otherwise the name; the text is that of CommonMark with
  tables, without front matter (a YAML mapping between lines `---`; other text there is kept). A tag that would hide the
  rest of the document because it has no end tag, such as `<template>` in a sentence, is text.
- `.html`, `.htm`: the title is `<title>`, otherwise the first `<h1>`, otherwise the name; the text is that of `<main>`,
  otherwise of `<body>`, without scripts, `<nav>`, `<footer>` and `<svg>` images with their titles and labels.

A paragraph, a heading, an item, a row of a table or a line of code is a line of the text. A heading that is the title
is not repeated in the text. Hidden files and files with other endings are left out; the import prints how many. So are
pipes, sockets, devices, and symbolic links, except links to files within the folder. A file
without text, with a zero byte or in another encoding than UTF-8 is refused with its name. So is one
that is nested too deep, or takes its parser more than 10 s of CPU time plus 20 s per MiB; ordinary Markdown takes 0.6 s
per MiB, and HTML 0.1 s. A folder that has a corpus of another format, or a table, needs `--format documents`.

`handbook/leave.md`
```markdown
# Leave

Ask *a week* before.

- [Form](https://example.com/form)
```

`handbook/pay/dates.html`
```html
<html><head><title>Pay dates</title></head>
<body><nav>Home</nav><p>Pay comes on the <b>25th</b>.</p><p>Bonuses in May.</p></body></html>
```

`handbook/pay/notes.txt`
```text
Ask Ann about advances.
```
```bash
riptide import-corpus --store data/handbook --source handbook
```

Passages:
```json
{"id": "leave.md", "title": "Leave", "text": "Ask a week before.\nForm", "metadata": {}}
{"id": "pay/dates.html", "title": "Pay dates", "text": "Pay comes on the 25th.\nBonuses in May.", "metadata": {}}
{"id": "pay/notes.txt", "title": "notes", "text": "Ask Ann about advances.", "metadata": {}}
```

Queries with their judgements can be a table `queries.csv` in the folder (`.tsv`, `.jsonl`, `.parquet`), whose passage
ids are these paths.
"""

    def find_corpus(self, names: Sequence[str]) -> list[str]:
        """Returns the paths of documents among the paths of a folder's files."""
        return [name for name in names if not _is_hidden(name) and _file_ending(name) in READERS]

    def identity(self, file: str) -> dict[str, Any]:
        documents = list_documents(file).documents
        digest = hashlib.sha256()
        identities = _map_in_threads(lambda document: file_identity(f"{file}/{document.name}"), documents)
        for document, identity in zip(documents, identities, strict=True):
            digest.update(f"{document.name}\0{identity['bytes']}\0{identity['samples']}\n".encode())
        size = sum(document.size for document in documents)
        name = file.rpartition("/")[2]
        return {"file": name, "bytes": size, "documents": len(documents), "samples": digest.hexdigest()}

    def describe_skipped_files(self, file: str) -> str:
        _, hidden, others, unread = list_documents(file)
        if not hidden and not others and not unread:
            return ""
        counts = [f"{count:,} {f'.{ending}' if ending else 'without one'}" for ending, count in others.most_common()]
        shown = f" ({list_first(counts, SHOWN_ENDINGS)})" if counts else ""
        line = f"left out of {file}: {hidden:,} hidden files, {others.total():,} files with other endings{shown}"
        if unread["link"]:
            line += f", {unread['link']:,} links that lead out of it, to folders or to nothing"
        return line + (f", {unread['special']:,} pipes, sockets or devices" if unread["special"] else "")

    def open_rows(self, file: str, table: TableColumns | None = None) -> RowReader:
        if not (documents := list_documents(file).documents):
            raise InputError(
                f"{file}: found no documents, expected files that end with {_known_endings()}; name a folder"
            )
        return DocumentRows(file, documents)

    def blocks(self, piece: FilePiece, columns: PassageColumns | None = None) -> Iterator[FilePiece]:
        rows = DocumentRows(piece.file, piece.batch, piece.first_line)
        while block := rows.take(piece.rows, limits.BLOCK_BYTES):
            yield block

    def halve(self, block: FilePiece) -> tuple[FilePiece, FilePiece]:
        return halve_batch(block)

    def source_bytes(self, piece: FilePiece) -> int:
        return piece.size

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        files = [f"{block.file}/{document.name}" for document in block.batch]
        for line, (file, data) in enumerate(
            zip(files, _map_in_threads(_read_file, files), strict=True), block.first_line
        ):
            title, text = _parse_document(file, data)
            yield line, file[len(block.file) + 1 :], title, text, {}


DOCUMENTS = DocumentFolders()


def list_documents(folder: str) -> FolderListing:
    """Lists the documents of a folder and its subfolders, local or in a cloud, and counts the other files.

    Raises:
        InputError: If it is not a folder, if it cannot be read, or if the name of a document is not UTF-8.
    """
    documents, hidden, others, unread = [], 0, Counter[str](), Counter[str]()
    for name, size, reason, _ in walk_files(folder):
        ending = _file_ending(name)
        if _is_hidden(name):
            hidden += 1
        elif reason:
            unread[reason] += 1
        elif ending in READERS:
            check_path(f"{folder}/{name}")
            documents.append(DocumentFile(name, size))
        elif not name.startswith(QUERY_FILES):
            others[ending] += 1
    return FolderListing(documents, hidden, others, unread)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name


def _file_ending(name: str) -> str:
    """Returns the file extension in lower case, without the dot; "" for a name without one."""
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return ending.lower() if dot else ""


def _known_endings() -> str:
    return ", ".join(f".{ending}" for ending in READERS)


def _map_in_threads(function: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
    """Yields the result of a function for each item, in order; several threads run the function."""
    iterator = iter(items)
    with ThreadPoolExecutor(READS) as pool:
        while some := list(islice(iterator, 8 * READS)):
            yield from pool.map(function, some)


def _read_file(file: str) -> bytes:
    """Reads the contents of a file. Raises InputError if it cannot be read or is too long."""
    with open_input(file) as opened:
        if (size := opened.size()) > limits.MAX_ROW_BYTES:
            raise RowError(
                f"{file}: found {size:,} bytes, expected at most {limits.MAX_ROW_BYTES >> 20} MiB; cut the document"
            )
        try:
            return opened.read()
        except OSError as error:
            raise unreadable_error(file, error) from None


def _parse_document(file: str, data: bytes) -> tuple[str, str]:
    """Extracts the title and the text of a document. Raises RowError if it is not UTF-8 text, or has no text."""
    data = data.removeprefix(BOM)
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            f"{file}: found invalid UTF-8 (byte 0x{data[error.start]:02x} at byte offset {error.start}), expected a "
            "document in UTF-8; convert the file, or remove it"
        ) from None
    if (zero := source.find("\0")) >= 0:
        raise RowError(f"{file}: found a zero byte at offset {zero}, expected text; remove the file")
    title, text = read_document(file, _file_ending(file), source)
    if not (text := text.strip()):
        raise RowError(f"{file}: found no text, expected some; remove the file, or write text into it")
    return title or file.rpartition("/")[2].rpartition(".")[0], text
