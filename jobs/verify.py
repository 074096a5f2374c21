"""Hash every file of a store again, and name the damaged and missing ones.

    riptide verify --store data/squad
    riptide verify --store data/squad --encoders

The exit status is 1 if a file is damaged or missing, or if an encoder gives other vectors than those stored.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import exit_with_error, run

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import DENSE
from riptide.indexing.embeddings.drift import Drift, canaries_of, has_query_canaries, measure_drift, query_canaries
from riptide.indexing.embeddings.embeddings_reader import check_corpus
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.erasure.receipts import check_receipts
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import WARNING, say
from riptide.jobs.common.stage_progress import StageProgress
from riptide.process.memory import format_bytes
from riptide.retriever.options import PLURALS, EncoderOptions


@dataclass(frozen=True, kw_only=True)
class Verify(Common):
    GROUP: ClassVar = "checks"

    limit: int | None = None
    """Hash at most N parts of each artifact."""
    encoders: bool = False
    """Also encode 8 stored passages of each generation of embeddings again, and the 8 fixed queries of each saved map,
    and compare the vectors with the stored ones. It loads each encoder, so it needs the models and the memory for
    them."""


def main(options: Verify) -> None:
    store = Store(options.store).require_not_empty()
    files = list(store.storage.list(""))
    if options.plan:
        say(f"{store.url}: would read {len(files):,} files, {format_bytes(sum(size for _, size in files))}")
        return
    problems = 0
    with StageProgress("verify", unit="bytes") as stage:
        for finding in itertools.chain(verify(store, options.limit), check_receipts(store)):
            stage.count(finding.bytes)
            if finding.problem:
                problems += 1
                say(f"bad: {finding.problem}")
    for key in store.incomplete_keys():
        say(f"incomplete: {store.url}/{key}: the command that makes it resumes it")
    if problems:
        remedy = "restore them, or remove their artifacts and make them again"
        if options.encoders:
            remedy += ", and run the command again: no encoder was compared"
        exit_with_error(f"{store.url}: {problems} bad or missing files; {remedy}", 1)
    if options.encoders:
        keys = [f"embeddings/{name}" for name in store.names("embeddings")]
        keys += [f"models/{name}" for name in store.names("models") if has_query_canaries(store.open("models", name))]
        if refused := sum(not check_encoder(store, key) for key in keys):
            exit_with_error(
                f"{store.url}: the encoders of {refused} artifacts give other vectors or cannot be compared, see above",
                1,
            )
    say(f"{store.url}: {len(store.keys()):,} artifacts are as they were committed")


def check_encoder(store: Store, key: str) -> bool:
    """Prints how close the vectors of an encoder are to those stored in embeddings/NAME, or models/NAME with a map.

    Returns False if it is refused or cannot be compared.
    """
    kind, name = Key.parse(key)
    try:
        drifts = list(measure_generations(store, name)) if kind == "embeddings" else [measure_map(store, name)]
    except InputError as error:
        say(f"bad: {key}: its encoder cannot be compared with its vectors: {error}")
        return False
    for drift in drifts:
        if not drift.num_canaries:
            continue  # a generation that adds no passages
        prefix = "bad: " if drift.is_refused else WARNING
        texts = f"{drift.num_canaries} {PLURALS[drift.side]}"
        line = f"{drift.url}: smallest similarity {drift.shown} of {texts} that were encoded again"
        say(f"{prefix}{drift.problem}" if drift.problem else line)
    return not any(drift.is_refused for drift in drifts)


def measure_generations(store: Store, name: str) -> Iterator[Drift]:
    """Yields the drift of the encoder from each generation of embeddings/NAME.

    Raises InputError if the encoder is missing or not the one that made them, or if they are of another corpus.
    """
    generations, corpus = store.generations("embeddings", name), Corpus.open(store)
    check_corpus(generations, corpus)
    embeddings = find_index_kind(generations[0].config["encoder"]).reader(name, generations)
    spec = embeddings.encoder_spec(store)
    encoder = replace(spec, options=replace(spec.options, compile="never")).open(side="passage", device=None)
    for number in range(len(generations)):
        yield measure_drift(canaries_of(embeddings, corpus, number), encoder, embeddings.kind, spec.task)


def measure_map(store: Store, name: str) -> Drift:
    """Returns the drift of the encoder of queries with a map in models/NAME. Raises InputError if it is damaged."""
    artifact = store.open("models", name)
    options = EncoderOptions(**artifact.notes["options"])
    spec = EncoderSpec(
        store, artifact.notes["backbone"], replace(options, compile="never"), query_model=f"models/{name}"
    )
    return measure_drift(query_canaries(artifact), spec.open(side="query", device=None), DENSE)


if __name__ == "__main__":
    run(main, Verify)
