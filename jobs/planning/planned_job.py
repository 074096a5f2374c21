"""A job to estimate, and what is known of its data and models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.jobs.planning.models import Model, Models
from riptide.jobs.planning.sizes import CorpusSize, Sizes


@dataclass(frozen=True)
class PlannedJob:
    """A job with its options.

    Attributes:
        name: Name of the job, with underscores.
        store: URL of its store.
        values: The values of all of its options, by name.
        makes: The keys of the artifacts that it makes, as far as its options name them.
    """

    name: str
    store: str
    values: Mapping[str, Any]
    makes: tuple[str, ...] = ()


@dataclass
class Facts:
    """What is known of the data and models of a chain of jobs.

    Attributes:
        sizes: Sizes of data.
        models: Models by store and name.
        declared_passages: Returns the number of passages that an import makes, for known data sets.
    """

    sizes: Sizes = field(default_factory=Sizes)
    models: Models = field(default_factory=Models)
    declared_passages: Callable[[PlannedJob], int | None] = lambda job: None
    _mean_tokens: dict[tuple[str, int], float] = field(default_factory=dict)

    def passage_tokens(self, model: Model, corpus: CorpusSize) -> float:
        """Returns the mean tokens of a passage: counted in the corpus, expected by the user, or the limit."""
        limit = model.limits[1]
        if corpus.expected_tokens is not None:
            return min(corpus.expected_tokens, float(limit))
        key = (f"{model.folder}", id(corpus))
        if key not in self._mean_tokens:
            self._mean_tokens[key] = model.mean_tokens(corpus.sample_texts())
        return self._mean_tokens[key]

    def query_tokens(self, model: Model, job: PlannedJob) -> float:
        """Returns the mean tokens of a query: counted in the split, expected by the user, or the limit."""
        limit = float(model.limits[0])
        if self.sizes.expected:
            return min(self.sizes.get("query_tokens"), limit)
        if model.folder is None:
            return limit
        texts = self.sizes.sample_queries(job.store, job.values.get("queries"), job.values["split"] or "test")
        return model.mean_tokens([("", text) for text in texts], "query") if texts else limit

    def committed(self, store: str, key: str) -> set[str]:
        """Returns the names of the parts of an artifact, with its generations, that have a record."""
        if self.sizes.expected:
            return set()
        with contextlib.suppress(InputError, OSError):
            files = [path.removeprefix(f"{key}/") for path, _ in Store(store).storage.list(key)]
            return {path.removesuffix(".json") for path in files if path.endswith(".json")}
        return set()

    def only_name(self, store: str, kind: str) -> str | None:
        """Returns the only name of a kind of artifact in a store or in the chain; None if there are others."""
        planned = {name for place, name in self.sizes.dims if place == store} if kind == "embeddings" else set()
        with contextlib.suppress(InputError, OSError):
            planned |= set() if self.sizes.expected else set(Store(store).names(kind))
        return planned.pop() if len(planned) == 1 else None
