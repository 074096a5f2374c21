"""Makes a run: searches queries block by block, and commits the hits of each block as a part."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError, TextsError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, DocumentNumbers
from riptide.indexing.corpus.filters import Filter, filter_columns
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.grammar import parse_source, source_label
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.hit_sources.search_options import By, SearchOptions
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.document_search import is_by_document, search_documents
from riptide.indexing.search.rescoring import (
    BLOCK_QUERIES,
    RerankerSpec,
    RerankTask,
    rerank,
)
from riptide.indexing.search.runs import hits_table, read_run, write_parquet
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.keys import default_name
from riptide.indexing.store.sealed_json import ArtifactPart, fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    Progress,
    ProgressCounter,
    WorkUnit,
)
from riptide.indexing.work.worker_tasks import Runner

QUERY_BLOCK = 8_192  # queries per part, which are searched in one pass over the corpus

RUN_HITS = 1_000  # default number of hits per query in a run
RERANK_DEPTH = 100  # default number of hits per query that are re-ranked


class SearchQueriesWork(BaseWork):
    """The work that builds runs/NAME: the hits of a split's queries, a part for each block of QUERY_BLOCK queries.

    Attributes:
        name: The name of the run.
        split: The queries.
        source: The source's name in the grammar of sources, with all names filled in.
        allowed_rows: The rows that match the filter, int64 ascending; None: there is no filter.
        documents: The documents of the corpus, if the hits are documents; None: they are passages.
    """

    def __init__(
        self,
        store: Store,
        *,
        source: str,
        split: str,
        k: int,
        name: str | None = None,
        queries: str | None = None,
        options: SearchOptions | None = None,
        drop_self: bool = False,
        reranker: RerankerSpec | None = None,
        rerank_depth: int = RERANK_DEPTH,
        limit: int | None = None,
        filter: str | None = None,
        by: By | None = None,
    ):
        """Opens and checks the source, the queries, the corpus and the filter.

        by: see `is_by_document`.

        Raises:
            InputError: If an artifact is missing, or was not made from the ones that it is searched with. Also if the
                filter does not parse.
        """
        self.store, self.k, self.drop_self = store, k, drop_self
        self.corpus = Corpus.open(store)
        parsed = None if filter is None else Filter.parse(filter, filter_columns(self.corpus))
        self.allowed_rows = None if parsed is None else parsed.rows(self.corpus)
        self.documents = DocumentNumbers(self.corpus.parts) if is_by_document(self.corpus, by) else None
        self.queries = Queries.open(store, queries)
        self.split = self.queries.split(split, limit)
        self.sources = HitSources(store, self.corpus, options)
        self.hit_source = self.sources.open(source)
        self.source = self.hit_source.source_text
        self.reranker, self.rerank_depth = reranker, rerank_depth
        task = options.task if options else None
        # The name of a task is not repeated if the source has it: embeddings for a task often have its name.
        is_named = any(term.name == task for term in parse_source(self.source).terms)
        self.name = name or default_name(
            *(self.queries.artifact.name, split, source_label(self.source)),
            *([source_label(task)] if task and not is_named else []),
            *([reranker.label] if reranker else []),
            *([f"filter-{fingerprint_of(parsed.text)[:8]}"] if parsed else []),
            *(["passages"] if self.corpus.is_split and self.documents is None else []),
        )
        self.config: dict[str, Any] = {
            "source": self.source,
            "search_parameters": self.hit_source.search_parameters,
            "split": split,
            "k": k,
            "drop_self": drop_self,
            "limit": limit,
        }
        if reranker:
            self.config |= {"reranker": reranker.config, "rerank_depth": rerank_depth}
        if parsed:
            self.config["filter"] = json.loads(parsed.text)
        if self.documents:
            self.config["by"] = "document"

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the only target, the run. Its input `corpus`, the latest generation, pins all earlier ones."""
        inputs = {"queries": self.queries.artifact, "corpus": self.corpus.generations[-1]}
        inputs |= self.hit_source.inputs() | dict(self.reranker.inputs if self.reranker else {})
        models = {"reranker": ("rerank", self.reranker.name)} if self.reranker else {}
        return [ArtifactTarget("runs", self.name, inputs, self.config, models=models)]

    @property
    def stages(self) -> list[SearchStage]:
        """Returns the only stage, which searches block by block."""
        return [SearchStage(self)]

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the number of hits and the re-ranker's numerics class to the notes of the run."""
        [draft] = drafts
        parts = draft.committed_parts().values()
        numerics = {part.facts["numerics"] for part in parts if "numerics" in part.facts}
        draft.add_notes(hits=sum(part.rows for part in parts), **({"numerics": numerics.pop()} if numerics else {}))

    def queries_without_hits(self) -> list[str]:
        """Returns the ids of the queries without hits in the complete run, in the order of the split."""
        answered: set[str] = set()
        for table in read_run(self.store.open("runs", self.name)):
            answered.update(table["query_id"].combine_chunks().unique().to_pylist())
        return [id for id in self.split.ids if id not in answered]

    def without_self(self, query_ids: list[str], hits: Hits) -> tuple[Hits, np.ndarray]:
        """Returns hits and their passage ids, [q, k]; with drop_self, drops a hit whose id is that of the query."""
        ids = self.corpus.ids(hits.rows)
        if not self.drop_self:
            return hits, ids
        itself = ids == np.asarray(query_ids, object)[:, None]
        rows = np.where(itself, -1, hits.rows)
        surplus = np.flatnonzero(~itself.any(axis=1))
        rows[surplus, self.k :] = -1
        return Hits(hits.scores, rows), ids

    def find_hits(self, ids: list[str], texts: list[str], rerank_task: RerankTask | None, runner: Runner) -> FoundHits:
        """Searches queries, and re-ranks their hits if `rerank_task` is given."""
        cuts = Cuts()

        def rerank_some(hits: Hits, some: Sequence[str]) -> Hits:
            nonlocal cuts
            assert rerank_task is not None
            hits, cut = rerank(hits, some, self.rerank_depth, rerank_task, runner)
            cuts += cut
            return hits

        reorder = rerank_some if rerank_task else None
        if self.documents is not None:
            hits = search_documents(
                self.hit_source,
                texts,
                self.k,
                runner,
                self.documents,
                allowed_rows=self.allowed_rows,
                rerank=reorder,
                rerank_depth=self.rerank_depth if rerank_task else 0,
                excluded=self.corpus.rows_of_documents(ids)[0] if self.drop_self else None,
            )
            return FoundHits(hits, self.corpus.ids(hits.rows), cuts)
        depth = min(self.k + self.drop_self, max(1, self.corpus.num_rows))  # sources allocate as many per query
        hits, passage_ids = self.without_self(ids, self.hit_source.search(texts, depth, runner, self.allowed_rows))
        if reorder:
            hits = reorder(hits, texts)
            passage_ids = self.corpus.ids(hits.rows)
        return FoundHits(hits, passage_ids, cuts)


class FoundHits(NamedTuple):
    """Hits of queries, their passage ids [q, k], and the counts of pairs that the re-ranker cut."""

    hits: Hits
    ids: np.ndarray
    pair_cuts: Cuts


class SearchStage(BaseStage):
    """The stage that searches blocks of queries and commits their hits."""

    title = "search"
    noun = "queries"

    def __init__(self, search: SearchQueriesWork):
        self.search = search
        self.total: int | None = len(search.split.ids)
        self._rerank_task: RerankTask | None = None
        self._committed: list[ArtifactPart] = []

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each block of queries; pins the numerics classes of the committed parts."""
        for part in committed_parts[0].values():
            self.search.sources.pin(part.facts)
            self._committed.append(part)
        for number, start in enumerate(range(0, len(self.search.split.ids), QUERY_BLOCK)):
            rows = min(QUERY_BLOCK, len(self.search.split.ids) - start)
            yield WorkUnit((f"part-{number:05d}",), rows, start)

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Searches a block of queries and commits the hits."""
        search, rerank_task = self.search, self._make_rerank_task(draft, runner)
        piece = slice(unit.payload, unit.payload + QUERY_BLOCK)
        ids, texts = search.split.ids[piece], search.split.texts[piece]
        try:
            hits, passage_ids, pair_cuts = search.find_hits(ids, texts, rerank_task, runner)
        except TextsError as error:
            number = min(error.reasons)
            raise InputError(f"query {ids[number]!r}: {error.reasons[number]}") from error
        table = hits_table(ids, hits, passage_ids)
        numerics = rerank_task.spec.numerics if rerank_task else None
        facts: dict[str, Any] = {
            **({"numerics": numerics} if numerics else {}),
            **search.sources.numerics(),
            **search.sources.count_cuts(),
        }
        if rerank_task:
            facts["pair_cuts"] = pair_cuts.to_dict()
        write = functools.partial(write_parquet, table)
        part = draft.commit(unit.names[0], ".parquet", write, rows=len(table), **facts)
        check_numerics(draft, part, numerics)  # another writer may have committed it first
        counter.count(unit.rows)
        if rerank_task:
            counter.add("pairs", pair_cuts.texts)

    def _make_rerank_task(self, draft: Draft, runner: Runner) -> RerankTask | None:
        """Returns the task that re-ranks, if any. Raises InputError if committed parts have another numerics class."""
        search = self.search
        if search.reranker and self._rerank_task is None:
            pinned = next((part.facts["numerics"] for part in self._committed if "numerics" in part.facts), None)
            blocks = -(-len(search.split.ids) // BLOCK_QUERIES)
            spec = search.reranker.with_numerics(runner, blocks, pinned, draft.url)
            for part in self._committed:
                check_numerics(draft, part, spec.numerics)
            self._rerank_task = RerankTask(spec, search.corpus)
        return self._rerank_task


def check_numerics(draft: Draft, part: ArtifactPart, numerics: str | None) -> None:
    """Raises InputError if the re-ranker that ordered a part was of another numerics class."""
    found = part.facts.get("numerics")
    if found != numerics:
        raise InputError(
            f"{draft.url}/{part.name} is of the re-ranker's numerics class `{found}`, here it is `{numerics}`: resume "
            f"on the kind of machine that began it, or give another name ({Parameter('name')})"
        )
