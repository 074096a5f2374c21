"""Finds the files of a corpus, its queries and judgements, and detects their format.

    source = detect_source("data/scifact")             # a folder or a file, local or in a cloud
    queries = detect_query_source("nq-dev.qa.csv")

The formats are those of `riptide.indexing.formats.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter, list_first
from riptide.indexing.files.columns import (
    ColumnChoiceError,
    PassageColumns,
    PassageNames,
    QueryColumns,
    QueryNames,
    describe_passage_columns,
    describe_query_columns,
)
from riptide.indexing.files.listing import is_file, list_files, walk_files
from riptide.indexing.files.start import FileStart, refuse_unreadable
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.registry import FORMATS, find_format, known_endings, table_names
from riptide.indexing.formats.tables import TableFormat

DEFAULT_SPLIT = "test"  # split of judgements whose file name has no split, such as queries.csv


@dataclass(frozen=True)
class ImportSource:
    """The files of a corpus, queries and judgements: paths or addresses, in reading order.

    Attributes:
        format: The format of the corpus, or of the queries if there is no corpus.
        name: The name of the folder, or of the file without its endings.
        corpus: The files of the corpus.
        queries: The files of queries.
        qrels: Split -> file of judgements.
        columns: The columns of the corpus tables; None: the fixed columns of the format.
        query_columns: The columns of the query tables; None: the fixed columns of the format.
        query_source: The queries in the same folder as a corpus, if they have another format than the corpus.
        titles: The file of the titles of MS MARCO's passages; None: they have no titles.
        remembered: A line about columns that are those of an earlier import; "": there are none.
        changes: A warning of columns that are not those of an earlier import; "": there are none.
        has_own_qrels: Whether the judgements are those of the source; False: the caller names their file.
        provenance_split: The split of judgements by the provenance of the queries, if the format has provenance.
    """

    format: CorpusFormat
    name: str
    corpus: tuple[str, ...]
    queries: tuple[str, ...]
    qrels: dict[str, str]
    columns: PassageColumns | None = None
    query_columns: QueryColumns | None = None
    query_source: ImportSource | None = None
    titles: str | None = None
    remembered: str = ""
    changes: str = ""
    has_own_qrels: bool = True
    provenance_split: str = DEFAULT_SPLIT


def detect_source(
    path: str,
    format: str = "auto",
    names: PassageNames | None = None,
    *,
    earlier: Mapping[str, Any] | None = None,
) -> ImportSource:
    """Finds the corpus at a path, with queries and judgements if it is a folder that has them.

    Args:
        path: A folder or file, local or in a cloud. A file may have any name.
        format: The name of a format, or "auto" to detect it from the names in a folder, or a file's ending and first
            line.
        names: Names of the columns, for formats that have some; columns without a name are recognised.
        earlier: The columns of an earlier import of the corpus, as its configuration has them. They count, if the file
            has them, before recognised ones.

    Raises:
        InputError: If nothing, no known format or more than one corpus is found, or if a column cannot be chosen.
    """
    names = names or PassageNames()
    is_named = names != PassageNames()
    requested = _requested_format(format, names)
    path, listing = list_files(path)
    if listing is None:
        corpus_format = requested or _detect_corpus(path, is_named)
        source = ImportSource(
            corpus_format,
            _name_without_endings(path),
            (path,),
            (),
            {},
            titles=_title_file(corpus_format, _title_files_beside(corpus_format, path)),
        )
    else:
        corpus_format, corpus = _find_corpus_files(path, listing, requested)
        if corpus_format.is_folder:
            _refuse_column_names(corpus_format, names)
        elif (
            requested is None
            and not corpus_format.has_columns
            and (is_named or not corpus_format.matches_start(FileStart(corpus[0])))
        ):
            corpus_format = _detect_corpus(corpus[0], only_with_columns=True)
        titles = _title_file(corpus_format, [f"{path}/{name}" for name in listing])
        source = ImportSource(corpus_format, _import_name(path), corpus, (), {}, titles=titles)
        if corpus_format.has_columns or corpus_format.is_folder:
            source = replace(source, query_source=_find_queries_beside(path, listing, names.decode_entities))
        else:
            queries, qrels = _find_queries(path, listing, corpus_format)
            source = replace(source, queries=queries, qrels=qrels)
    named_columns = names
    if earlier is not None:
        if requested is None and not corpus_format.has_columns and _has_columns(source.corpus[0], earlier):
            source = replace(source, format=_detect_corpus(source.corpus[0], only_with_columns=True))
        if isinstance(source.format, TableFormat):
            table = source.format.read_table(source.corpus[0])
            names, line = names.with_earlier_names(source.corpus[0], table, earlier)
            source = replace(source, remembered=line)
    columns = source.format.choose_columns(source.corpus[0], names)
    if earlier is not None and columns is not None:
        source = replace(source, changes=named_columns.describe_changes(source.corpus[0], earlier, columns))
    return replace(source, columns=columns)


def detect_query_source(
    path: str,
    format: str = "auto",
    names: QueryNames | None = None,
    split: str | None = None,
    qrels: str | None = None,
) -> ImportSource:
    """Finds the queries at a path, with their judgements; `corpus` of the result is empty.

    Args:
        path: A folder with query files (with or without a corpus), or a file of any name.
        format: The name of a format, or "auto" to detect it from the file's ending and first line.
        names: Names of the columns, for formats that have some; columns without a name are recognised.
        split: The split of a table's judgements, of those by provenance, or of `qrels`; None: SPLIT of a file named
            queries.SPLIT.csv, or NAME-SPLIT-kilt.jsonl, otherwise "test".
        qrels: A file of judgements, which replace those of the source; None: those of the source.

    Raises:
        InputError: If there are no queries, or a column cannot be chosen.
    """
    names = names or QueryNames()
    is_named = names != QueryNames()
    requested = _requested_format(format, names)
    path, listing = list_files(path)
    if listing is None:
        chosen = requested or _detect_queries(path, is_named)
        source = ImportSource(chosen, _name_without_endings(path), (), (path,), {})
        return _with_query_columns(source, names, split, qrels)
    for candidate in [requested] if requested else [each for each in FORMATS if not each.has_columns]:
        queries, judgements = _find_queries(path, listing, candidate)
        if queries:
            chosen = requested or _detect_queries(queries[0], is_named)
            if chosen.has_columns and not candidate.has_columns:
                break  # `_query_tables` below finds tables, also with other names
            source = ImportSource(chosen, _import_name(path), (), queries, judgements)
            return _with_query_columns(source, names, split, qrels)
    tables = _query_tables(path, listing) if requested is None else None
    if tables is None:
        expected = [f"{each.describe_files(each.query_files)} ({each.name})" for each in FORMATS if each.query_files]
        raise InputError(
            f"{path}: found no queries among {_list_some(listing)}, expected {', '.join(expected)}; or name a file of "
            "queries itself"
        )
    return _with_query_columns(tables, names, split, qrels)


def describe_columns(source: ImportSource) -> list[str]:
    """Returns one line per table that describes the role of each column; no lines for formats with fixed columns.

    A line says what is left out of a folder of documents. A BEIR file is described if it has additional fields, since
    those become metadata.
    """
    lines = []
    if source.corpus and (left_out := source.format.describe_skipped_files(source.corpus[0])):
        lines.append(left_out)
    if source.remembered:
        lines.append(source.remembered)
    if source.corpus and (columns := source.format.shown_columns(source.corpus[0], source.columns)):
        lines.append(describe_passage_columns(source.corpus[0], columns))
    if source.changes:
        lines.append(source.changes)
    if source.titles is not None:
        lines.append(f"titles of {source.corpus[0]}: joined from {source.titles}")
    if source.queries and (shown := source.format.shown_query_columns(source.queries[0], source.query_columns)):
        lines.append(describe_query_columns(source.queries[0], *shown))
    return lines + (describe_columns(source.query_source) if source.query_source else [])


def _has_columns(file: str, earlier: Mapping[str, Any]) -> bool:
    """Returns whether a file is a table with the id, title and text columns of an earlier import."""
    start = FileStart(file)
    tables = [each for each in reversed(FORMATS) if isinstance(each, TableFormat) and each.detects_corpus(start)]
    used = [earlier[role] for role in ("id", "title", "text") if earlier[role]]
    return bool(tables) and not tables[0].read_table(file).missing(used)


def _requested_format(format: str, names: PassageNames | QueryNames) -> CorpusFormat | None:
    """Returns the format that the caller names; None for "auto". Raises InputError for columns of a fixed format."""
    requested = find_format(format)
    if requested is not None:
        _refuse_column_names(requested, names)
    return requested


def _refuse_column_names(format: CorpusFormat, names: PassageNames | QueryNames) -> None:
    """Raises InputError if column names are given for a format with fixed columns."""
    if not format.has_columns and names != type(names)():
        parameter = next(name for name, value in vars(names).items() if value != getattr(type(names)(), name))
        raise InputError(
            f"{Parameter(parameter)}: format {format.name} has fixed columns, expected one of {table_names()}; "
            f"leave it out or choose one of these by {Parameter('format')}"
        )


def _detect_corpus(path: str, only_with_columns: bool) -> CorpusFormat:
    """Detects the format of a corpus file; with `only_with_columns`, only formats with columns count."""
    start, candidates = FileStart(path), _file_formats(only_with_columns=only_with_columns)
    for format in reversed(candidates):
        if format.detects_corpus(start):
            return format
    raise _unknown_ending_error(start, candidates)


def _detect_queries(path: str, only_with_columns: bool) -> CorpusFormat:
    """Detects the format of a query file; with `only_with_columns`, only formats with columns count."""
    start, candidates = FileStart(path), _file_formats(only_with_columns=only_with_columns)
    for format in reversed(candidates):
        if format.detects_queries(start):
            return format
    raise _unknown_ending_error(start, candidates)


def _file_formats(*, only_with_columns: bool = False) -> list[CorpusFormat]:
    """Returns the formats whose corpus is a file, or only those of them whose columns can be named."""
    return [format for format in FORMATS if not format.is_folder and (format.has_columns or not only_with_columns)]


def _unknown_ending_error(start: FileStart, candidates: Sequence[CorpusFormat]) -> InputError:
    """Returns the error for a file that no format detects."""
    expected = known_endings(candidates)
    refuse_unreadable(start.path, expected)
    actual = f"the ending .{start.ending}" if start.ending else "no ending"
    return InputError(f"{start.path}: found {actual}, expected {expected}; name the format")


def _find_corpus_files(
    path: str, listing: list[str], requested_format: CorpusFormat | None
) -> tuple[CorpusFormat, tuple[str, ...]]:
    """Returns the format and the files of a folder's corpus; for a format of folders, the folder itself."""
    if requested_format is not None and requested_format.is_folder:
        return requested_format, (path,)
    candidates = [requested_format] if requested_format else _file_formats()
    matches = [(each, names) for each in candidates if (names := each.find_corpus(listing))]
    if requested_format is None:
        matches = [(each, names) for each, names in matches if not each.is_generic] or matches
    if not matches:
        if requested_format is None and (format := _folder_format(path, listing)):
            return format, (path,)
        raise _no_corpus_error(path, listing, requested_format)
    if len(matches) > 1:
        corpora = ", ".join(f"{each.name}: {_list_some(files)}" for each, files in matches)
        raise InputError(
            f"{path}: found several corpora ({corpora}), expected one; say which format, or name the file itself"
        )
    [(chosen, files)] = matches
    if len(files) > 1 and not chosen.has_many_files:
        raise InputError(f"{path}: found {' and '.join(files)}, expected one of them; remove or rename the other")
    return chosen, tuple(f"{path}/{name}" for name in files)


def _folder_format(path: str, listing: list[str]) -> CorpusFormat | None:
    """Returns the format of a folder of documents; None without documents, or if a table may be the corpus."""
    if _possible_files(listing):
        return None
    below = [each.name for each in walk_files(path) if not each.unread]
    return next((each for each in FORMATS if each.is_folder and each.find_corpus(below)), None)


def _possible_files(listing: list[str]) -> list[str]:
    """Returns the files of a folder, except queries, that have a file extension of a corpus format."""
    queries = {name for each in FORMATS for name in each.find_queries(listing)}
    files = [name for name in listing if "/" not in name and name not in queries]
    return [name for name in files if any(each.has_ending(FileStart(name)) for each in _file_formats())]


def _no_corpus_error(path: str, listing: list[str], requested_format: CorpusFormat | None) -> InputError:
    """Returns the error for a folder without a corpus."""
    if requested_format is not None:
        expected = requested_format.describe_files(requested_format.corpus_files)
    else:
        expected = f"one of the formats {', '.join(each.name for each in FORMATS)}"
    file = next(iter(_possible_files(listing)), "FILE")
    return InputError(
        f"{path}: found no corpus among {_list_some(listing)}, expected {expected}; name the file itself, as "
        f"{path}/{file}"
    )


def _find_queries(path: str, listing: list[str], format: CorpusFormat) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the query files of a format in a folder, and its judgement files by split."""
    splits: dict[str, str] = {}
    prefix, _, suffix = format.judgement_files.partition("*")
    for name in format.match(listing, [format.judgement_files]) if format.judgement_files else []:
        split = name.removeprefix(prefix).removesuffix(".gz").removesuffix(suffix)
        if split in splits:
            raise InputError(
                f"{path}/{name}: found a second file of judgements for the split {split!r}, beside "
                f"{splits[split]}, expected one; remove or rename one"
            )
        splits[split] = f"{path}/{name}"
    return tuple(f"{path}/{name}" for name in format.find_queries(listing)), splits


def _find_queries_beside(path: str, listing: list[str], decode_entities: bool) -> ImportSource | None:
    """Finds queries in the folder of a corpus, if any; the caller cannot name their columns."""
    if not any(each.find_queries(listing) for each in FORMATS):
        return None
    try:
        return detect_query_source(path, names=QueryNames(decode_entities=decode_entities))
    except ColumnChoiceError as error:
        raise InputError(
            f"{error.problem}; rename it, or import the corpus file by its own path, and then the queries with their "
            "columns named"
        ) from None


def _query_tables(path: str, listing: list[str]) -> ImportSource | None:
    """Finds the query tables of a folder, without choosing columns; None if it has none."""
    tables = [each for each in FORMATS if each.has_columns and each.find_queries(listing)]
    if not tables:
        return None
    if len(tables) > 1:
        files = " and ".join(each.find_queries(listing)[0] for each in tables)
        raise InputError(f"{path}: found {files}, expected one of them; remove or rename the other")
    queries, qrels = _find_queries(path, listing, tables[0])
    return ImportSource(tables[0], _import_name(path), (), queries, qrels)


def _title_files_beside(format: CorpusFormat, path: str) -> list[str]:
    """Returns the title files beside a corpus file; [] unless it has the format's usual name for a corpus."""
    folder, name = path.removesuffix(_import_name(path)), _import_name(path)
    files = [f"{folder}{title_file}" for title_file in format.title_files if format.find_corpus([name])]
    return [file for file in files if is_file(file)]


def _title_file(format: CorpusFormat, files: Sequence[str]) -> str | None:
    """Returns the title file among files; None without one. Raises InputError if there are several."""
    title_files = [file for file in files if _import_name(file) in format.title_files]
    if len(title_files) > 1:
        raise InputError(
            f"{title_files[0]}: found {_import_name(title_files[1])} too, expected one of them; "
            "remove or rename the other"
        )
    return title_files[0] if title_files else None


def _with_query_columns(
    source: ImportSource, names: QueryNames, split: str | None, qrels_file: str | None
) -> ImportSource:
    """Chooses the columns of the queries, and makes each table with judgements the qrels of its split.

    A file of judgements replaces all others, also those of the table.
    """
    if qrels_file is not None:
        qrels_file, listing = list_files(qrels_file, f"a file of judgements, as {Parameter('qrels')} names it")
        if listing is not None:
            raise InputError(
                f"{Parameter('qrels', qrels_file)}: found a folder, expected a file of judgements; name the file"
            )
        if names.relevant or names.score:
            raise InputError(
                f"{Parameter('qrels')}: the judgements are in this file, expected no {Parameter('relevant')} and no "
                f"{Parameter('score')}, which name columns of the queries; leave them out"
            )
        if source.format.has_columns:
            names = replace(names, relevant="")
        columns = source.format.choose_query_columns(source.queries[0], names)
        return replace(source, query_columns=columns, qrels={split or DEFAULT_SPLIT: qrels_file}, has_own_qrels=False)
    if source.format.has_provenance:
        name = split or source.format.split_of(source.queries[0]) or DEFAULT_SPLIT
        return replace(source, provenance_split=name)
    if not source.format.has_columns and split is not None:
        raise InputError(
            f"{Parameter('split', split)}: {source.queries[0]} has the format {source.format.name}, whose judgements "
            f"are in other files; leave the split out, or give a file of judgements by {Parameter('qrels')}"
        )
    columns = source.format.choose_query_columns(source.queries[0], names)
    qrels = dict(source.qrels)
    for file in source.queries if columns and columns.relevant else ():
        name = split or _split_of(file)
        if name in qrels:
            raise InputError(
                f"{file}: found judgements of the split {name!r}, which {qrels[name]} has too; expected one file per "
                "split; remove or rename one"
            )
        qrels[name] = file
    return replace(source, query_columns=columns, qrels=qrels)


def _split_of(file: str) -> str:
    """Returns SPLIT of a file named queries.SPLIT.csv, otherwise DEFAULT_SPLIT."""
    pieces = _import_name(file).removesuffix(".gz").split(".")
    return ".".join(pieces[1:-1]) if pieces[0] == "queries" and len(pieces) > 2 else DEFAULT_SPLIT


def _import_name(path: str) -> str:
    return path.rpartition("/")[2]


def _name_without_endings(path: str) -> str:
    """Returns the name of a file without folder, file extension and .gz."""
    name = _import_name(path).removesuffix(".gz")
    return name.rpartition(".")[0] or name


def _list_some(names: Sequence[str]) -> str:
    """Joins the first few file names for a message."""
    return list_first(names, 5) or "no files"
