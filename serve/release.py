"""Tasks and releases: what is served, by fingerprint.

releases/ID            an artifact: its tasks, and the fingerprint of everything that they are made of
serving/current.json   which one is live, and which were before; changed by compare-and-swap alone

A release never changes, so that a request which is pinned to one is answered by one version of everything.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from indexing.artifact import Artifact, Reference, fingerprint_of
from indexing.bm25 import Bm25
from indexing.bm25 import check_lineage as check_bm25
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differing
from indexing.index import Index
from indexing.store import CURRENT, Store
from retriever.errors import InputError
from retriever.options import EncoderOptions

KEPT = 10  # releases before the live one
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GIVEN = "given"  # in the configuration of a prompt that came over HTTP
BASE = "default"  # the task of the backbone without a prompt
OF_TASKS = ("prompts", "embeddings", "index", "bm25")  # kinds of artifacts that a task names


@dataclass(frozen=True)
class Space:
    """What a task's vectors are searched in. index: over the embeddings; None: every vector is scored."""

    embeddings: Embeddings
    index: Index | None

    @property
    def names(self) -> tuple[str, str | None]:
        return self.embeddings.name, self.index.name if self.index else None

    @property
    def generations(self) -> list[Artifact]:
        return [*self.embeddings.generations, *(self.index.generations if self.index else [])]


@dataclass(frozen=True)
class Task:
    """What a team asks by its name. prompt: prompts/NAME of the store, None for the bare backbone. embeddings: those of
    its passages. index: over these; None: every vector is scored. bm25: None where there is none."""

    name: str
    prompt: str | None
    embeddings: str
    index: str | None = None
    bm25: str | None = None

    @property
    def space(self) -> tuple[str, str | None]:
        """The names of what its vectors are searched in."""
        return self.embeddings, self.index


@dataclass(frozen=True)
class Release:
    """What is served together. encoder: the backbone (a Hugging Face name, a folder, or models/NAME); encoder_options:
    how texts become its vectors. fingerprints: of every artifact, by its key. reranker: None where there is none."""

    encoder: str
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
        """The generations of an artifact that the release has, and no later ones.

        Raises InputError where one is missing, or not what it was.
        """
        prefix = f"{kind}/{name}/" if name else f"{kind}/"
        keys = sorted(key for key in self.fingerprints if re.fullmatch(re.escape(prefix) + r"g\d{4}", key))
        return [self.artifact(store, key) for key in keys]

    def artifact(self, store: Store, key: str) -> Artifact:
        """Raises InputError where it is missing, or not what it was when the release was made."""
        kind, _, name = key.partition("/")
        found = store.open(kind, name)
        if found.fingerprint != self.fingerprints[key]:
            raise InputError(f"{found.url}: its fingerprint is {found.fingerprint[:12]}, release {self.id} was made of "
                             f"{self.fingerprints[key][:12]}: make a release of what is there now")  # fmt: skip
        return found

    def with_task(self, task: Task, artifacts: Iterable[Artifact]) -> Release:
        """The same with one task more, or another one of its name. artifacts: all that the task is made of."""
        tasks = [*(other for other in self.tasks if other.name != task.name), task]
        return self._with(tasks, {**self.fingerprints, **_fingerprints(artifacts)})

    def without_task(self, name: str) -> Release:
        """The same but for one task."""
        return self._with([task for task in self.tasks if task.name != name], self.fingerprints)

    def _with(self, tasks: Iterable[Task], fingerprints: Mapping[str, str]) -> Release:
        """With these tasks, and no artifact that only tasks have and none of these does."""
        ordered = tuple(sorted(tasks, key=lambda task: task.name))
        kept = {
            key: own for key, own in fingerprints.items()
            if key.partition("/")[0] not in OF_TASKS or any(_is_of(key, task) for task in ordered)
        }  # fmt: skip
        return replace(self, tasks=ordered, fingerprints=kept)

    def save(self, store: Store) -> None:
        """Write it down; what is there already under its id is the same."""
        inputs = {key: Reference(key, fingerprint) for key, fingerprint in self.fingerprints.items()}
        config = {name: value for name, value in self._document().items() if name != "fingerprints"}
        with store.create("releases", self.id, inputs=inputs, config=config):
            pass

    @classmethod
    def load(cls, store: Store, id: str) -> Release:
        """Raises InputError where there is none of this id, CorruptError where it is damaged."""
        artifact = store.open("releases", id)
        config = artifact.config
        fingerprints = {entry["artifact"]: entry["fingerprint"] for entry in artifact.inputs.values()}
        tasks = tuple(Task(**task) for task in config["tasks"])
        return cls(config["encoder"], config["encoder_options"], tasks, fingerprints, config["reranker"])

    def _document(self) -> dict[str, Any]:
        return {
            "encoder": self.encoder,
            "encoder_options": self.encoder_options,
            "tasks": [asdict(task) for task in self.tasks],
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "reranker": self.reranker,
        }


def current(store: Store) -> tuple[str, str] | None:
    """(id of the live release, tag to change it by); None where there is none."""
    found = store.storage.read_tagged(CURRENT)
    return None if found is None else (str(json.loads(found[0])["release"]), found[1])


def make_current(store: Store, release: Release, tag: str | None) -> bool:
    """Make a release, saved here, the live one; False where another one has become live since `tag` was read.

    The last KEPT before it stay, to go back to; the one before those is removed.
    """
    release.save(store)
    found = store.storage.read_tagged(CURRENT)
    if (None if found is None else found[1]) != tag:
        return False
    said = json.loads(found[0]) if found else {}
    before = [said["release"], *said["before"]] if said else []
    before = [id for id in before if id != release.id]
    document = {"release": release.id, "before": before[:KEPT]}
    if not store.storage.swap(CURRENT, json.dumps(document).encode() + b"\n", tag):
        return False
    for id in before[KEPT:]:
        _remove(store, id)
    return True


def discard(store: Store, id: str) -> None:
    """Remove a release that did not become live, unless it is one to go back to."""
    found = store.storage.read_tagged(CURRENT)
    said = json.loads(found[0]) if found else {}
    if id not in (said.get("release"), *said.get("before", [])):
        _remove(store, id)


def _remove(store: Store, id: str) -> None:
    """Remove a release, and of the prompts that came over HTTP those that no other one has."""
    with contextlib.suppress(InputError):  # it was never there, or somebody else has removed it
        tasks = Release.load(store, id).tasks
        store.remove(f"releases/{id}")
        for task in tasks:
            if task.prompt and came_over_http(store, task.prompt):
                with contextlib.suppress(InputError):  # another release needs it
                    store.remove(f"prompts/{task.prompt}")


def came_over_http(store: Store, prompt: str) -> bool:
    """Whether prompts/NAME was put into a running service; the others were trained here."""
    return GIVEN in store.open("prompts", prompt).config


def renewed(store: Store, release: Release) -> Release:
    """The same tasks over what the store holds now under the same names: later generations, an index built anew.

    Raises InputError where something does not fit any more.
    """
    corpus = Corpus.open(store)
    spec = EncoderSpec(store, release.encoder, EncoderOptions(**release.encoder_options))
    parts: list[Artifact] = [*corpus.generations, *spec.inputs().values()]
    for task in release.tasks:
        space = open_space(store, task.embeddings, task.index, corpus)
        parts += space.generations
        parts += Bm25.open(store, task.bm25, corpus).generations if task.bm25 else []
        parts += [store.open("prompts", task.prompt)] if task.prompt else []
        check_passages(task.name, replace(spec, task=task.prompt).describe("passage"), space.embeddings)
    parts += _model(store, release.reranker)
    return replace(release, fingerprints=_fingerprints(parts))


_SAY_WHICH = "say which with --index NAME"
_PUT_INSTEAD = "remove all but one of them, or put the task over HTTP, naming one"


def plan(
    store: Store, *, embeddings: str | None = None, index: str | None = None, bm25: str | None = None,
    tasks: Iterable[str] | None = None, reranker: str | None = None, before: Release | None = None,
) -> tuple[Release, dict[str, str]]:  # fmt: skip
    """A release of what a store holds: its embeddings (or those named), with the index over them, BM25, every prompt
    (or the tasks named); and why each prompt that was left out does not fit. A prompt whose passages those embeddings
    are not is served over embeddings of its own. before: the live release, whose tasks that came over HTTP stay; others
    that did have been deleted.

    Raises InputError where a name says nothing, or where what is named does not fit together.
    """
    corpus = Corpus.open(store)
    if index is not None and embeddings is None:
        embeddings = str(store.generations("index", store.only("index", index))[-1].config["embeddings"])
    vectors = Embeddings.open(store, embeddings, corpus)
    main = Space(vectors, Index.open(store, index, vectors) if index else _index_over(store, vectors, _SAY_WHICH))
    words = Bm25.open(store, bm25, corpus) if bm25 or store.names("bm25") else None
    spec = EncoderSpec(store, vectors.encoder_name, EncoderOptions(**vectors.encoder_options))
    parts: list[Artifact] = [*corpus.generations, *(words.generations if words else []), *spec.inputs().values()]
    parts += _model(store, reranker)
    found: list[Task] = []
    left: dict[str, str] = {}
    put = {t.name: t for t in before.tasks if t.prompt and came_over_http(store, t.prompt)} if before else {}
    trained = [name for name in store.names("prompts") if not came_over_http(store, name)]
    asked = [BASE, *trained, *put] if tasks is None else list(tasks)
    for name in dict.fromkeys(asked):
        prompt = None if name == BASE else put[name].prompt if name in put else name
        try:
            space = _space_of(store, replace(spec, task=prompt), _name(name), main, corpus, before, put.get(name))
        except InputError as error:
            if tasks is not None:
                raise
            left[name] = str(error)
            continue
        found.append(Task(name, prompt, *space.names, words.name if words else None))
        parts += [*space.generations, *([store.open("prompts", prompt)] if prompt else [])]
    if not found:
        raise InputError(f"{store.url}: no task fits embeddings/{vectors.name}: {'; '.join(left.values())}")
    ordered = tuple(sorted(found, key=lambda task: task.name))
    return Release(spec.name, vectors.encoder_options, ordered, _fingerprints(parts), reranker), left


def _space_of(
    store: Store, spec: EncoderSpec, name: str, main: Space, corpus: Corpus, before: Release | None, put: Task | None
) -> Space:
    """Where a task is searched: where it was put to, if not where the backbone's own is; else in `main`, where these
    are its passages; else in the embeddings of its own. spec: with its prompt.

    Raises InputError where there is none, or are several.
    """
    base = before.task(BASE) if before else None
    described = spec.describe("passage")
    if put is not None and (base is None or put.space != base.space):
        kept = open_space(store, *put.space, corpus)
        check_passages(name, described, kept.embeddings)
        return kept
    if not differing(main.embeddings.config["encoder"], described, passages=True):
        return main
    fitting = [
        own for own in store.names("embeddings")
        if not differing(store.generations("embeddings", own)[-1].config["encoder"], described, passages=True)
    ]  # fmt: skip
    if not fitting:
        check_passages(name, described, main.embeddings)
    if len(fitting) > 1:
        raise InputError(f"task {name}: {store.url} has several embeddings of its passages: {', '.join(fitting)}; "
                         f"{_PUT_INSTEAD}")  # fmt: skip
    vectors = Embeddings.open(store, fitting[0], corpus)
    return Space(vectors, _index_over(store, vectors, _PUT_INSTEAD))


def _index_over(store: Store, vectors: Embeddings, remedy: str) -> Index | None:
    """The index over some embeddings; None where there is none. Raises InputError where there are several."""
    over = [
        name for name in store.names("index")
        if store.generations("index", name)[-1].config["embeddings"] == vectors.name
    ]  # fmt: skip
    if len(over) > 1:
        raise InputError(f"{store.url} has several indexes over embeddings/{vectors.name}: {', '.join(over)}; "
                         f"{remedy}")  # fmt: skip
    return Index.open(store, over[0], vectors) if over else None


def open_space(store: Store, embeddings: str, index: str | None, corpus: Corpus) -> Space:
    """Embeddings, and the index over them, of just this corpus. Raises InputError where they are of another."""
    vectors = Embeddings.open(store, embeddings, corpus)
    if vectors.num_rows > corpus.num_rows:
        raise InputError(f"embeddings/{embeddings} cover {vectors.num_rows:,} passages, the release's corpus has "
                         f"{corpus.num_rows:,}: make a release of what the store holds now first")  # fmt: skip
    return Space(vectors, Index.open(store, index, vectors) if index else None)


def _name(task: str) -> str:
    """A task's name. Raises InputError where it is none."""
    if not TASK_NAME.fullmatch(task):
        raise InputError(f"task {task!r}: expected up to 100 letters, digits, '.', '_' and '-', the first a letter or "
                         "digit")  # fmt: skip
    return task


def check_passages(task: str, described: Mapping[str, Any], vectors: Embeddings) -> None:
    """Raises InputError unless passages as they are described are those that were encoded."""
    if differ := differing(vectors.config["encoder"], described, passages=True):
        raise InputError(f"task {task}: its passages' vectors are not those of embeddings/{vectors.name} "
                         f"({', '.join(differ)} differ): encode the corpus with its prompt, and name an index over "
                         "that")  # fmt: skip


class Opened:
    """What a release names, opened for reading on this node and checked against its fingerprints.

    Raises InputError for whatever is missing, or is not what it was.
    """

    def __init__(self, store: Store, release: Release):
        self.store, self.release = store, release
        self.corpus = Corpus(release.generations(store, "corpus"))
        names = {task.embeddings for task in release.tasks}
        self.embeddings = {name: Embeddings(name, release.generations(store, "embeddings", name)) for name in names}
        indexes = {task.index for task in release.tasks if task.index}
        self.indexes = {name: Index(name, release.generations(store, "index", name)) for name in indexes}
        words = {task.bm25 for task in release.tasks if task.bm25}
        self.bm25 = {name: Bm25(name, release.generations(store, "bm25", name)) for name in words}
        for bm25 in self.bm25.values():
            check_bm25(bm25.generations, self.corpus)
        self.spec = EncoderSpec(store, release.encoder, EncoderOptions(**release.encoder_options))


def _is_of(key: str, task: Task) -> bool:
    """Whether an artifact (KIND/NAME, KIND/NAME/GENERATION) is one that a task names."""
    kind, name = key.split("/")[:2]
    own = {"prompts": task.prompt, "embeddings": task.embeddings, "index": task.index, "bm25": task.bm25}
    return name == own[kind]


def _model(store: Store, name: str | None) -> list[Artifact]:
    """models/NAME as an input; nothing for a model from elsewhere."""
    kind, _, own = (name or "").partition("/")
    return [store.open(kind, own)] if kind == "models" and own else []


def _fingerprints(artifacts: Iterable[Artifact]) -> dict[str, str]:
    return {artifact.key: artifact.fingerprint for artifact in artifacts}
