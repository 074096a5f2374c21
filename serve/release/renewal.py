"""Finds artifacts in the store that are newer than a release, and makes a release of the newest ones.

A corpus grows by generations, and so do the embeddings and indexes that are made from it. A release pins the
generations of one moment; a renewed release has the same tasks over the newest generations of the same artifacts.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, deletion_parts
from riptide.indexing.lucene.bm25_index import Bm25
from riptide.indexing.search.rescoring import reranker_inputs
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import Key, without_generation
from riptide.indexing.store.sealed_json import BEGUN, MANIFEST
from riptide.indexing.store.store import MAX_GENERATIONS, Store, generation, repeated_command
from riptide.serve.release.live import missing_artifacts
from riptide.serve.release.planning import check_passages, open_sources, open_space
from riptide.serve.release.release import Release, encoder_of, fingerprints_of

SEARCHED = ("embeddings", "index", "bm25")  # kinds of artifacts that get a generation when the corpus does


def newer_artifacts(store: Store, release: Release) -> list[str]:
    """Returns the keys of complete generations that artifacts of a release got after the release was made.

    It looks up one file for each generation that may exist, as the cost of a listing grows with the store.
    """
    return _later_generations(store, release, MANIFEST)


def incomplete_generations(store: Store, release: Release) -> list[str]:
    """Returns the keys of incomplete generations of a release's artifacts.

    They were started but not completed, and are later than the last complete one.
    """
    newer = newer_artifacts(store, release)
    last = _last_generations([*release.fingerprints, *newer])
    return [key for key in _later_generations(store, release, BEGUN) if int(key[-4:]) > last[without_generation(key)]]


def replaced_artifacts(store: Store, release: Release) -> list[str]:
    """Returns the keys of a release's artifacts that were removed, or that were built again with other content.

    Raises:
        CorruptError: If the manifest of one cannot be read.
    """

    def is_replaced(key: str) -> bool:
        try:
            return Artifact(store.storage, store.cache, key).fingerprint != release.fingerprints[key]
        except FileNotFoundError:
            return True

    keys = sorted(release.fingerprints)
    with ThreadPoolExecutor(16) as threads:
        return [key for key, replaced in zip(keys, threads.map(is_replaced, keys), strict=True) if replaced]


def describe_generations(store: Store, keys: Iterable[str]) -> list[str]:
    """Returns a line for each artifact: the generations among the keys, and the passages that they add and delete."""
    by_artifact: dict[str, list[str]] = {}
    for key in keys:
        by_artifact.setdefault(without_generation(key), []).append(key)
    return [f"{key}: {_describe_generations_of(store, key, members)}" for key, members in by_artifact.items()]


class Coverage(NamedTuple):
    """The number of passages that an artifact covers and should cover.

    Attributes:
        artifact: KIND/NAME.
        rows: The number of passages that it covers.
        expected: The number that it should cover: those of the corpus, up to the limit with which it was made.
        command: The command that makes its next generation.
    """

    artifact: str
    rows: int
    expected: int
    command: str


def coverage_of(store: Store, release: Release, corpus: Corpus) -> list[Coverage]:
    """Returns the coverage of a release's embeddings and indexes, including all generations in the store.

    It leaves out an artifact that is missing, or an index that was built from other embeddings than the release has.
    """
    keys = map(Key.parse, sorted(_last_generations(release.fingerprints)))
    chains = {key: store.generations(*key) for key in keys if key.kind in SEARCHED}
    coverage = []
    for (kind, name), generations in chains.items():
        limited = generations
        if kind == "index" and generations:
            limited = chains.get(Key("embeddings", generations[-1].config["embeddings"]), [])
        if limited:
            rows, limit = sum(artifact.rows for artifact in generations), limited[0].config["limit"] or corpus.num_rows
            command = repeated_command(kind, name)
            coverage.append(Coverage(f"{kind}/{name}", rows, min(corpus.num_rows, limit), command))
    return coverage


def renew_release(store: Store, release: Release) -> Release:
    """Returns a release of the same tasks with the newest generations of their artifacts, for example a grown index.

    Raises:
        InputError: If an artifact lacks passages of the corpus, of which the message names all, or does not fit any
            more.
    """
    corpus = Corpus.open(store)
    incomplete = [each for each in coverage_of(store, release, corpus) if each.rows < each.expected]
    if incomplete:
        lines = [
            f"{each.artifact} covers {each.rows:,} of {each.expected:,} passages: run {each.command}"
            for each in incomplete
        ]
        raise InputError(f"{store.url}: {'; '.join(lines)}")
    spec = encoder_of(store, release)
    artifacts: list[Artifact] = [*corpus.generations, *(spec.inputs().values() if spec else [])]
    artifacts += open_sources(store, [source for task in release.tasks for source in task.sources], corpus)[1]
    for name in sorted({task.bm25 for task in release.tasks if task.bm25}):
        artifacts += Bm25.open(store, name, corpus).generations
    spaces = {names: open_space(store, *names, corpus) for task in release.tasks if (names := task.space)}
    for task in release.tasks:
        artifacts += [store.open("prompts", task.prompt)] if task.prompt else []
        if task.space and spec:
            space = spaces[task.space]
            artifacts += space.generations
            try:
                check_passages(replace(spec, task=task.prompt).settings("passage"), space.embeddings)
            except InputError as error:
                raise InputError(f"task {task.name}: {error}") from error
    artifacts += reranker_inputs(store, release.reranker or "").values()
    return replace(release, fingerprints=fingerprints_of(artifacts))


def _later_generations(store: Store, release: Release, file: str) -> list[str]:
    """Returns the keys of later generations that have a given file: first of the corpus, then by artifact.

    A generation whose number is in the release's corpus adds no passages, because the release already covers that
    corpus.
    """
    last_generations = _last_generations(release.fingerprints)
    number = first = last_generations.pop("corpus") + 1
    while number < MAX_GENERATIONS and store.storage.size(f"corpus/{generation(number)}/{file}") is not None:
        number += 1
    keys = [
        f"{artifact_key}/{generation(later)}"
        for artifact_key in sorted(last_generations)
        for later in range(first, number)
    ]
    missing = set(missing_artifacts(store, keys, file))
    return [
        *(f"corpus/{generation(later)}" for later in range(first, number)),
        *(key for key in keys if key not in missing),
    ]


def _last_generations(keys: Iterable[str]) -> dict[str, int]:
    """Returns the number of the last generation of each artifact with generations, by KIND or KIND/NAME."""
    last: dict[str, int] = {}
    for key in keys:
        if without_generation(key) != key:
            last[without_generation(key)] = max(int(key[-4:]), last.get(without_generation(key), 0))
    return last


def _describe_generations_of(store: Store, artifact_key: str, generation_keys: list[str]) -> str:
    """Describes generations of one artifact: their names, the passages that they add and delete, and new filters."""
    names = [key[-5:] for key in generation_keys]
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    try:
        generations = [store.open(*Key.parse(key)) for key in generation_keys]
    except InputError:  # opening the generation for the release raises the same error, with its message
        return span
    added = _format_passages(sum(artifact.rows for artifact in generations))
    if artifact_key != "corpus":
        return f"{span}, {added}"
    deleted = sum(part.rows for artifact in generations for part in deletion_parts(artifact))
    filters = ", other filters" if any(artifact.numbered_parts("filters") for artifact in generations) else ""
    return f"{span}, {added} added, {deleted:,} deleted{filters}"


def _format_passages(number: int) -> str:
    return f"{number:,} passage{'' if number == 1 else 's'}"
