"""Releases: the tasks that a service serves, and the fingerprints of their artifacts.

releases/ID            an artifact: its tasks, and the fingerprint of each artifact that they use
serving/current.json   names the live release and the previous ones; changed only by compare-and-swap

A release never changes, so a request that is pinned to one is answered by one version of every artifact.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from indexing.corpus.corpus import Corpus
from indexing.dense.index import Index
from indexing.embeddings.embeddings import DENSE, Embeddings
from indexing.embeddings.encoders import EncoderSpec, check_prompt_settings, differences, differing
from indexing.hit_sources.dense import Space
from indexing.hit_sources.grammar import parse
from indexing.hit_sources.kind import SearchContext
from indexing.hit_sources.modes import dense_names, has_dense, index_over
from indexing.hit_sources.online import OnlineSearch, PinnedArtifacts, Target
from indexing.lucene.bm25 import Bm25
from indexing.store.artifact import MANIFEST, Artifact, Reference, fingerprint_of
from indexing.store.cache import CorruptError
from indexing.store.live_release import CURRENT, Current, parse_current, unreadable_release
from indexing.store.retention import (
    GIVEN,
    expired_prompts,
    expired_releases,
    newest_releases,
    remove_prompt,
    remove_release,
)
from indexing.store.store import Store
from retriever.errors import InputError
from retriever.options import EncoderOptions
from serve.tasks import Task

log = logging.getLogger("riptide.serve")

KEPT = 10  # previous releases that current.json names, to switch back to
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OWN_KINDS = {"bm25": "bm25", "exact": "embeddings", "index": "index"}  # kinds in fields of a task, and the fields
BASE = "default"  # the task of the backbone without a prompt


@dataclass(frozen=True)
class Release:
    """The tasks that are served together, and all artifacts that they use.

    Attributes:
        encoder: The backbone: a Hugging Face name, a folder, or models/NAME of the store; None: no task has dense
            embeddings.
        encoder_options: Fields of EncoderOptions with which texts are encoded.
        tasks: The tasks, ordered by name.
        fingerprints: The fingerprint of every artifact, by its key.
        reranker: The cross-encoder; None: no re-ranking.
        id: The first 16 hexadecimal digits of a hash of all other fields.
    """

    encoder: str | None
    encoder_options: dict[str, Any]
    tasks: tuple[Task, ...]
    fingerprints: dict[str, str]
    reranker: str | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", fingerprint_of(self._document())[:16])

    def task(self, name: str) -> Task | None:
        return next((task for task in self.tasks if task.name == name), None)

    def generations(self, store: Store, kind: str, name: str = "") -> list[Artifact]:
        """Returns the generations of an artifact that belong to the release, without later ones.

        An artifact without generations is the only one.

        Args:
            store: The store.
            kind: Kind of the artifact.
            name: Name of the artifact; empty for a kind without names.

        Raises:
            InputError: If one is missing, or has another fingerprint than when the release was made.
        """
        return [self.artifact(store, key) for key in self.keys(kind, name)]

    def keys(self, kind: str, name: str = "") -> list[str]:
        """Returns the keys of the generations of an artifact that belong to the release."""
        whole = f"{kind}/{name}" if name else kind
        keys = sorted(key for key in self.fingerprints if re.fullmatch(re.escape(whole) + r"/g\d{4}", key))
        return [whole] if whole in self.fingerprints else keys

    def contents(self, online: OnlineSearch, target: Target) -> tuple[str, ...]:
        """Returns the fingerprints of the artifacts that a source of a task searches, and of the corpus."""
        keys = [key for name in online.artifacts(target) for key in self.keys(*name)]
        return tuple(self.fingerprints[key] for key in [*self.keys("corpus"), *keys])

    def artifact(self, store: Store, key: str) -> Artifact:
        """Returns an artifact. Raises InputError if it is missing, or has another fingerprint than in the release."""
        kind, _, name = key.partition("/")
        artifact = store.open(kind, name)
        actual, expected = artifact.fingerprint, self.fingerprints[key]
        if actual != expected:
            raise InputError(
                f"{artifact.url}: its fingerprint is {actual[:12]}, release {self.id} was made of {expected[:12]}: "
                "make a release of what is there now"
            )
        return artifact

    def with_task(self, task: Task, artifacts: Iterable[Artifact]) -> Release:
        """Returns a release with an additional task, which replaces an existing one of its name.

        Args:
            task: The task.
            artifacts: The artifacts that the task uses.
        """
        tasks = [*(other for other in self.tasks if other.name != task.name), task]
        return self._with(tasks, {**self.fingerprints, **fingerprints_of(artifacts)})

    def without_task(self, name: str) -> Release:
        """Returns a release without one of the tasks."""
        return self._with([task for task in self.tasks if task.name != name], self.fingerprints)

    def _with(self, tasks: Iterable[Task], fingerprints: Mapping[str, str]) -> Release:
        """Returns a release with these tasks; artifacts of tasks stay only if one of these tasks names them."""
        ordered = tuple(sorted(tasks, key=lambda task: task.name))
        before, after = ({name for task in group for name in task.artifacts()} for group in (self.tasks, ordered))
        shared = {self.encoder, self.reranker}
        remaining = {
            key: fingerprint
            for key, fingerprint in fingerprints.items()
            if _name_in(key) not in before - after or key in shared
        }
        return replace(self, tasks=ordered, fingerprints=remaining)

    def save(self, store: Store) -> None:
        """Writes the release to the store. A damaged release of the same id is written again.

        The age of an existing release starts again, so no other server removes it in the next hours.
        """
        try:
            self._write(store)
        except CorruptError:
            for file, _ in store.removal(f"releases/{self.id}"):
                store.storage.delete(file)
            self._write(store)

    def _write(self, store: Store) -> None:
        inputs = {key: Reference(key, fingerprint) for key, fingerprint in self.fingerprints.items()}
        config = {name: value for name, value in self._document().items() if name != "fingerprints"}
        with store.create("releases", self.id, inputs=inputs, config=config) as draft:
            if draft.complete:
                store.open("releases", self.id)
                draft.touch()

    @classmethod
    def load(cls, store: Store, id: str) -> Release:
        """Returns the release of an id. Raises InputError if it does not exist, CorruptError if it is damaged."""
        artifact = store.open("releases", id)
        config = artifact.config
        fingerprints = {entry["artifact"]: entry["fingerprint"] for entry in artifact.inputs.values()}
        tasks = tuple(Task.from_document(task) for task in config["tasks"])
        return cls(config["encoder"], config["encoder_options"], tasks, fingerprints, config["reranker"])

    def _document(self) -> dict[str, Any]:
        return {
            "encoder": self.encoder,
            "encoder_options": self.encoder_options,
            "tasks": [task.document() for task in self.tasks],
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "reranker": self.reranker,
        }


def current(store: Store) -> tuple[str, str] | None:
    """Returns the id of the live release and the tag for compare-and-swap; None if no release was ever live.

    Raises:
        CorruptError: If `serving/current.json` is damaged; the message says how to make a new release.
    """
    tagged = store.storage.read_tagged(CURRENT)
    return None if tagged is None else (parse_current(store.storage, tagged[0]).release, tagged[1])


def live_release(store: Store) -> tuple[Release | None, str | None]:
    """Returns the live release and the tag for compare-and-swap; None for both if no release was ever live.

    Raises:
        CorruptError: If it is missing or damaged; the message says how to make a new release.
    """
    live = current(store)
    if live is None:
        return None, None
    try:
        return _load(store, live[0]), live[1]
    except CorruptError as error:
        raise unreadable_release(store.storage, live[0], error) from error


def last_release(store: Store) -> tuple[Release | None, str | None]:
    """Returns the release to repair a store from, and the tag to change the live one with compare-and-swap.

    The release is the first that is neither missing nor damaged, in this order: the live one, the previous ones, all
    others from the newest to the oldest. None if there is no such release.
    """
    tagged = store.storage.read_tagged(CURRENT)
    if tagged is None:
        return None, None
    for id in dict.fromkeys([*_history(store, tagged[0]), *newest_releases(store)]):
        try:
            return _load(store, id), tagged[1]
        except CorruptError as error:
            log.warning("%s", error)
    return None, tagged[1]


def make_current(store: Store, release: Release, tag: str | None) -> bool:
    """Saves a release and makes it the live one; `current.json` also names the KEPT previous releases.

    Another server may remove the release, or one of its prompts that came over HTTP, at the same moment. Therefore both
    are checked again after the swap: a missing release is written again, and a missing prompt undoes the swap.

    Args:
        store: The store.
        release: The release. Its artifacts are in the store.
        tag: The tag that `current` returned when the release was made; None if no release was ever live.

    Returns:
        True if the release is live. False if another release became live since, or if an artifact of this one was
        removed: then make the release again.
    """
    before = store.storage.read_tagged(CURRENT)
    if (before[1] if before else None) != tag or missing_artifacts(store, release.fingerprints):
        return False
    release.save(store)
    history = [id for id in (_history(store, before[0]) if before else ()) if id != release.id]
    document = Current(release.id, tuple(history[:KEPT])).document()
    if not store.storage.swap(CURRENT, document, tag):
        return False
    if missing_artifacts(store, [f"releases/{release.id}"]):
        release.save(store)
    if missing := missing_artifacts(store, release.fingerprints):
        log.warning("release %s lacks %s, which another server removed", release.id, ", ".join(missing))
        now = store.storage.read_tagged(CURRENT)
        if before and now and now[0] == document:
            store.storage.swap(CURRENT, before[0], now[1])
        return False
    _clear(store)
    return True


def discard(store: Store, id: str) -> None:
    """Discards a release that did not become live.

    Other servers may be about to make it live, so it is removed only hours after it was saved: by this call if that
    time has passed, otherwise by a later change of the live release or by `gc`.
    """
    _clear(store, f"releases/{id}")


def _clear(store: Store, only: str | None = None) -> None:
    """Removes the expired releases (or only one of them), and those of their prompts over HTTP that nothing uses.

    It runs after a change that has already succeeded or failed, so an error is logged and the next call tries again.
    """
    try:
        expired = [key for key in expired_releases(store) if only in (None, key)]
        prompts = {entry["artifact"] for key in expired for entry in store.inputs(key).values()}
        if live := current(store):
            prompts -= {entry["artifact"] for entry in store.inputs(f"releases/{live[0]}").values()}
        for key in expired:
            remove_release(store, key)
        for key in expired_prompts(store, among=prompts) if expired else ():
            remove_prompt(store, key)
    except (InputError, OSError) as error:
        log.warning("old releases could not be removed: %s", error)


def _load(store: Store, id: str) -> Release:
    """Returns a release. Raises CorruptError if it is missing or damaged."""
    if store.storage.size(f"releases/{id}/{MANIFEST}") is None:
        raise CorruptError(f"{store.url}/releases/{id}: there is no such release")
    return Release.load(store, id)


def _history(store: Store, data: bytes) -> list[str]:
    """Returns the ids of the live release and the previous ones; of all, newest first, if `current.json` is damaged."""
    try:
        current = parse_current(store.storage, data)
    except CorruptError:
        return newest_releases(store)
    return [current.release, *current.before]


def missing_artifacts(store: Store, keys: Collection[str], file: str = MANIFEST) -> list[str]:
    """Returns those of the keys whose artifact lacks a file: by default the manifest, so that it is not complete."""
    with ThreadPoolExecutor(16) as threads:
        sizes = threads.map(store.storage.size, [f"{key}/{file}" for key in keys])
        return [key for key, size in zip(keys, sizes, strict=True) if size is None]


def came_over_http(store: Store, prompt: str) -> bool:
    """Whether prompts/NAME was put into a running service over HTTP; all others were trained in this store."""
    return GIVEN in store.open("prompts", prompt).config


def encoder_of(store: Store, release: Release) -> EncoderSpec | None:
    """Returns the encoder of a release; None if no task has dense embeddings."""
    if release.encoder is None:
        return None
    return EncoderSpec(store, release.encoder, EncoderOptions(**release.encoder_options))


NO_EMBEDDINGS = "none"  # in place of the name of embeddings: a release without dense search
_NO_DENSE = "a prompt is one of an encoder of dense vectors, and the release has no dense embeddings"
_PUT_INSTEAD = "remove all but one of them, or put the task over HTTP, naming one"


def plan(
    store: Store,
    *,
    embeddings: str | None = None,
    index: str | None = None,
    bm25: str | None = None,
    tasks: Iterable[str] | None = None,
    reranker: str | None = None,
    before: Release | None = None,
    sources: Iterable[str] | None = None,
) -> tuple[Release, dict[str, str]]:
    """Makes a release of the artifacts of a store, without loading a model.

    Args:
        store: The store.
        embeddings: Name of the backbone's embeddings; None: the only dense ones. With NO_EMBEDDINGS, or if the store
            has no dense embeddings, but BM25 or `sources`, the release has one task, without dense search.
        index: Name of the index over them; None: the only one, or exact search without any.
        bm25: Name of the BM25 index; None: the only one, if any.
        tasks: The tasks to serve; None: the bare backbone and every prompt that fits. A prompt for passages is served
            over the embeddings that were made with it.
        reranker: The re-ranker, None for none.
        before: The live release. Its tasks that came over HTTP are kept; other prompts that came over HTTP belong to
            deleted tasks and are not served.
        sources: Sources of other kinds that every task serves, in the grammar of sources; None: those of the live
            release.

    Returns:
        The release, and for each prompt that it excludes the reason, in one line that starts with the task's name.

    Raises:
        InputError: If a name is unknown, or if the named artifacts do not fit together.
    """
    corpus = Corpus.open(store)
    words = Bm25.open(store, bm25, corpus) if bm25 or store.names("bm25") else None
    others, artifacts = (
        open_sources(store, sources, corpus) if sources is not None else _live_sources(store, before, corpus)
    )
    parts: list[Artifact] = [*corpus.generations, *(words.generations if words else []), *artifacts]
    parts += model_artifacts(store, reranker)
    if not _has_dense_search(store, embeddings, index, bool(words or others)):
        if prompted := [name for name in tasks or () if name != BASE]:
            raise InputError(f"task {prompted[0]}: {_NO_DENSE}")
        task = Task(BASE, None, None, None, words.name if words else None, others)
        excluded = {name: f"task {name}: {_NO_DENSE}" for name in store.names("prompts")}
        return Release(None, {}, (task,), fingerprints_of(parts), reranker), excluded
    embeddings, index = dense_names(store, embeddings, index)
    vectors = Embeddings.open(store, embeddings, corpus)
    main = Space(vectors, Index.open(store, index, vectors) if index else None)
    spec = EncoderSpec(store, vectors.encoder_name, EncoderOptions(**vectors.encoder_options))
    parts += spec.inputs().values()
    planned: list[Task] = []
    excluded = {}
    trained, received = _prompts_by_origin(store)
    received_tasks = {task.name: task for task in before.tasks if task.prompt in received} if before else {}
    names = [BASE, *trained, *received_tasks] if tasks is None else list(tasks)
    for name in dict.fromkeys(names):
        prompt = None if name == BASE else received_tasks[name].prompt if name in received_tasks else name
        try:
            space = _space_of(
                store, replace(spec, task=prompt), _name(name), main, corpus, before, received_tasks.get(name)
            )
        except InputError as error:
            reason = f"task {name}: {str(error).removeprefix(f'task {name}: ')}"
            if tasks is not None:
                raise InputError(reason) from error
            excluded[name] = reason
            continue
        planned.append(Task(name, prompt, *space.names, words.name if words else None, others))
        parts += [*space.generations, *([store.open("prompts", prompt)] if prompt else [])]
    if not planned:
        raise InputError(f"{store.url}: no task fits embeddings/{vectors.name}: {'; '.join(excluded.values())}")
    ordered = tuple(sorted(planned, key=lambda task: task.name))
    return Release(spec.name, vectors.encoder_options, ordered, fingerprints_of(parts), reranker), excluded


def _has_dense_search(store: Store, embeddings: str | None, index: str | None, has_others: bool) -> bool:
    """Whether a release has dense search.

    Args:
        store: The store.
        embeddings, index: As of `plan`.
        has_others: Whether the release has BM25 or other sources.

    Raises:
        InputError: If it has none, but an index is named, or nothing else can be searched, or dense embeddings were
            begun and are not complete: the user may expect to search them.
    """
    if embeddings == NO_EMBEDDINGS:
        if index is not None:
            raise InputError(f"parameter index {index}: expected no index with parameter embeddings {NO_EMBEDDINGS}")
        if not has_others:
            raise InputError(
                f"parameter embeddings {NO_EMBEDDINGS}: {store.url} has no BM25 index, and no sources are named, so "
                "nothing can be searched: build an index (build_bm25), or name parameter sources"
            )
        return False
    if embeddings is not None or index is not None or not has_others:
        return True
    if has_dense(store):
        return True
    for key in (key for key in store.incomplete() if key.startswith("embeddings/")):
        manifest = store.manifest(key)
        if manifest is None or DENSE.holds(manifest["config"]):
            raise InputError(
                f"{store.url}/{key} was begun and is not complete: run the command that makes it again, or give "
                f"parameter embeddings {NO_EMBEDDINGS} to serve the store without dense search"
            )
    return False


def _live_sources(store: Store, before: Release | None, corpus: Corpus) -> tuple[tuple[str, ...], list[Artifact]]:
    """Returns the sources of the live release, and their artifacts, as `open_sources` does."""
    try:
        return open_sources(
            store, [source for task in before.tasks for source in task.sources] if before else [], corpus
        )
    except InputError as error:
        raise InputError(
            f"{error}; the live release serves this source: name the sources to serve with parameter sources"
        ) from error


def _prompts_by_origin(store: Store) -> tuple[list[str], list[str]]:
    """Returns the names of the prompts that were trained in this store, and of those that came over HTTP.

    A damaged prompt, whose origin is unknown, is among the first, so that `plan` reports it by name as excluded.
    """
    trained, received = list[str](), list[str]()
    for name in store.names("prompts"):
        try:
            (received if came_over_http(store, name) else trained).append(name)
        except InputError:
            trained.append(name)
    return trained, received


def _space_of(
    store: Store, spec: EncoderSpec, name: str, main: Space, corpus: Corpus, before: Release | None, put: Task | None
) -> Space:
    """Returns the space that a task searches.

    It is the task's previous space, if it was put over HTTP with another one than the backbone's. Otherwise it is
    `main` if the passages are encoded without a prompt, else the embeddings that were made with the prompt. spec: the
    release's encoder with the task's prompt.

    Raises InputError if the encoder cannot use the prompt, or unless there is exactly one such space.
    """
    if (prompt := spec.prompt()) is not None:
        check_prompt_settings(prompt, spec)
    base = before.task(BASE) if before else None
    described = spec.describe("passage")
    if put is not None and put.space and (base is None or put.space != base.space):
        space = open_space(store, *put.space, corpus)
        check_passages(name, described, space.embeddings)
        return space
    if not differing(main.embeddings.config["encoder"], described, passages=True):
        return main
    spaces, reasons = _made_for(store, described, corpus)
    complete = [vectors for vectors in spaces if vectors.num_rows >= main.embeddings.num_rows]
    if not complete and spaces:
        raise InputError(
            f"task {name}: embeddings/{spaces[0].name} cover {spaces[0].num_rows:,} of the "
            f"{main.embeddings.num_rows:,} passages: encode the others for this task"
        )
    if not complete and reasons:
        raise InputError(f"task {name}: {reasons[0]}")
    if not complete:
        check_passages(name, described, main.embeddings)
    if len(complete) > 1:
        raise InputError(
            f"task {name}: {store.url} has several embeddings of its passages: "
            f"{', '.join(vectors.name for vectors in complete)}; {_PUT_INSTEAD}"
        )
    [vectors] = complete
    index = index_over(store, vectors.name, _PUT_INSTEAD)
    return Space(vectors, Index.open(store, index, vectors) if index else None)


def _made_for(store: Store, described: Mapping[str, Any], corpus: Corpus) -> tuple[list[Embeddings], list[str]]:
    """Returns the embeddings of passages encoded as `described`, and the reasons why some of them cannot be used."""
    spaces, reasons = list[Embeddings](), list[str]()
    for name in store.names("embeddings"):
        try:
            config = store.generations("embeddings", name)[-1].config
        except InputError:
            continue  # damaged, so the encoder of these embeddings is unknown
        if differing(config["encoder"], described, passages=True):
            continue
        try:
            spaces.append(Embeddings.open(store, name, corpus))
        except InputError as error:
            reasons.append(str(error))
    return spaces, reasons


def open_space(store: Store, embeddings: str, index: str | None, corpus: Corpus) -> Space:
    """Returns the space of embeddings and of the index over them.

    Args:
        store: The store.
        embeddings: Name of the embeddings.
        index: Name of the index over them; None: every vector is scored.
        corpus: The corpus that they must belong to.

    Raises:
        InputError: If they belong to another corpus.
    """
    vectors = Embeddings.open(store, embeddings, corpus)
    if vectors.num_rows > corpus.num_rows:
        raise InputError(
            f"embeddings/{embeddings} cover {vectors.num_rows:,} passages, the release's corpus has "
            f"{corpus.num_rows:,}: make a release of what the store holds now first"
        )
    return Space(vectors, Index.open(store, index, vectors) if index else None)


def open_sources(store: Store, sources: Iterable[str], corpus: Corpus) -> tuple[tuple[str, ...], list[Artifact]]:
    """Returns sources of other kinds than those that each task has, with names filled in, and their artifacts.

    Raises:
        InputError: If a source is a fusion, is of a kind that tasks have anyway, or does not fit the corpus.
    """
    names, artifacts = dict[str, None](), list[Artifact]()
    for source in dict.fromkeys(sources):  # tasks mostly have the same ones
        expression = parse(source)
        kind = expression.terms[0].kind
        if len(expression.terms) > 1:
            raise InputError(f"source {source!r}: expected one source; requests may fuse the sources of a task")
        if kind.name in OWN_KINDS:
            raise InputError(f"source {source!r}: name it by parameter {OWN_KINDS[kind.name]}, as the tasks have one")
        opened = kind.open(SearchContext(store, corpus), expression.terms[0].name)
        if opened.source not in names:
            names[opened.source] = None
            artifacts += opened.inputs().values()
    return tuple(names), artifacts


def _name(task: str) -> str:
    """Returns a task's name. Raises InputError if the name is not allowed."""
    if not TASK_NAME.fullmatch(task):
        raise InputError(
            f"task {task}: expected a name of up to 100 letters, digits, '.', '_' and '-', the first a "
            "letter or a digit"
        )
    return task


def check_passages(task: str, described: Mapping[str, Any], vectors: Embeddings) -> None:
    """Raises InputError unless `vectors` are embeddings of passages encoded as `described`."""
    if differ := differences(vectors.config["encoder"], described, passages=True):
        raise InputError(
            f"task {task}: its passages' vectors are not those of embeddings/{vectors.name} ({differ}): "
            "encode the corpus for this task, and name an index over those embeddings"
        )


class Opened:
    """The artifacts of a release, opened for reading on this node and checked against its fingerprints.

    Args:
        store: The store.
        release: The release.

    Raises:
        InputError: If an artifact is missing, or has another fingerprint than in the release.
    """

    def __init__(self, store: Store, release: Release):
        self.store, self.release = store, release
        self._generations: dict[tuple[str, str], list[Artifact]] = {}
        self.corpus = Corpus(release.generations(store, "corpus"))
        pinned = PinnedArtifacts(store, self.corpus, self.generations)
        self.readers: dict[tuple[OnlineSearch, Target], Any] = {}  # of the sources of all tasks
        for source in (source for task in release.tasks for source in task.served()):
            key = source.kind.online, source.target
            if key not in self.readers:
                self.readers[key] = source.kind.online.read(source.target, pinned)
        spaces = [readers for readers in self.readers.values() if isinstance(readers, Space)]
        self.embeddings = {space.embeddings.name: space.embeddings for space in spaces}
        self.indexes = {space.index.name: space.index for space in spaces if space.index}
        self.spec = encoder_of(store, release)

    def generations(self, kind: str, name: str) -> list[Artifact]:
        """Returns the generations of an artifact of the release."""
        if (kind, name) not in self._generations:
            self._generations[kind, name] = self.release.generations(self.store, kind, name)
        return self._generations[kind, name]


def check_row_ranges(artifacts: Opened, row_ranges: int) -> None:
    """Raises InputError if an index of a release has fewer shards than there are ranges of rows to search."""
    for name, index in artifacts.indexes.items():
        if len(index.shards) < row_ranges:
            raise InputError(
                f"parameter row_ranges {row_ranges}: index/{name} has {len(index.shards)} shards, and each belongs to "
                f"one range: give at most so many, or build the index with {row_ranges} shards"
            )


def _name_in(key: str) -> tuple[str, str]:
    """Returns the kind and the name of an artifact's key (KIND/NAME or KIND/NAME/GENERATION)."""
    kind, _, name = key.partition("/")
    return kind, name.partition("/")[0]


def model_artifacts(store: Store, name: str | None) -> list[Artifact]:
    """Returns the artifact of models/NAME; an empty list for a model from elsewhere."""
    kind, _, model = (name or "").partition("/")
    return [store.open(kind, model)] if kind == "models" and model else []


def fingerprints_of(artifacts: Iterable[Artifact]) -> dict[str, str]:
    return {artifact.key: artifact.fingerprint for artifact in artifacts}
