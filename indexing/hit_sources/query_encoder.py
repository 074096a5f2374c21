"""Encodes the queries of a search with the encoder that made some embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differing, spec_of
from indexing.hit_sources.options import SearchOptions
from indexing.store import Store
from indexing.work.tasks import ALL_CORES, Place, Report, Resources, Runner
from retriever.errors import InputError
from retriever.options import EncoderOptions

_ENCODED = 2  # blocks of queries whose vectors are kept, for sources over the same embeddings


class QueryEncoder:
    """The encoder of some embeddings, for queries.

    Raises:
        InputError: If the encoder is not the one that made the embeddings.
    """

    def __init__(self, store: Store, embeddings: Embeddings, options: SearchOptions):
        self.embeddings = embeddings
        own = EncoderOptions(**embeddings.encoder_options)
        if options.task is not None:
            spec = spec_of(store, None, options.task, own)
        else:
            spec = EncoderSpec(store, options.encoder or embeddings.encoder_name, own, embeddings.task)
        self.spec = replace(spec, options=replace(spec.options, compile="never"))
        self._kept: list[tuple[Sequence[str], np.ndarray]] = []
        # A task may encode queries differently from the embeddings' encoder, with its prompt or prefix.
        made, found = embeddings.config["encoder"], spec.describe("passage")
        if differ := differing(made, found, passages=options.task is not None):
            what, parameter = (f"task {options.task}", "task") if options.task else (f"encoder {spec.name}", "encoder")
            raise InputError(
                f"{what} is not the one that made embeddings/{embeddings.name} ({', '.join(differ)} differ): name "
                f"that one with parameter {parameter}, or encode the corpus with this one"
            )
        self.described = spec.describe("query")
        self.numerics: str | None = None  # the class of the vectors so far, here or in an earlier run
        self._task = EncodeQueriesTask(self.spec, self.described)

    def encode(self, texts: Sequence[str], runner: Runner) -> np.ndarray:
        """Returns the vectors of queries, float32 [q, dim]. Raises InputError for another numerics class."""
        for kept, vectors in self._kept:
            if kept is texts:
                return vectors
        [(_, (vectors, numerics))] = runner.run(self._task, [list(texts)])
        if self.numerics not in (None, numerics):
            raise InputError(
                f"the queries' vectors are of the numerics class `{self.numerics}`, this worker's are `{numerics}`: "
                "resume on the kind of machine that began it"
            )
        self.numerics = numerics
        self._kept = [*self._kept, (texts, vectors)][-_ENCODED:]
        return vectors


@dataclass(frozen=True)
class EncodeQueriesTask:
    """Encodes a list of queries: float32 [q, dim] and their numerics class. pinned: the encoder's description."""

    spec: EncoderSpec
    pinned: Mapping[str, Any]
    resources: Resources = ALL_CORES
    stays_open: bool = True

    def open(self, place: Place) -> Callable[[list[str], Report], tuple[np.ndarray, str]]:
        """Returns the worker. Raises InputError if its encoder is not the pinned one."""
        from indexing.encoding import check_encoder

        encoder = self.spec.open(side="query", device=place.device, threads=place.cores)
        check_encoder(self.spec.config_of(encoder, "query"), self.pinned)
        return lambda texts, report: (encoder.encode(texts, side="query", task=self.spec.task), encoder.numerics)
