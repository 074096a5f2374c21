"""The record of a release: the tasks that a service serves, and the fingerprints of their artifacts.

releases/ID            an artifact: its tasks, and the fingerprint of each artifact that they use
serving/current.json   names the live release and the previous ones; changed only by compare-and-swap

A release never changes, except by an erasure, so a request that is pinned to one is answered by one version of every
artifact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.hit_sources.online_search import OnlineSearch, SearchTarget
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import Key, without_generation
from riptide.indexing.store.sealed_json import ArtifactReference, fingerprint_of
from riptide.indexing.store.store import Store
from riptide.retriever.options import EncoderOptions
from riptide.serve.release.release_tasks import ServedTask


@dataclass(frozen=True)
class Release:
    """A set of tasks that are served together, and the fingerprints of the artifacts that they use.

    Attributes:
        encoder: The backbone: a Hugging Face name, a folder, or models/NAME of the store; None: no task has dense
            embeddings.
        encoder_options: Fields of EncoderOptions with which texts are encoded.
        tasks: The tasks, ordered by name.
        fingerprints: The fingerprint of every artifact, by its key.
        reranker: The cross-encoder; None: no re-ranking.
        query_model: models/NAME that encodes queries in place of `encoder`; None: `encoder` encodes them too.
        id: The first 16 hexadecimal digits of a hash of all other fields.
    """

    encoder: str | None
    encoder_options: dict[str, Any]
    tasks: tuple[ServedTask, ...]
    fingerprints: dict[str, str]
    reranker: str | None = None
    query_model: str | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", fingerprint_of(self._document())[:16])

    @property
    def query_encoder(self) -> str | None:
        """The fingerprint of the model that encodes queries; its name if the model is not an artifact of the store."""
        model = self.query_model or self.encoder
        return None if model is None else self.fingerprints.get(model, model)

    def task(self, name: str) -> ServedTask | None:
        return next((task for task in self.tasks if task.name == name), None)

    def generations(self, store: Store, kind: str, name: str = "") -> list[Artifact]:
        """Opens the generations of an artifact that belong to the release; later ones are left out.

        An artifact without generations is the only one.

        Args:
            store: The store.
            kind: Kind of the artifact.
            name: Name of the artifact; empty for a kind without names.

        Raises:
            InputError: If one is missing, or has another fingerprint than when the release was made.
        """
        return [self.artifact(store, key) for key in self.generation_keys(kind, name)]

    def generation_keys(self, kind: str, name: str = "") -> list[str]:
        """Returns the keys of the generations of an artifact that belong to the release."""
        whole = f"{kind}/{name}" if name else kind
        keys = sorted(key for key in self.fingerprints if key != whole and without_generation(key) == whole)
        return [whole] if whole in self.fingerprints else keys

    def searched_fingerprints(self, online: OnlineSearch, target: SearchTarget) -> tuple[str, ...]:
        """Returns the fingerprints of the artifacts that a source of a task searches, including those of the corpus."""
        keys = [key for name in online.artifacts(target) for key in self.generation_keys(*name)]
        return tuple(self.fingerprints[key] for key in [*self.generation_keys("corpus"), *keys])

    def artifact(self, store: Store, key: str) -> Artifact:
        """Opens an artifact. Raises InputError if it is missing or its fingerprint is not that of the release."""
        artifact = store.open(*Key.parse(key))
        actual, expected = artifact.fingerprint, self.fingerprints[key]
        if actual != expected:
            raise InputError(
                f"{artifact.url}: its fingerprint is {actual[:12]}, release {self.id} was made of {expected[:12]}: "
                "make a release of what is there now"
            )
        return artifact

    def with_task(self, task: ServedTask, artifacts: Iterable[Artifact]) -> Release:
        """Returns a release with a task added; an existing task of the same name is replaced.

        Args:
            task: The task.
            artifacts: The artifacts that the task uses.
        """
        tasks = [*(other for other in self.tasks if other.name != task.name), task]
        return self._with_tasks(tasks, {**self.fingerprints, **fingerprints_of(artifacts)})

    def without_task(self, name: str) -> Release:
        """Returns a release without the task of a name."""
        return self._with_tasks([task for task in self.tasks if task.name != name], self.fingerprints)

    def _with_tasks(self, tasks: Iterable[ServedTask], fingerprints: Mapping[str, str]) -> Release:
        """Returns a release with the given tasks, without artifacts that only removed tasks use."""
        ordered = tuple(sorted(tasks, key=lambda task: task.name))
        before, after = ({name for task in group for name in task.artifact_keys()} for group in (self.tasks, ordered))
        shared = {self.encoder, self.reranker, self.query_model}
        remaining = {
            key: fingerprint
            for key, fingerprint in fingerprints.items()
            if Key.parse(without_generation(key)) not in before - after or key in shared
        }
        return replace(self, tasks=ordered, fingerprints=remaining)

    def save(self, store: Store) -> None:
        """Writes the release to the store; a damaged document of the same id is replaced.

        The age of an existing release starts again, so no other server removes it in the next hours.
        """
        try:
            self._write(store)
        except CorruptError:
            for file, _ in store.files_in_removal_order(f"releases/{self.id}"):
                store.storage.delete(file)
            self._write(store)

    def _write(self, store: Store) -> None:
        inputs = {key: ArtifactReference(key, fingerprint) for key, fingerprint in self.fingerprints.items()}
        config = {name: value for name, value in self._document().items() if name != "fingerprints"}
        with store.create("releases", self.id, inputs=inputs, config=config) as draft:
            if draft.is_complete:
                store.open("releases", self.id)
                draft.touch()

    @classmethod
    def load(cls, store: Store, id: str) -> Release:
        """Reads the release of an id. Raises InputError if it does not exist, CorruptError if it is damaged."""
        artifact = store.open("releases", id)
        config = artifact.config
        fingerprints = {entry["artifact"]: entry["fingerprint"] for entry in artifact.inputs.values()}
        tasks = tuple(ServedTask.from_document(task) for task in config["tasks"])
        models = config["reranker"], config.get("query_model")
        return cls(config["encoder"], config["encoder_options"], tasks, fingerprints, *models)

    def _document(self) -> dict[str, Any]:
        return {
            "encoder": self.encoder,
            "encoder_options": self.encoder_options,
            "tasks": [task.document() for task in self.tasks],
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "reranker": self.reranker,
            **({"query_model": self.query_model} if self.query_model else {}),  # older releases have no such field
        }


def fingerprints_of(artifacts: Iterable[Artifact]) -> dict[str, str]:
    return {artifact.key: artifact.fingerprint for artifact in artifacts}


def encoder_of(store: Store, release: Release) -> EncoderSpec | None:
    """Returns the encoder of a release, or None if no task has dense embeddings."""
    if release.encoder is None:
        return None
    options = EncoderOptions(**release.encoder_options)
    return EncoderSpec(store, release.encoder, options, query_model=release.query_model)
