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
from riptide.indexing.embeddings.drift import Drift, canaries_of, measure_drift
from riptide.indexing.embeddings.embeddings_reader import check_corpus
from riptide.indexing.erasure.receipts import check_receipts
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import WARNING, say
from riptide.jobs.common.stage_progress import StageProgress
from riptide.process.memory import format_bytes


@dataclass(frozen=True, kw_only=True)
class Verify(Common):
    GROUP: ClassVar = "checks"

    limit: int | None = None
    """Hash at most N parts of each artifact."""
    encoders: bool = False
    """Also encode 8 stored passages of each generation of embeddings again, and compare the vectors with the stored
    ones. It loads each encoder, so it needs the models and the memory for them."""


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
    if options.encoders and (refused := sum(not check_encoder(store, name) for name in store.names("embeddings"))):
        exit_with_error(
            f"{store.url}: the encoders of {refused} embeddings give other vectors or cannot be compared, see above", 1
        )
    say(f"{store.url}: {len(store.keys()):,} artifacts are as they were committed")


def check_encoder(store: Store, name: str) -> bool:
    """Prints how close the vectors of an encoder are to those stored in embeddings/NAME.

    Returns False if it is refused or cannot be compared.
    """
    try:
        drifts = list(measure_generations(store, name))
    except InputError as error:
        say(f"bad: embeddings/{name}: its encoder cannot be compared with its vectors: {error}")
        return False
    for drift in drifts:
        if not drift.num_canaries:
            continue  # a generation that adds no passages
        prefix = "bad: " if drift.is_refused else WARNING
        line = (
            f"{drift.url}: smallest similarity {drift.shown} of {drift.num_canaries} passages that were encoded again"
        )
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


if __name__ == "__main__":
    run(main, Verify)
