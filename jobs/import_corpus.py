"""Import a corpus with its queries and judgements; add, delete or erase passages.

    riptide import-corpus --store data/scifact --source raw/scifact
    riptide import-corpus --store data/faq --source faq.csv --id number --text answer
    riptide import-corpus --store data/scifact --source raw/more --append --delete old-ids.txt
    riptide import-corpus --store data/faq --source faq.csv --sync
    riptide import-corpus --store data/faq --source faq.csv --sync --watch 10
    riptide import-corpus --store data/faq --erase requests.txt
    riptide import-corpus --store data/scifact --filters year int64
    riptide import-corpus --store data/manuals --source manuals.jsonl --split-words 120 --overlap 30

docs/data.md names the columns of every format.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
from riptide.indexing.corpus.later_filters import AddFiltersWork
from riptide.indexing.corpus.syncing import SyncCorpusWork
from riptide.indexing.files.columns import PassageNames, passage_roles
from riptide.indexing.files.raw import is_remote
from riptide.indexing.files.splitting import BYTES_PER_WORD, DocumentSplit
from riptide.indexing.formats.chunking import CHUNK_BYTES
from riptide.indexing.formats.registry import format_names
from riptide.indexing.formats.sources import ImportSource, describe_columns, detect_source
from riptide.indexing.queries.queries import check_splits, find_complete_queries, import_queries, read_judged_queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store, artifact_key, generation
from riptide.indexing.work.work import check_targets, resumable, run_work
from riptide.jobs.common.flat_options import Heading, options_by_name
from riptide.jobs.common.job_options import PROCESS_OPTIONS, EstimatedJob, Workers
from riptide.jobs.common.printing import print_complete, print_stages, say, say_result, say_to_program
from riptide.jobs.common.session import open_runner
from riptide.jobs.common.stage_progress import StageProgress
from riptide.jobs.import_queries import QuerySetOptions, print_queries, query_options_of, say_skipped
from riptide.process.memory import format_bytes


@dataclass(frozen=True, kw_only=True)
class ImportCorpus(QuerySetOptions, Workers, EstimatedJob):
    GROUP: ClassVar = "source"
    MAKES: ClassVar = ("corpus",)
    NAMED_BY: ClassVar = ("source",)

    source: str | None = option(None, metavar="PATH")
    """Folder or file in a format of docs/data.md, local or s3://, gs:// or az://bucket/path; text files may
    be compressed as .gz. Of a folder of .txt, .md and .html files, also in its subfolders, each file is a passage.
    Titles in para.title.txt (RocketQA's: id<TAB>title) beside MS MARCO's collection.tsv are joined."""
    format: str = option("auto", choices=format_names())
    """Format of the source; auto detects it from the file names and the first line."""
    append: bool = False
    """Add the source to the existing corpus as a new generation. Columns of a table that are not named are those of the
    first import, if the table has them."""
    delete: str | None = option(None, metavar="FILE")
    """File of ids, one per line, that a new generation deletes; with --split-words ids of documents."""
    erase: str | None = option(None, metavar="FILE")
    """File of ids, one per line, whose passages and vectors are removed from the corpus, embeddings, indexes and
    runs of the store, also earlier versions. Corpus, embeddings and runs are written again; indexes are removed, and
    their commands make them again. The command lists what it does not reach. With --split-words ids of documents."""
    yes: bool = False
    """With --erase: remove indexes that the live release needs without asking; required without a terminal."""
    sync: bool = False
    """Make the corpus equal to the source, in a new generation: add new passages, replace those with another title,
    text or metadata, and delete those that the source lacks. If nothing differs, nothing is written. Queries in the
    folder are imported once."""
    max_removed: float = option(0.5, minimum=0)
    """With --sync: the largest share of the corpus, 0 to 1, that may be deleted because the source lacks it. More is
    refused, since the source may be incomplete."""
    watch: float | None = option(None, metavar="SECONDS", minimum=1)
    """With --sync: do not end, but look at the files of a local source every SECONDS seconds, and synchronise when they
    have changed and are complete: unchanged from one look to the next. SIGINT or SIGTERM ends the command."""
    drop_duplicates: bool = False
    """Drop a passage if an earlier one, also of the existing corpus, has its id, title and text; without an id column,
    its title and text. The metadata of the first one are kept. A dropped passage keeps its row; no search finds it."""
    skip_invalid: bool = False
    """Leave out rows that cannot be imported, also of the queries in the folder, and judgements of what is left out;
    by default one bad row ends the import, and the error lists the first 20. `riptide store show` lists the rows that
    are left out. A damaged file, or an open quote in CSV, still ends the import."""
    COLUMNS: ClassVar = Heading("columns")
    id: str | None = None
    """Column with the id of a passage; default: a known name such as id, otherwise a hash of title and text ("")."""
    title: str | None = None
    """Column with the title; default: the column named title, otherwise no titles ("")."""
    text: str | None = None
    """Column with the text; default: the column named text, contents, content, passage or body."""
    metadata: tuple[str, ...] | None = None
    """Columns to keep as metadata; default: all other columns."""
    decode_entities: bool = False
    """Decode HTML entities (`&amp;`, `&#39;`) in the titles and texts of a table, and in the queries in its folder."""
    filters: dict[str, str] = field(default_factory=dict)
    """Metadata fields to filter by, with their types: year int64 lang string (also float64, bool, timestamp, and lists
    such as 'list[string]'). A field that no passage of a new corpus has is refused; passages added with --append may
    all lack it. Without a source, the existing corpus gets these filters, in place of those that it has."""
    LONG_DOCUMENTS: ClassVar = Heading("long documents")
    split_words: int | None = None
    """Split each document into passages of at most N words, which end at sentence borders where possible. Judgements
    name documents. Default: a document is one passage; with --append, the value of the first import."""
    overlap: int = 0
    """Maximum number of words that a passage repeats from the end of the one before it; less than --split-words."""
    PARTS: ClassVar = Heading("parts")
    part_size: int = option(10_000, minimum=1)
    """Maximum number of passages per part (KILT: pages; with --split-words: documents, and about as many passages). A
    part has at most 256 MiB of raw text. The first parts are smaller, from 512 passages on. A part is the unit of work,
    retry and encoding."""


def main(options: ImportCorpus) -> None:
    if options.watch is None or options.plan:
        run_job(Store(options.store), options)
        return
    check_options(options, names_of(options))
    from riptide.jobs.store_actions.watch_option import watch_source

    source = os.path.abspath(str(options.source))
    watch_source(source, options.watch, options.store, lambda same: run_job(Store(options.store), options, same))


def run_job(store: Store, options: ImportCorpus, is_same_source: Callable[[], bool] | None = None) -> Artifact | None:
    """Imports or deletes passages, or adds filters.

    Args:
        store: The store.
        options: The options.
        is_same_source: As in `SyncCorpusWork`.

    Returns:
        The corpus' newest generation; None with --plan.
    """
    names = names_of(options)
    check_options(options, names)
    if options.erase is not None:
        from riptide.jobs.store_actions.erase_option import erase_passages

        erase_passages(store.require_not_empty(), options.erase, plan_only=options.plan, is_confirmed=options.yes)
        return None if options.plan else Corpus.open(store).generations[-1]
    if options.filters and not options.source and options.delete is None:
        return add_filters(store, options)
    query_options = query_options_of(options, None)  # --limit bounds the passages, not the queries
    source = find_source(store, options, names)
    with_queries = (source.query_source or (source if source.queries else None)) if source else None
    if with_queries and is_sync(store, options) and with_queries.name in store.names("queries"):
        with_queries = None
    if with_queries:
        check_queries_name(with_queries)
    elif query_options.hold_out and not is_sync(store, options):
        raise InputError(
            f"{Parameter('hold_out', options.hold_out)}: expected queries in the folder of the source, found none"
        )
    split = None if options.split_words is None else DocumentSplit(options.split_words, options.overlap)
    shape = ImportOptions(
        part_size=options.part_size,
        filters=options.filters,
        limit=options.limit,
        split=split,
        drop_duplicates=options.drop_duplicates,
        skip_invalid=options.skip_invalid,
    )
    work: ImportCorpusWork
    if source and is_sync(store, options):
        work = SyncCorpusWork(store, source, shape, max_removed=options.max_removed, is_same_source=is_same_source)
    else:
        work = ImportCorpusWork(store, source, shape, append=options.append, delete=options.delete)
    check_targets(store, work)
    name, judged = "", None
    are_queries_complete = with_queries is None
    if with_queries:  # refuses invalid lines of the query files and a taken name before the corpus is imported
        name = queries_name(with_queries, options, work.newest_name)
        are_queries_complete = find_complete_queries(store, with_queries, name, query_options) is not None
        if not work.is_complete:
            is_limited = options.limit is not None or any(g.config["limit"] is not None for g in work.previous)
            judged = read_judged_queries(with_queries, query_options, is_limited=is_limited)
    if options.plan and work.is_complete and are_queries_complete:
        print_complete(work.previous[-1].url)
        return None
    if options.plan:
        print_plan(store, source, work, options)
        return None
    if not work.is_complete:
        run_work(store, work, open_runner(store, options), StageProgress)
    latest = print_corpus(store, source, work)
    if with_queries:
        with resumable():  # after an interruption, the same command adds the queries to the complete corpus
            queries = import_queries(store, with_queries, name, query_options, judged=judged)
        print_queries(store, with_queries, queries)
    if isinstance(work, SyncCorpusWork):
        say_result(f"sync     {work.difference}; the newest generation is {latest.key}", latest.key)
    if source and not work.is_complete:
        say_to_program(describe_import(source, latest, options))
    return latest


def names_of(options: ImportCorpus) -> PassageNames:
    """Returns the names of the columns of a passage that the options give."""
    return PassageNames(options.id, options.title, options.text, options.metadata, options.decode_entities)


def find_source(store: Store, options: ImportCorpus, names: PassageNames) -> ImportSource | None:
    """Opens the source that the options name, and prints its columns; returns None if passages are only deleted."""
    if not options.source:
        return None
    first = store.generations("corpus")[:1] if options.append or options.sync else []
    earlier = first[0].config.get("columns") if first else None
    source = detect_source(options.source, options.format, names, earlier=earlier)
    for line in describe_columns(source):
        say(line)
    return source


def is_sync(store: Store, options: ImportCorpus) -> bool:
    """Returns whether the source is compared with an existing corpus."""
    return options.sync and bool(store.generations("corpus"))


def describe_import(source: ImportSource, made: Artifact, options: ImportCorpus) -> str:
    """Returns a line that summarises an import: passages, columns of a table, and filters."""
    columns = source.format.shown_columns(source.corpus[0], source.columns)
    rows = sum(part.rows for part in made.numbered_parts("part"))
    summary = f"imported {rows:,} {'passage' if rows == 1 else 'passages'}: "
    summary += passage_roles(columns) if columns else f"format {source.format.name}"
    filters = ", ".join(f"{name} ({kind})" for name, kind in options.filters.items())
    return summary + (f"; filters = {filters}" if filters else "")


def print_corpus(store: Store, source: ImportSource | None, work: ImportCorpusWork) -> Artifact:
    """Prints the size of the corpus after an import, and returns its newest generation."""
    corpus = Corpus.open(store)
    latest = corpus.generations[-1]
    parts = f"{len(corpus.parts):,} {'part' if len(corpus.parts) == 1 else 'parts'}"
    say(f"{latest.url}: {corpus.describe_size()}; {parts}")
    if dropped := sum(part.rows for part in latest.numbered_parts("dropped")):
        say(f"dropped  {dropped:,} passages with the id, title and text of an earlier one")
    say_skipped(store, latest)
    if source is not None and source.titles is not None:
        # An earlier command may have imported the source, so it need not be the newest generation.
        imported = next(a for a in reversed(corpus.generations) if a.config == work.config).numbered_parts("part")
        titled = sum(part.facts["titles"] for part in imported)
        rows = sum(part.facts.get("documents", part.rows) for part in imported)
        say(f"{source.titles}: {titled:,} of {rows:,} {'documents' if corpus.is_split else 'passages'} have a title")
    return latest


def add_filters(store: Store, options: ImportCorpus) -> Artifact | None:
    """Adds filters to the existing corpus, as a new generation without passages."""
    work = AddFiltersWork(store, options.filters)
    names = ", ".join(f"{name} ({kind})" for name, kind in options.filters.items())
    if options.plan and work.is_complete:
        print_complete(work.earlier_corpus.generations[-1].url)
        return None
    if options.plan:
        check_targets(store, work)
        say(f"filters  {names}, from the metadata of {work.earlier_corpus.num_rows:,} passages")
        print_stages(work)
        return None
    run_work(store, work, open_runner(store, options), StageProgress)
    latest = store.generations("corpus")[-1]
    say(f"{latest.url}: filters {names}")
    return latest


def check_options(options: ImportCorpus, names: PassageNames) -> None:
    """Raises InputError if options do not fit each other, or if they name nothing to import."""
    if options.watch is not None and not options.sync:
        raise InputError(f"{Parameter('watch', f'{options.watch:g}')}: expected {Parameter('sync')} with it")
    if options.watch is not None and is_remote(options.source or ""):
        raise InputError(
            f"{Parameter('watch')} with {options.source}: expected a folder or a file on a disk; run "
            f"{Parameter('sync')} again and again by a timer instead"
        )
    if options.erase is not None:
        defaults = ImportCorpus(store=options.store)
        for each in options_by_name(ImportCorpus).values():
            is_other = each.name not in ("erase", "yes", *PROCESS_OPTIONS)
            if is_other and each.value(options) != each.value(defaults):
                raise InputError(
                    f"{Parameter(each.name)} with {Parameter('erase')}: expected {Parameter('erase')} alone, as it "
                    "changes existing artifacts; run another command for the rest"
                )
        return
    if options.yes:
        raise InputError(f"{Parameter('yes')}: expected {Parameter('erase', 'FILE')} with it")
    if not options.source and options.delete is None and not options.filters:
        raise InputError(
            f"{Command('import-corpus')}: expected {Parameter('source', 'PATH')}, "
            f"{Parameter('delete', 'IDS_FILE')} or both"
        )
    if options.source is None and options.delete is None:
        unused = {name: getattr(options, name) for name in ("append", "limit", "split_words", "hold_out")}
        for name, value in unused.items():
            if value not in (None, False):
                raise InputError(
                    f"{Parameter(name)} with {Parameter('filters')}: expected "
                    f"{Parameter('source', 'PATH')}, which it is for"
                )
    if options.sync and options.source is None:
        raise InputError(
            f"{Parameter('sync')}: expected {Parameter('source', 'PATH')}, to which the corpus is made equal"
        )
    if options.sync:
        unfit = {name: getattr(options, name) for name in ("append", "delete", "limit", "skip_invalid")}
        for name, value in unfit.items():
            if value not in (None, False):
                raise InputError(
                    f"{Parameter(name)} with {Parameter('sync')}: expected only one of them, as {Parameter('sync')} "
                    "deletes every passage that the import does not read; remove one"
                )
    if not options.sync and options.max_removed != ImportCorpus.max_removed:
        raise InputError(f"{Parameter('max_removed', options.max_removed)}: expected {Parameter('sync')} with it")
    if options.max_removed > 1:
        raise InputError(f"{Parameter('max_removed', options.max_removed)}: expected a share, 0 to 1")
    if options.source is None and options.drop_duplicates:
        raise InputError(
            f"{Parameter('drop_duplicates')}: expected {Parameter('source', 'PATH')}, of whose passages some are "
            f"dropped"
        )
    if options.source is None and options.skip_invalid:
        raise InputError(
            f"{Parameter('skip_invalid')}: expected {Parameter('source', 'PATH')}, of whose rows the bad ones are "
            f"left out"
        )
    if options.source is None and names != PassageNames():
        raise InputError(
            f"{Parameter('id')}, {Parameter('title')}, {Parameter('text')}, {Parameter('metadata')}, "
            f"{Parameter('decode_entities')}: expected {Parameter('source', 'PATH')}, whose columns they name"
        )
    if options.source is not None and options.delete is not None and not options.append:
        raise InputError(
            f"{Parameter('source')} with {Parameter('delete')}: add {Parameter('append')} to do both in one new "
            f"generation"
        )
    if options.overlap and options.split_words is None:
        raise InputError(
            f"{Parameter('overlap', options.overlap)}: found no {Parameter('split_words')}, the maximum number of "
            f"words of a passage; give both"
        )


def queries_name(source: ImportSource, options: ImportCorpus, generation_name: str) -> str:
    """Returns the name of the queries that come with a corpus; with --append, it ends with the generation."""
    return f"{source.name}-{generation_name}" if options.append else source.name


def check_queries_name(source: ImportSource) -> None:
    """Raises InputError before the corpus is imported if the queries cannot be named after the source."""
    check_splits(source)
    try:
        artifact_key("queries", f"{source.name}-{generation(0)}")
    except InputError as error:
        raise InputError(
            f"{Parameter('source')}: its queries are named after it: {error}; rename the folder, or name "
            f"its corpus file and import the queries with {Command('import-queries')}"
        ) from None


def print_plan(store: Store, source: ImportSource | None, work: ImportCorpusWork, options: ImportCorpus) -> None:
    """Prints the plan of an import and the approximate size of the corpus: Arrow takes as many bytes as plain text."""
    say(f"store    {store.url} ({len(store.generations('corpus'))} generations of a corpus now)")
    if source:
        files = work.config["source"]
        size = sum(each["bytes"] * (3 if each["file"].endswith(".gz") else 1) for each in files)
        number = sum(each.get("documents", 1) for each in files)
        say(f"source   {source.format.name}: {number:,} corpus files, about {format_bytes(size)} of text")
        if isinstance(work, SyncCorpusWork):
            say(f"sync     {work.difference}")
            imported = work.difference.added + work.difference.changed
            size = round(size * imported / (imported + work.difference.unchanged))
        else:
            with_queries = source.query_source or source
            say(f"queries  {len(with_queries.queries)} files, splits: {', '.join(with_queries.qrels) or 'none'}")
        part = f"{options.part_size:,} passages, at most {format_bytes(CHUNK_BYTES)}"
        growth = 1.05
        if split := work.options.split:
            growth *= split.words / (split.words - split.overlap)
            passages = growth * size / (split.words * BYTES_PER_WORD)
            say(f"split    about {passages:,.0f} passages of at most {split.words:,} words")
        say(f"disk     about {format_bytes(size * growth)}; memory a few parts per core ({part} each)")
    if options.delete:
        say(f"delete   the ids in {options.delete}")


if __name__ == "__main__":
    run(main, ImportCorpus)
