"""The query sets that a picture compares, parsed from the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.indexing.training.named_values import parse_named_values


@dataclass(frozen=True, kw_only=True)
class QuerySet:
    """A query set, its split and label, and its store.

    Attributes:
        queries: Its name in the store.
        split: Its split; "": that of the command.
        label: Its name in the picture; "": that of the query set.
        store: URL or folder of its store; "": the store of the command.
    """

    queries: str
    split: str = ""
    label: str = ""
    store: str = ""


def parse_query_set(text: str) -> QuerySet:
    """Parses a query set given as `NAME` or as `queries=NAME,split=NAME,label=TEXT,store=URL`.

    Raises:
        InputError: If the text has another form.
    """
    if "=" not in text:
        return QuerySet(queries=text)
    form = f"{Parameter('queries', repr(text))}: "
    values = parse_named_values(text, [field.name for field in fields(QuerySet)], form)
    if "queries" not in values:
        raise InputError(f"{form}expected queries=NAME, the query set")
    return QuerySet(**values)


@dataclass(frozen=True)
class OpenQuerySet:
    """The texts of the queries of an opened query set.

    Attributes:
        label: Its name in the picture.
        key: Its artifact and split.
        texts: The texts of its queries.
    """

    label: str
    key: str
    texts: list[str]


def open_query_sets(store: Store, names: list[QuerySet], split: str, limit: int | None) -> list[OpenQuerySet]:
    """Opens query sets and reads the texts of their queries.

    Args:
        store: The store of the command.
        names: The query sets.
        split: The split of those that name none.
        limit: Use only the first N queries of each; None: all.

    Raises:
        InputError: If one is missing or has no queries, or if two have the same label.
    """
    sets: list[OpenQuerySet] = []
    for name in names:
        queries = Queries.open(Store(name.store).require_not_empty() if name.store else store, name.queries)
        of_split = name.split or split
        label, key = name.label or name.queries, f"{queries.artifact.key} {of_split}"
        if any(other.label == label for other in sets):
            raise InputError(
                f"{Parameter('queries', label)}: two query sets have this name; give one of them a label: "
                f"queries={name.queries},label=TEXT"
            )
        texts = queries.split(of_split, limit).texts
        if not texts:
            raise InputError(
                f"{Parameter('queries', label)}: {key} has no queries, expected at least one; name another"
            )
        sets.append(OpenQuerySet(label, key, texts))
    return sets
