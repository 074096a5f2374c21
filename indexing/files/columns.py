"""Chooses the columns of a table that hold the id, the title, the text, the metadata and the judgements.

A column is named by the caller or recognised by a well-known name, in any case. A name with dots may be a path into
nested objects: `pkg.name` is the field `name` of the object `pkg`, unless a column is called `pkg.name`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter, list_first
from riptide.indexing.files import limits
from riptide.indexing.files.raw import short_repr

ID_NAMES = ("_id", "id", "docid", "doc_id", "pid", "passage_id", "document_id")
TITLE_NAMES = ("title",)
TEXT_NAMES = ("text", "contents", "content", "passage", "body")
QUERY_ID_NAMES = ("query_id", "query-id", "qid", "_id", "id")
QUERY_NAMES = ("query", "question", "text")
RELEVANT_NAMES = ("relevant", "passage_id", "corpus_id", "corpus-id", "docid", "doc_id", "pid", "document_id")
SCORE_NAMES = ("score", "relevance", "label", "grade")
SHOWN_COLUMNS = 20
SHOWN_CHARACTERS = 30  # maximum shown length of a column name, which is a data value if a file has no header


class ColumnChoiceError(InputError):
    """Only the caller can choose the column for a role of a table: no column, or several, may have the role.

    Args:
        message: The problem, and how a caller who names columns chooses one.
        problem: The file, what it holds, and what was expected.
    """

    def __init__(self, message: str, problem: str):
        super().__init__(message, problem)  # all arguments, so that pickle can make it again
        self.problem = problem


@dataclass(frozen=True)
class TableColumns:
    """The column names of a file, with its delimiter and the paths of nested fields.

    Attributes:
        names: Their names, in order.
        delimiter: The delimiter of CSV or TSV; "" for other formats.
        nested: The paths of the fields of nested objects, for example "pkg.name". Objects themselves are left out.
    """

    names: tuple[str, ...]
    delimiter: str = ""
    nested: tuple[str, ...] = ()

    @property
    def shown(self) -> list[str]:
        """The column names for messages; the name of a nested object is replaced by the paths of its fields."""
        fields: dict[str, list[str]] = {}
        for path in self.nested:
            fields.setdefault(path.partition(".")[0], []).append(path)
        return [shown for name in self.names for shown in fields.get(name, [name])]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the given names that are neither column names nor paths of nested fields or objects."""
        existing = {*self.names, *(name for path in self.nested for name in _path_and_parents(path))}
        return [name for name in names if name not in existing]


@dataclass(frozen=True)
class PassageNames:
    """The caller's names for the columns of a corpus. None: recognise the column; "": the table has none.

    metadata: The columns to keep; None: all remaining ones. decode_entities: Decode HTML entities in title and text.
    """

    id: str | None = None
    title: str | None = None
    text: str | None = None
    metadata: tuple[str, ...] | None = None
    decode_entities: bool = False

    def with_earlier_names(self, file: str, table: TableColumns, config: Mapping[str, Any]) -> tuple[PassageNames, str]:
        """Fills in names that the caller left out by those of an earlier import of the corpus.

        Args:
            file: The file to import, for the line.
            table: Its columns; names that it lacks are not taken.
            config: The columns of the earlier import, as `PassageColumns.config` has them.

        Returns:
            The names, and a line that says which are taken; "" if there are none.
        """
        taken: dict[str, Any] = {}
        for role in ("id", "title", "text", "metadata"):
            if (value := config[role]) and getattr(self, role) is None:
                names = [value] if isinstance(value, str) else list(value)
                absent = table.missing(names)
                if existing := [name for name in names if name not in absent]:
                    taken[role] = value if isinstance(value, str) else tuple(existing)
        shown = ", ".join(f"{role} = {shown_columns((v,) if isinstance(v, str) else v)}" for role, v in taken.items())
        taken["decode_entities"] = self.decode_entities or config.get("decode_entities", False)
        return replace(self, **taken), f"named as in the first import, in {file}: {shown}" if shown else ""

    def describe_changes(self, file: str, config: Mapping[str, Any], columns: PassageColumns) -> str:
        """Returns a warning if recognised columns differ from those of an earlier import; otherwise "".

        Args:
            file: The file to import.
            config: The columns of the earlier import, as `PassageColumns.config` has them.
            columns: The columns of the file.
        """
        changed = {
            role: f"{role} = {_shown_role(role, value)} instead of {_shown_role(role, config[role])}"
            for role, value in columns.config.items()
            if role != "decode_entities" and getattr(self, role) is None and value != config[role]
        }
        if not changed:
            return ""
        options = " and ".join(f"{Parameter(role)}" for role in changed)
        return (
            f"warning: the columns of {file} are not those of the first import: {', '.join(changed.values())}; to take "
            f"other ones, name them by {options}"
        )


@dataclass(frozen=True)
class QueryNames:
    """The caller's names for the columns of a table of queries, as in `PassageNames`.

    relevant: The column of the relevant passage's id, or of several ids. score: The column of their grade.
    decode_entities: Decode HTML entities in the queries.
    """

    id: str | None = None
    text: str | None = None
    relevant: str | None = None
    score: str | None = None
    metadata: tuple[str, ...] | None = None
    decode_entities: bool = False


@dataclass(frozen=True)
class PassageColumns:
    """The columns of a corpus table. Without `id`, a passage's id is a hash of its title and text.

    id: None if no column is known as an id, "" if the caller wants none. title: "" or None: no titles.
    metadata: None: all remaining columns. decode_entities: HTML entities in title and text are decoded.
    """

    table: TableColumns
    text: str
    id: str | None = None
    title: str | None = None
    metadata: tuple[str, ...] | None = None
    decode_entities: bool = False

    @property
    def role_columns(self) -> tuple[str, ...]:
        """The columns that are not metadata: id, title and text, as far as the table has them."""
        return tuple(name for name in (self.id, self.title, self.text) if name)

    @property
    def columns_to_read(self) -> list[str] | None:
        """The columns to read from the file; None: all columns."""
        return None if self.metadata is None else list(dict.fromkeys((*self.role_columns, *self.metadata)))

    @property
    def config(self) -> dict[str, Any]:
        """The columns as JSON values for the configuration of an artifact."""
        metadata = None if self.metadata is None else list(self.metadata)
        config = {"id": self.id or None, "title": self.title or None, "text": self.text, "metadata": metadata}
        return config | ({"decode_entities": True} if self.decode_entities else {})


@dataclass(frozen=True)
class QueryColumns:
    """The columns of a table of queries. Without `id`, a query's id is a hash of its text.

    decode_entities: HTML entities in the queries are decoded.
    """

    text: str
    id: str | None = None
    relevant: str | None = None
    score: str | None = None
    metadata: tuple[str, ...] | None = None
    decode_entities: bool = False

    @property
    def role_columns(self) -> tuple[str, ...]:
        """The columns that are not metadata: id, text, relevant passages and score."""
        return tuple(name for name in (self.id, self.text, self.relevant, self.score) if name)

    @property
    def config(self) -> dict[str, Any]:
        """The columns as JSON values for the configuration of an artifact."""
        named = {"id": self.id, "text": self.text, "relevant": self.relevant, "score": self.score}
        metadata = None if self.metadata is None else list(self.metadata)
        config: dict[str, Any] = {name: value or None for name, value in named.items()} | {"metadata": metadata}
        return config | ({"decode_entities": True} if self.decode_entities else {})


def choose_passage_columns(file: str, table: TableColumns, names: PassageNames) -> PassageColumns:
    """Chooses the columns of a corpus file by the caller's names or by well-known names.

    Raises:
        InputError: If a named column does not exist, several columns may be meant, or no column is known as the text.
    """
    id = _choose_column(file, table, "id", names.id, ID_NAMES)
    title = _choose_column(file, table, "title", names.title, TITLE_NAMES)
    text = _choose_column(file, table, "text", names.text, TEXT_NAMES)
    text = _required_column(file, table, text, TEXT_NAMES)
    return PassageColumns(table, text, id, title, _named_metadata(file, table, names), names.decode_entities)


def choose_query_columns(file: str, table: TableColumns, names: QueryNames) -> QueryColumns:
    """Chooses the columns of a file of queries. Raises InputError as `choose_passage_columns` does."""
    id = _choose_column(file, table, "id", names.id, QUERY_ID_NAMES)
    text = _required_column(file, table, _choose_column(file, table, "text", names.text, QUERY_NAMES), QUERY_NAMES)
    relevant = _choose_column(file, table, "relevant", names.relevant, RELEVANT_NAMES)
    score = _choose_column(file, table, "score", names.score, SCORE_NAMES) if relevant or names.score else None
    if score and not relevant:
        raise InputError(
            f"{Parameter('score', score)}: {file} has {named_columns(table.names)}, none known as "
            f"{', '.join(RELEVANT_NAMES)}; name the column of the relevant passages by {Parameter('relevant')}"
        )
    return QueryColumns(text, id, relevant, score, _named_metadata(file, table, names), names.decode_entities)


def is_passage_header(fields: Sequence[str]) -> bool:
    """Returns whether the fields of a first line look like the header of a corpus table."""
    return _is_header(fields, TEXT_NAMES, (*ID_NAMES, *TITLE_NAMES))


def is_query_header(fields: Sequence[str]) -> bool:
    """Returns whether the fields of a first line look like the header of a table of queries."""
    return _is_header(fields, QUERY_NAMES, (*QUERY_ID_NAMES, *RELEVANT_NAMES))


def describe_passage_columns(file: str, columns: PassageColumns) -> str:
    """Returns one line for the user with the column of each role in a corpus file."""
    return f"columns of {file}: {passage_roles(columns)}"


def passage_roles(columns: PassageColumns) -> str:
    """Returns the column of each role as text: `id = number, title = none, text = body, metadata = year`."""
    id = columns.id or "a hash of title and text"
    return (
        f"id = {id}, title = {columns.title or 'none'}, text = {columns.text}, "
        f"metadata = {_describe_rest(columns.table, columns.role_columns, columns.metadata)}"
    )


def describe_query_columns(file: str, table: TableColumns, columns: QueryColumns) -> str:
    """Returns one line for the user with the column of each role in a table of queries."""
    judged = f"relevant = {columns.relevant or 'none'}"
    if columns.relevant:
        judged += f", score = {columns.score or '1'}"
    return (
        f"columns of {file}: id = {columns.id or 'a hash of the text'}, text = {columns.text}, {judged}, "
        f"metadata = {_describe_rest(table, columns.role_columns, columns.metadata)}"
    )


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or of a nested field if `name` is a path with dots; None if it is missing."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for key in name.split("."):
        if type(value) is not dict:
            return None
        value = value.get(key)
    return value


def remove_values(row: dict[str, Any], names: Iterable[str]) -> None:
    """Removes columns and nested fields (paths with dots) from a row, and objects that become empty."""
    for name in names:
        if name in row or "." not in name:
            row.pop(name, None)
            continue
        path, _, field = name.rpartition(".")
        if type(inner := value_at(row, path)) is dict and field in inner:
            del inner[field]
            if not inner:
                remove_values(row, [path])


def refuse_repeated_columns(place: str, names: Sequence[str]) -> None:
    """Raises InputError if there are too many columns, or if two have the same name."""
    if len(names) > limits.MAX_COLUMNS:
        raise limits.too_many_columns_error(place, len(names))
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{place}: found the column {short_repr(name)} twice, expected distinct names; rename one")
        seen.add(name)


def named_columns(names: Sequence[str]) -> str:
    """Formats column names for a message: "the columns a, b"."""
    return f"the column{'s' if len(names) != 1 else ''} {shown_columns(names)}"


def shown_columns(names: Sequence[str]) -> str:
    """Joins column names for a message; cuts long names and lists."""
    return list_first(names, SHOWN_COLUMNS, SHOWN_CHARACTERS)


def _shown_role(role: str, value: str | Sequence[str] | None) -> str:
    """Formats a role's columns from `PassageColumns.config` for a message: a name, several names, or "none"."""
    if role == "metadata" and value is None:
        return "all other columns"
    return shown_columns([value] if isinstance(value, str) else value) if value else "none"


def _is_header(fields: Sequence[str], texts: Sequence[str], others: Sequence[str]) -> bool:
    """Returns whether the fields are distinct and two are known names, one for a text; "17, text" is no header."""
    lower = [field.strip().lower() for field in fields]
    has_text = any(name in texts for name in lower)
    return all(lower) and len(set(lower)) == len(lower) and has_text and any(name in others for name in lower)


def _describe_rest(table: TableColumns, used: Sequence[str], metadata: tuple[str, ...] | None) -> str:
    other_columns = [name for name in table.shown if name not in used]
    kept_columns = frozenset(other_columns if metadata is None else metadata)
    dropped_columns = [name for name in other_columns if kept_columns.isdisjoint(_path_and_parents(name))]
    shown = shown_columns(other_columns if metadata is None else metadata) or "none"
    return shown + (f", left out = {shown_columns(dropped_columns)}" if dropped_columns else "")


def _path_and_parents(path: str) -> Iterator[str]:
    """Yields a path and the paths of the objects around it: a.b.c, a.b, a."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _choose_column(
    file: str, table: TableColumns, role: str, name: str | None, usual_names: Sequence[str]
) -> str | None:
    """Returns the column of a role: the named column, or the only one with a well-known name; None without one."""
    if name == "":
        return ""
    if name is not None:
        if table.missing([name]):
            raise InputError(f"{Parameter(role, name)}: {file} has {named_columns(table.shown)}; give one of these")
        return name
    candidates = [column for column in table.names if column.lower() in usual_names]
    if len(candidates) > 1:
        problem = f"{file}: found {named_columns(candidates)}, expected one that may be the {role}"
        raise ColumnChoiceError(f"{problem}; name it by {Parameter(role)}, for example {candidates[0]}", problem)
    return candidates[0] if candidates else None


def _required_column(file: str, table: TableColumns, text: str | None, usual_names: Sequence[str]) -> str:
    if not text:
        header = ", or add a header line if the first line is a row" if table.delimiter else ""
        problem = f"{file}: found {named_columns(table.shown)}, expected one called {', '.join(usual_names)}"
        raise ColumnChoiceError(f"{problem}; name the column of the text by {Parameter('text')}{header}", problem)
    return text


def _named_metadata(file: str, table: TableColumns, names: PassageNames | QueryNames) -> tuple[str, ...] | None:
    for name in table.missing(names.metadata or ()):
        raise InputError(f"{Parameter('metadata', name)}: {file} has {named_columns(table.shown)}; give some of these")
    return names.metadata
