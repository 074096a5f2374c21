"""Import another query set, with its judgements, over the corpus of a store.

    riptide import-queries --store data/wiki --source raw/nq/nq-dev.qa.csv --queries nq-dev
    riptide import-queries --store data/faq --source asked.csv --text asked --relevant answer_id
    riptide import-queries --store data/faq --source asked.csv --qrels asked.qrels --split dev

The columns of each format are listed in docs/data.md.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.files.columns import QueryNames
from riptide.indexing.formats.registry import format_names
from riptide.indexing.formats.sources import ImportSource, describe_columns, detect_query_source
from riptide.indexing.queries.hold_out import HoldOut
from riptide.indexing.queries.provenance import LEVELS, NONE, SPAN
from riptide.indexing.queries.queries import (
    Queries,
    QueryImportOptions,
    find_complete_queries,
    import_queries,
    open_queries_work,
)
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import check_targets
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import EstimatedJob
from riptide.jobs.common.printing import WARNING, print_complete, say

HINT_ROWS = 1000  # first queries whose metadata values are compared with the ids of the corpus


@dataclass(frozen=True, kw_only=True)
class QuerySetOptions:
    """Options of every import of queries."""

    GROUP: ClassVar = "judgements"

    skip_unknown: bool = False
    """Leave out judgements of passages that the corpus lacks and of queries that the source lacks, and count them.
    Otherwise they are refused."""
    HELD_OUT_QUERIES: ClassVar = Heading("held-out queries")
    hold_out: int | None = None
    """Move N queries from the split of --hold-out-split to a new split, held-out. Training can choose its
    checkpoint on it, so that no reported split takes part in the choice. Only queries with a relevant passage move."""
    hold_out_split: str = "train"
    """The split that --hold-out takes queries from."""
    hold_out_seed: int = 0
    """Seed of the draw of --hold-out."""


@dataclass(frozen=True, kw_only=True)
class ImportQueries(QuerySetOptions, EstimatedJob):
    GROUP: ClassVar = "source"
    MAKES: ClassVar = ("queries",)
    NAMED_BY: ClassVar = ("queries", "source")

    source: str = option(metavar="PATH")
    """Folder or file of queries in a format of docs/data.md, local or s3://, gs:// or az://bucket/path; text files may
    be compressed as .gz."""
    format: str = option("auto", choices=format_names())
    """Format of the source; auto detects it from the file names and the first line."""
    queries: str | None = None
    """Name of the query set; default: the name of the folder or file."""
    qrels: str | None = option(None, metavar="FILE")
    """File of judgements, which replace those of the source: query id, a column that is ignored, passage id and integer
    grade (TREC), or query id, passage id and grade (BEIR); local or in a cloud, may be compressed as .gz."""
    provenance: str | None = option(None, choices=LEVELS)
    """What the provenance in KILT's task files judges: span: the passages with text of the cited span, and all passages
    of a page that is cited without one; page: all passages of a cited page; none: nothing. In a split corpus, the page
    is judged, and the passages of the span are those that training takes. Default: span for KILT without --qrels,
    otherwise none."""
    split: str | None = None
    """Split of the judgements in a table, by provenance or in --qrels; default: SPLIT of a table named
    queries.SPLIT.csv or of a task file named NAME-SPLIT-kilt.jsonl, otherwise test."""
    skip_invalid: bool = False
    """Leave out rows that cannot be imported, and judgements as --skip-unknown does; by default one bad row ends the
    import, and the error lists the first 20. `riptide store show` lists the rows that are left out."""
    COLUMNS: ClassVar = Heading("columns")
    id: str | None = None
    """Column with the id of a query; default: a known name such as query_id, otherwise a hash of the query ("")."""
    text: str | None = None
    """Column with the text of the query; default: the column named query, question or text."""
    relevant: str | None = None
    """Column with the ids of relevant passages; default: a known name such as passage_id, otherwise none ("")."""
    score: str | None = None
    """Column with the integer grade; default: the column named score, relevance, label or grade, otherwise all grades
    are 1 ("")."""
    metadata: tuple[str, ...] | None = None
    """Columns to keep as metadata; default: all other columns."""
    decode_entities: bool = False
    """Decode HTML entities (`&amp;`, `&#39;`) in the queries of a table."""


def main(options: ImportQueries) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: ImportQueries) -> Queries | None:
    """Imports the queries. Returns them, or None with --plan."""
    store.require_not_empty()
    columns = (options.id, options.text, options.relevant, options.score, options.metadata)
    names = QueryNames(*columns, options.decode_entities)
    source = detect_query_source(options.source, options.format, names, options.split, options.qrels)
    query_options = replace(query_options_of(options, options.limit), provenance=provenance_level(options, source))
    for line in describe_columns(source):
        say(line)
    name = options.queries or source.name
    if options.plan and (complete := find_complete_queries(store, source, name, query_options)):
        print_complete(complete.artifact.url)
        return None
    if options.plan:
        work = open_queries_work(store, source, name, query_options)
        check_targets(store, work)
        say(f"would read {', '.join(source.queries)}; splits with qrels: {', '.join(work.qrels) or 'none'}")
        return None
    queries = import_queries(store, source, name, query_options)
    print_queries(store, source, queries)
    return queries


def provenance_level(options: ImportQueries, source: ImportSource) -> str:
    """Returns what the provenance of the queries judges. Raises InputError if options or source do not fit."""
    level = options.provenance or (SPAN if source.format.has_provenance and options.qrels is None else NONE)
    if level != NONE and not source.format.has_provenance:
        raise InputError(
            f"{Parameter('provenance', level)}: {source.queries[0]} has the format {source.format.name}, which has no "
            "provenance, expected kilt; leave it out"
        )
    if level != NONE and options.qrels is not None:
        raise InputError(
            f"{Parameter('provenance', level)} with {Parameter('qrels')}: expected one of them, as the file of "
            "judgements replaces those by provenance"
        )
    if level == NONE and source.format.has_provenance and options.qrels is None and options.split is not None:
        raise InputError(
            f"{Parameter('split', options.split)} with {Parameter('provenance', NONE)}: found no judgements to name; "
            "leave the split out"
        )
    return level


def say_skipped(store: Store, artifact: Artifact) -> None:
    """Prints a warning if an import left out rows."""
    if skipped := artifact.notes.get("skipped"):
        rows = "1 row" if skipped == 1 else f"{skipped:,} rows"
        show = f"{Command('store', 'show', artifact.key, store=shlex.quote(store.url))}"
        say(f"{WARNING}left out {rows} of {artifact.key}; {show} lists them")


def print_queries(store: Store, source: ImportSource, queries: Queries) -> None:
    """Prints the size of an imported query set, what was left out, and how to add missing judgements."""
    say(f"{queries.artifact.url}: {queries.artifact.rows:,} queries ({', '.join(queries.splits) or 'no qrels'})")
    if sum((judged := queries.artifact.notes.get("provenance", {})).values()):
        say(f"provenance  {judged['spans']:,} pages of queries judged by spans, {judged['pages']:,} as a whole")
    say_skipped(store, queries.artifact)
    skipped = queries.artifact.notes.get("skipped_judgements", {})
    if any(skipped.values()):
        say(
            f"warning: left out {skipped['unknown_passage']:,} judgements of passages that the corpus lacks and "
            f"{skipped['unknown_query']:,} of queries that the source lacks"
        )
    if not queries.splits and (hint := judgements_hint(source, queries, Corpus.open(store))):
        say(hint)


def judgements_hint(source: ImportSource, queries: Queries, corpus: Corpus) -> str:
    """Returns a warning that says why queries were imported without judgements, or how to add them; otherwise "".

    It names the columns whose values are ids of the corpus, among those that were imported as metadata.
    """
    if "provenance" in queries.artifact.config:
        return f"warning: no judgements in {source.queries[0]}: no query has provenance, as in KILT's test files"
    columns = source.query_columns
    if columns is None or columns.relevant is not None:
        return ""
    rows = [json.loads(text) if text else {} for text in queries.table["metadata"].slice(0, HINT_ROWS).to_pylist()]
    values: dict[str, list[Any]] = {}
    for row in rows:
        for column, value in row.items():
            values.setdefault(column, []).extend(value if type(value) is list else [value])
    judging = [column for column, ids in values.items() if _are_ids(ids, corpus)]
    remedy = (
        f"column {' and column '.join(judging)} has ids of the corpus: if they are those of relevant passages, remove "
        f"{queries.artifact.key}, and name the column by {Parameter('relevant')} of {Command('import-queries')}"
        if judging
        else f"give them by {Parameter('qrels')} of {Command('import-queries')}, or in a column, by "
        f"{Parameter('relevant')}"
    )
    return f"warning: no judgements in {source.queries[0]}; {remedy}"


def _are_ids(values: Sequence[Any], corpus: Corpus) -> bool:
    """Returns whether all values are passage ids of the corpus, or document ids if the corpus is split."""
    if not values or not all(type(value) in (str, int) for value in values):
        return False
    ids = [str(value) for value in values]
    several = [id for text in ids for id in text.split()]  # ids in CSV are separated by spaces
    return any(bool(each) and bool((corpus.rows_of_documents(each)[0] >= 0).all()) for each in (ids, several))


def query_options_of(options: Any, limit: int | None) -> QueryImportOptions:
    """Converts the options of a job to those of an import of queries.

    Args:
        options: The options of a job, with those of `QuerySetOptions`.
        limit: Number of queries to take from the start; None: all.

    Raises:
        InputError: If an option of the draw is given without --hold-out.
    """
    return QueryImportOptions(limit, _hold_out_of(options), options.skip_unknown, options.skip_invalid)


def _hold_out_of(options: Any) -> HoldOut | None:
    """Returns the number of held-out queries with their split and seed, or None without --hold-out.

    Raises:
        InputError: If an option of the draw is given without --hold-out.
    """
    if options.hold_out is None:
        for name in ("hold_out_split", "hold_out_seed"):
            if getattr(options, name) != type(options).__dataclass_fields__[name].default:
                raise InputError(
                    f"{Parameter(name, getattr(options, name))}: found no {Parameter('hold_out')}, the number of "
                    "queries to hold out; give it, or leave this one out"
                )
        return None
    return HoldOut(options.hold_out, options.hold_out_split, options.hold_out_seed)


if __name__ == "__main__":
    run(main, ImportQueries)
