"""The tasks of a release, the sources that each task serves, and the search that a request names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from riptide.base.wording import Command
from riptide.indexing.hit_sources.bm25 import BM25
from riptide.indexing.hit_sources.exact import EXACT
from riptide.indexing.hit_sources.grammar import SourceTerm, fusion_text, parse_source
from riptide.indexing.hit_sources.index_source import INDEX
from riptide.indexing.hit_sources.modes import mode_sources
from riptide.indexing.hit_sources.online_search import SearchTarget
from riptide.indexing.hit_sources.search_options import Mode
from riptide.indexing.hit_sources.source_kind import SourceKind
from riptide.indexing.store.keys import Key
from riptide.serve.service_errors import RequestError, request_errors


@dataclass(frozen=True)
class ServedTask:
    """A retrieval task of a release.

    Attributes:
        name: The name in requests.
        prompt: prompts/NAME of the store; None: the bare backbone.
        embeddings: The dense embeddings of its passages; None: the task has no dense search.
        index: The index over them; None: every vector is scored.
        bm25: The BM25 index; None: the task has no lexical search.
        sources: Sources of other kinds, in the grammar of sources.
    """

    name: str
    prompt: str | None
    embeddings: str | None
    index: str | None = None
    bm25: str | None = None
    sources: tuple[str, ...] = ()

    @property
    def space(self) -> tuple[str, str | None] | None:
        """The names of the task's embeddings and of the index over them; None without embeddings."""
        return (self.embeddings, self.index) if self.embeddings else None

    def document(self) -> dict[str, Any]:
        """Returns the fields of the task in a release's document, without an empty `sources`, as in older releases."""
        fields = asdict(self)
        sources = list(fields.pop("sources"))
        return {**fields, "sources": sources} if sources else fields

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ServedTask:
        """Reads a task from its fields in a release's document."""
        return cls(**{**document, "sources": tuple(document.get("sources", ()))})

    def served_sources(self) -> list[ServedSource]:
        """Returns the sources that the task serves: index, exact search, BM25, and others."""
        terms = [SourceTerm(INDEX, self.index)] if self.index else []
        terms += [SourceTerm(EXACT, self.embeddings)] if self.embeddings else []
        terms += [SourceTerm(BM25, self.bm25)] if self.bm25 else []
        terms += [term for source in self.sources for term in parse_source(source).terms]
        names = {"embeddings": self.embeddings, "index": self.index}
        return [ServedSource(term.kind, term.name, term.kind.search_target(term.name, **names)) for term in terms]

    def artifact_keys(self) -> set[Key]:
        """Returns the keys of all artifacts that the task names, without generations."""
        keys = {Key(*key) for source in self.served_sources() for key in source.kind.online.artifacts(source.target)}
        return keys | ({Key("prompts", self.prompt)} if self.prompt else set())


@dataclass(frozen=True)
class ServedSource:
    """A source that a task serves. target: names the artifacts that its part searches."""

    kind: SourceKind
    name: str
    target: SearchTarget

    @property
    def source_text(self) -> str:
        """The source in the grammar of sources, as in requests."""
        return self.kind.source_text(self.name)


@dataclass(frozen=True)
class SourceSearch:
    """The sources that a query searches, and how their hits are fused.

    Attributes:
        source: The source in the grammar, with all names filled in.
        sources: The sources.
        labels: For each source, its name in the scores of hits.
        weights: A weight per source; None: one source, or a fusion by reciprocal rank.
        efforts: Search efforts (nprobe or efSearch) of indexes that are not those that their builds measured.
    """

    source: str
    sources: tuple[ServedSource, ...]
    labels: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    efforts: Mapping[ServedSource, int] = field(default_factory=dict, hash=False)

    @property
    def raised_settings(self) -> dict[str, int]:
        """The search efforts by source, as in `SearchResponse.raised_settings`."""
        return {source.source_text: effort for source, effort in self.efforts.items()}


def find_source_search(task: ServedTask, source: str) -> SourceSearch:
    """Returns the search for a source that a request names.

    Raises:
        InputError: If the source is not in the grammar, or if the task does not serve it.
    """
    with request_errors():
        expression = parse_source(source)
    served = task.served_sources()
    sources = tuple(_source_of_term(task, term, served) for term in expression.terms)
    names = tuple(each.source_text for each in sources)
    with request_errors():
        expression.check_distinct(names)
    return SourceSearch(fusion_text(names, expression.weights), sources, names, expression.weights)


@functools.lru_cache(maxsize=1024)  # called for every request
def search_of_mode(task: ServedTask, mode: Mode) -> SourceSearch:
    """Returns the search of a mode, in which the scores of hits are named dense and bm25.

    Raises:
        InputError: If the task lacks what the mode searches.
    """
    if mode != "bm25" and not task.embeddings:
        names = ", ".join(source.source_text for source in task.served_sources())
        raise RequestError(
            f"task {task.name!r} has no dense embeddings, which mode {mode} searches: name a source ({names})"
        )
    if mode not in supported_modes(task):
        raise RequestError(f"task {task.name!r} has no BM25: build one ({Command('build-bm25')}), and serve it")
    search = find_source_search(task, mode_sources(task.embeddings, task.index, task.bm25)[mode])
    labels = tuple(source.kind.online.name for source in search.sources)
    return SourceSearch(search.source, search.sources, labels, search.weights)


def supported_modes(*tasks: ServedTask) -> list[Mode]:
    """Returns the modes that at least one of the tasks supports."""
    modes = {mode for task in tasks for mode in mode_sources(task.embeddings, task.index, task.bm25)}
    return [mode for mode in get_args(Mode) if mode in modes]


def _source_of_term(task: ServedTask, term: SourceTerm, served: list[ServedSource]) -> ServedSource:
    """Returns the served source for a term; a kind without a name means its only source or the default one."""
    of_kind = [source for source in served if source.kind is term.kind]
    named = [source for source in of_kind if source.source_text == term.kind.source_text(term.name)]
    if not named and not term.name and len(of_kind) == 1:
        named = of_kind
    if not named:
        names = ", ".join(source.source_text for source in served)
        raise RequestError(
            f"source {term.kind.source_text(term.name)!r}: task {task.name!r} does not serve it; it has {names}"
        )
    return named[0]
