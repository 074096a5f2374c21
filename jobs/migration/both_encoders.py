"""Opens the old embeddings and the new encoder of a migration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from riptide.base.errors import InputError, renamed_parameters
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import DENSE, Embeddings
from riptide.indexing.embeddings.named_encoders import (
    EncoderSpec,
    describe_differences,
    differing_settings,
    find_encoder_spec,
)
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import chosen_task
from riptide.jobs.migration.migrate_options import Migrate
from riptide.serve.release.live import read_live_release
from riptide.serve.release.planning import BASE
from riptide.serve.release.release import Release


@dataclass(frozen=True)
class BothEncoders:
    """The old embeddings and the new encoder.

    Attributes:
        store: The store.
        corpus: The corpus.
        old: The existing embeddings.
        spec: The new encoder.
        settings: Its settings of passages.
        live: The live release, None if no release was ever live.
        tag: Its tag for compare-and-swap.
        is_switched: Whether the live release searches `old` with queries of the new encoder: a repeated switch.
    """

    store: Store
    corpus: Corpus
    old: Embeddings
    spec: EncoderSpec
    settings: dict[str, Any]
    live: Release | None
    tag: str | None
    is_switched: bool = False

    @property
    def live_query_model(self) -> str | None:
        """The models/NAME that encodes the queries of the live release for the old embeddings; None: their encoder."""
        base = self.live.task(BASE) if self.live else None
        return self.live.query_model if self.live and base and base.embeddings == self.old.name else None

    @property
    def new_name(self) -> str:
        """The name of the new encoder for results."""
        return self.spec.named_by[1].rstrip("/").rpartition("/")[2]

    def describe(self) -> str:
        """Returns a line with both encoders."""
        return (
            f"from     embeddings/{self.old.name} ({self.old.encoder_name}, {self.old.dim} dimensions) to "
            f"{self.spec.named_by[1]} ({self.settings['dim']} dimensions)"
        )


def open_both(store: Store, options: Migrate) -> BothEncoders:
    """Opens the old embeddings and finds the new encoder; loads no model.

    With `require`, the new encoder may be one of queries alone, over the existing embeddings.

    Raises:
        InputError: If one of them is missing, if the old embeddings lack passages, if the new encoder makes sparse
            vectors or changes queries only, if it encodes queries alone and `to_embeddings` is given, or if it is the
            old one, unless a switch to it is repeated.
    """
    corpus = Corpus.open(store)
    live, tag = read_live_release(store)
    base = live.task(BASE) if live else None
    with renamed_parameters(encoder="to"):
        spec = find_encoder_spec(store, options.to, chosen_task(store, options.task), options.vectors)
        settings = spec.settings("passage")
    parameter = Parameter("to" if options.to else "task", spec.named_by[1])
    if (kind := find_index_kind(settings).reader.kind) is not DENSE:
        raise InputError(f"{parameter}: makes {kind.name} vectors, expected an encoder of dense ones")
    has_query_prompt = spec.task and replace(spec, task=None).settings("passage") == settings
    if has_query_prompt or (spec.query_model and not options.require):
        command = Command("evaluate", store=store.url, source="exact", task=spec.named_by[1])
        raise InputError(
            f"{parameter}: encodes queries only and keeps the vectors of passages, expected an encoder of passages "
            f"too; {command} measures it over the existing embeddings"
        )
    if spec.query_model and options.to_embeddings is not None:
        raise InputError(
            f"{Parameter('to_embeddings', options.to_embeddings)}: {spec.query_model} encodes queries for existing "
            f"embeddings; leave it out, or name these embeddings with {Parameter('embeddings')}"
        )

    def is_candidate(config: dict[str, Any]) -> bool:
        if not DENSE.is_kind_of(config) or config["limit"] is not None:
            return False
        if spec.query_model:
            return not differing_settings(config["encoder"], settings, passages=True)
        return bool(config["encoder"] != settings)

    name = (
        options.embeddings or (base.embeddings if base else None) or store.only_name("embeddings", None, is_candidate)
    )
    old = Embeddings.open(store, name, corpus)
    if (limit := old.config["limit"]) is not None:
        raise InputError(
            f"embeddings/{old.name}: have the first {limit:,} passages of the corpus ({Parameter('limit', limit)}), "
            f"expected all; name other ones with {Parameter('embeddings')}, or encode the corpus without a limit"
        )
    both = BothEncoders(store, corpus, old, spec, settings, live, tag)
    if spec.query_model:
        old.encoder_spec(store, task=spec.named_by[1])  # raises InputError if it encodes queries for other embeddings
        return replace(both, is_switched=options.switch and both.live_query_model == spec.query_model)
    same_queries = spec.task == old.task and spec.settings("query") == old.encoder_spec(store).settings("query")
    if same_queries and not describe_differences(old.config["encoder"], settings):
        is_live = options.embeddings is None and base is not None and options.to_embeddings in (None, old.name)
        if options.switch and is_live:
            return replace(both, is_switched=True)
        raise InputError(
            f"{parameter}: embeddings/{old.name} are of this encoder with these settings; name another encoder, or the "
            f"embeddings of the old one with {Parameter('embeddings')}"
        )
    return both
