"""Import a corpus, with the queries and qrels beside it, or add to one and delete from it.

python jobs/import_corpus.py --store data/scifact --source raw/scifact
python jobs/import_corpus.py --store data/scifact --source raw/more --append --delete old-ids.txt
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect

from indexing.corpus import Corpus
from indexing.importing import Importing, ImportOptions
from indexing.queries import import_queries
from indexing.raw import open_input
from indexing.sources import CHUNK_BYTES, Source, detect
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ImportCorpus(Common):
    source: str | None = None
    """A folder or file in BEIR, MS MARCO, DPR, KILT or Parquet form, local or s3://."""
    format: Literal["auto", "beir", "msmarco", "dpr", "kilt", "parquet"] = "auto"
    """auto: from the names of the files, or a file's first line."""
    part_size: int = 10_000
    """Passages a part (KILT: pages), the unit of work and of retry: 30 to 60 s of one encoding worker. Fewer where they
    are long: a part ends at 256 MiB of raw text."""
    filters: dict[str, str] = field(default_factory=dict)
    """Metadata fields to filter by, with types: year int64 lang string (also float64, bool, timestamp)."""
    append: bool = False
    """Add the source to the corpus as a new generation."""
    delete: str | None = None
    """A file of ids, one a line, that a new generation deletes."""


def main(options: ImportCorpus) -> None:
    store = Store(options.store)
    if options.source is None and options.delete is None:
        raise InputError("--source PATH (or --delete IDS_FILE): expected what to import")
    if options.source is not None and options.delete is not None and not options.append:
        raise InputError("--source with --delete: add --append to do both in one new generation")
    if options.part_size < 1:
        raise InputError(f"--part-size {options.part_size}: expected at least 1")
    source = detect(options.source, options.format) if options.source else None
    if options.plan:
        return plan(store, source, options)
    shape = ImportOptions(part_size=options.part_size, filters=options.filters, limit=options.limit)
    importing = Importing(store, source, shape, append=options.append, delete=options.delete)
    if not importing.complete:
        connect(store)
        with Stage("import") as stage:
            for kept, rows in importing.run():
                stage.count(rows, kept)
    corpus = Corpus.open(store)
    latest = corpus.generations[-1]
    say(f"{latest.url}: {corpus.num_rows:,} passages in {len(corpus.parts):,} parts, {len(corpus.deleted):,} deleted")
    if source and source.queries:
        name = source.name if not options.append else f"{source.name}-{latest.key[-5:]}"
        queries = import_queries(store, source, name)
        splits = ", ".join(queries.splits) or "no qrels"
        say(f"{queries.artifact.url}: {queries.artifact.rows:,} queries ({splits})")
    return None


def plan(store: Store, source: Source | None, options: ImportCorpus) -> None:
    """What an import reads and how large the corpus becomes, roughly: Arrow takes what plain text takes."""
    say(f"store    {store.url} ({len(store.generations('corpus'))} generations of a corpus now)")
    if source:
        sizes = []
        for file in source.corpus:
            with open_input(file) as opened:
                sizes.append(opened.size() * (3 if file.endswith(".gz") else 1))
        say(f"source   {source.format}: {len(source.corpus)} corpus files, about {human(sum(sizes))} of text")
        say(f"queries  {len(source.queries)} files, splits: {', '.join(source.qrels) or 'none'}")
        part = f"{options.part_size:,} passages, at most {human(CHUNK_BYTES)}"
        say(f"disk     about {human(sum(sizes) * 1.05)}; memory a few parts a core ({part} each)")
    if options.delete:
        say(f"delete   the ids in {options.delete}")


if __name__ == "__main__":
    run(main, ImportCorpus)
