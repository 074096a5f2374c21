"""A job to estimate, and what is known of its data and models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.store.keys import Key, without_generation
from riptide.indexing.store.store import Store, generation
from riptide.jobs.planning.models import Model, Models, TextBatch
from riptide.jobs.planning.sizes import CorpusSize, Sizes

TEST = "test"  # the split of a search that names none


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
        has_gpus: Whether the machines have GPUs.
    """

    sizes: Sizes = field(default_factory=Sizes)
    models: Models = field(default_factory=Models)
    has_gpus: bool = False
    _mean_tokens: dict[tuple[str, int, TextBatch | None], float] = field(default_factory=dict)

    def passage_tokens(self, model: Model, corpus: CorpusSize, batch: TextBatch | None = None) -> float:
        """Returns the mean tokens of a passage: counted in the corpus, expected by the user, or the limit.

        Counted tokens include the padding of such a batch of a training, if one is given.
        """
        limit = model.limits[1]
        if corpus.expected_tokens is not None:
            return min(corpus.expected_tokens, float(limit))
        key = (f"{model.folder}", id(corpus), batch)
        if key not in self._mean_tokens:
            self._mean_tokens[key] = model.mean_tokens(corpus.sample_texts(), batch=batch)
        return self._mean_tokens[key]

    def count_queries(self, job: PlannedJob) -> int | None:
        """Returns the number of queries of a job, at most its limit; None if it is unknown."""
        queries = self.sizes.count_queries(job.store, job.values["queries"], job.values["split"] or TEST)
        return queries if queries is None else min(queries, job.values["limit"] or queries)

    def query_tokens(self, model: Model, job: PlannedJob, batch: TextBatch | None = None) -> float:
        """Returns the mean tokens of a query, with the padding of a batch as `passage_tokens`."""
        limit = float(model.limits[0])
        if self.sizes.expected:
            return min(self.sizes.get("query_tokens"), limit)
        if model.folder is None:
            return limit
        texts = self.sizes.sample_queries(job.store, job.values.get("queries"), job.values["split"] or TEST)
        return model.mean_tokens([("", text) for text in texts], "query", batch) if texts else limit

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
        keys = [key for place, key in self.sizes.made_bytes if place == store]
        names = {name for made, _, name in (key.partition("/") for key in keys) if made == kind}
        if kind == "embeddings":
            names |= {name for place, name in self.sizes.dims if place == store}
        with contextlib.suppress(InputError, OSError):
            names |= set() if self.sizes.expected else set(Store(store).names(kind))
        return names.pop() if len(names) == 1 else None

    def searched_embeddings(self, store: str, kind: str, name: str) -> str | None:
        """Returns the embeddings that a source KIND:NAME searches, by themselves or in an index; None: unknown."""
        if kind == "exact":
            return name or self.only_name(store, "embeddings")
        name = name or self.only_name(store, "index") or ""
        if (planned := self.sizes.searched.get((store, name))) is not None:
            return planned
        with contextlib.suppress(InputError, OSError):
            for entry in (
                {} if self.sizes.expected else Store(store).open("index", f"{name}/{generation(0)}").inputs.values()
            ):
                if (key := Key.parse(without_generation(entry["artifact"]))).kind == "embeddings":
                    return key.name
        return name or None

    def num_bytes(self, store: str, keys: Iterable[str]) -> dict[str, int]:
        """Returns the bytes of the files of artifacts, made or planned, by key: without records; 0: unknown."""
        sizes = {key: self.sizes.made_bytes.get((store, key), 0) for key in keys}
        for key in [] if self.sizes.expected else sizes:
            with contextlib.suppress(InputError, OSError):
                files = Store(store).storage.list(key)
                sizes[key] += sum(size for path, size in files if not path.endswith(".json"))
        return sizes
