"""Stores the files of a Hugging Face model folder as models/NAME, and provides them as a local folder again.

models/NAME   file-00000-HASH.file  file-00001-HASH.file …   each part's facts: {"path": "config.json"}

The suffix is ".file" because an artifact's records end in ".json".
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from riptide.base.errors import InputError
from riptide.indexing.storage.cache import CorruptError, file_sha256, node_cache
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.keys import Key, checkpoint_names
from riptide.indexing.store.sealed_json import add_own_hash, check_own_hash, fingerprint_of, read_begun
from riptide.indexing.store.store import Store
from riptide.telemetry.phases import measured

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


def commit_files(draft: Draft, folder: Path) -> None:
    """Commits each file of a folder as a part of the draft, in the order of file names.

    Raises:
        InputError: If the folder holds pickled files, or other files than those that an earlier run committed.
    """
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if pickled := [file for file in files if file.endswith(PICKLES)]:
        raise InputError(f"{folder / pickled[0]}: a pickled file can run anything: save the model as safetensors")
    for number, file in enumerate(files):
        copy = functools.partial(shutil.copyfile, folder / file)
        part = draft.commit(f"file-{number:05d}", ".file", copy, rows=0, path=file)
        if part.facts["path"] != file:
            raise InputError(
                f"{draft.url}/{part.file}: holds {part.facts['path']}, now {file}: remove {draft.key} and make it again"
            )


def model_folder(artifact: Artifact) -> Path:
    """Provides a local folder with the files of a model under their original names.

    The files are links to the parts on this node, which are checked again at every call.

    Raises:
        InputError: If the artifact is no model.
        CorruptError: If the bytes of a file differ from the committed ones.
    """
    parts = artifact.numbered_parts("file")
    if not parts:
        raise InputError(f"{artifact.url}: holds no model's files")
    identity = [artifact.url, artifact.fingerprint, *([part.facts["path"], part.sha256] for part in parts)]
    folder = node_cache().folder / "models" / fingerprint_of(identity)[:32] / artifact.key.rpartition("/")[2]
    for part in parts:
        path = PurePosixPath(part.facts["path"])
        if path.is_absolute() or ".." in path.parts:
            raise InputError(f"{artifact.url}/{part.file}: its path {path} leads out of the model's folder")
        _make_link(folder / path, artifact.local_path(part).absolute())
    return folder


def resolve_model(store: Store, name: str) -> str:
    """Returns a local folder for "models/NAME" of the store or "STORE/models/NAME"; other names are returned unchanged.

    Raises:
        InputError: If the store has no such model.
    """
    artifact = stored_model(store, name) or _model_of_another_store(name)
    return name if artifact is None else str(model_folder(artifact))


def _model_of_another_store(name: str) -> Artifact | None:
    """Opens the artifact "STORE/models/NAME"; returns None for any other name, such as that of a local folder."""
    url, _, model = name.rpartition("/models/")
    if not url or not model or "/" in model:
        return None
    other = Store(url)
    return other.open("models", model) if "://" in url or model in other.names("models") else None


def stored_model(store: Store, name: str) -> Artifact | None:
    """Opens the artifact "models/NAME"; returns None for any other name. Raises InputError if it is missing."""
    kind, model = Key.parse(name)
    return store.open(kind, model) if kind == "models" and model else None


def resolve_task(store: Store, name: str) -> str:
    """Returns the name of a task's prompt or model; for a sweep, the name of the run with the best dev quality.

    Args:
        store: The store.
        name: A task, sweeps/NAME, or the NAME of a sweep if no prompt and no model has this name.

    Raises:
        InputError: If sweeps/NAME is missing or incomplete.
    """
    sweep = name.removeprefix("sweeps/")
    is_task = name == sweep and any(name in store.names(kind) for kind in ("prompts", "models"))
    if is_task or (name == sweep and name not in store.names("sweeps")):
        return name
    return Key.parse(store.open("sweeps", sweep).notes["chosen"]).name


@dataclass(frozen=True)
class StoredCheckpoint:
    """The last checkpoint of a training run, under checkpoints/NAME. It can be sent to workers.

    A checkpoint is one file. It counts from the moment when `latest.json`, which names it with its sha256, is replaced.

    Attributes:
        store: The store.
        name: The name of the checkpoints.
        identity: The identity of the draft that is trained; checkpoints of other drafts do not count.
    """

    store: Store
    name: str
    identity: str

    @measured("write")
    def save(self, step: int, write: Callable[[Path], object]) -> None:
        """Calls `write(path)` to make the checkpoint at `step`, and removes the previous one."""
        storage = self.store.storage
        with storage.temporary_file(".safetensors") as path:
            with explain_disk_errors(path.parent):
                try:
                    write(path)
                except SafetensorError as error:
                    if "os error 28" not in str(error):
                        raise
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            digest, size = file_sha256(path), path.stat().st_size
            file = f"{step:08d}.{digest[:16]}.safetensors"
            storage.put(f"{self._folder}/{file}", path)
        document = {"identity": self.identity, "step": step, "file": file, "bytes": size, "sha256": digest}
        storage.put(self._latest, add_own_hash(document))
        for key, _ in list(storage.list(self._folder)):
            if key not in (self._latest, f"{self._folder}/{file}"):
                storage.delete(key)

    def exists(self) -> bool:
        """Returns whether there is a checkpoint of any draft with this name."""
        return self.store.storage.size(self._latest) is not None

    def step(self) -> int | None:
        """Returns the step of the last checkpoint of this draft, or None. Raises CorruptError."""
        latest = self._read_latest()
        return None if latest is None else int(latest["step"])

    def load(self) -> Path | None:
        """Copies the last checkpoint to a local file, which the caller removes; returns its path, or None without one.

        Raises:
            CorruptError: If its bytes are not those that were written, or if the file is missing.
        """
        latest = self._read_latest()
        if latest is None:
            return None
        folder = self.store.cache.folder / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{uuid.uuid4().hex}.safetensors"
        key = f"{self._folder}/{latest['file']}"
        try:
            self.store.storage.fetch(key, path)
            if file_sha256(path) != latest["sha256"]:
                raise CorruptError(
                    f"{self.store.url}/{key}: its sha256 is not the written one; remove {self._folder} "
                    "to train from the start"
                )
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                raise CorruptError(
                    f"{self.store.url}/{key}: the file is missing; remove {self._folder} to train from the start"
                ) from error
            raise
        return path

    def clear(self) -> None:
        """Removes the checkpoint; called when the model is complete."""
        for key, _ in sorted(self.store.storage.list(self._folder), key=lambda entry: entry[0] != self._latest):
            self.store.storage.delete(key)

    def _read_latest(self) -> dict[str, Any] | None:
        """Reads latest.json; returns None if it is missing or names a checkpoint of another draft."""
        try:
            latest = check_own_hash(self.store.storage.read(self._latest), f"{self.store.url}/{self._latest}")
        except FileNotFoundError:
            return None
        return latest if latest["identity"] == self.identity else None

    @property
    def _folder(self) -> str:
        return f"checkpoints/{self.name}"

    @property
    def _latest(self) -> str:
        return f"{self._folder}/latest.json"


def training_checkpoints(
    store: Store, kind: str, name: str, fingerprints: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Returns handles to the last and the best checkpoint of the training of KIND/NAME, which need not exist.

    Args:
        store: The store.
        kind, name: What is trained.
        fingerprints: The fingerprints of its inputs by role.
        config: Its configuration.
    """
    identity = fingerprint_of([fingerprints, config])
    last, best = (StoredCheckpoint(store, each, identity) for each in checkpoint_names(kind, name))
    return last, best


def resumable_step(store: Store, kind: str, name: str) -> int | None:
    """Returns the step from which an interrupted training of KIND/NAME resumes; None without a checkpoint of it.

    Raises:
        CorruptError: If the checkpoint or the manifest of the draft is damaged.
    """
    try:
        draft = read_begun(store.storage, f"{kind}/{name}")
    except FileNotFoundError:
        return None
    fingerprints = {role: entry["fingerprint"] for role, entry in draft["inputs"].items()}
    return training_checkpoints(store, kind, name, fingerprints, draft["config"])[0].step()


def abandoned_checkpoints(store: Store) -> list[tuple[str, int]]:
    """Returns (key, size in bytes) of the files of checkpoints that no training can resume, in order of deletion.

    These are the checkpoints that belong to no incomplete artifact.
    """
    checkpoints = store.checkpoint_files()  # listed first, so that a run that begins meanwhile is not included
    resumable = {name for key in store.incomplete_keys() for name in checkpoint_names(*Key.parse(key))}
    return [(key, size) for key, size in checkpoints if key.split("/")[1] not in resumable]


def _make_link(link: Path, target: Path) -> None:
    """Makes a symbolic link to `target`; atomically replaces a link to another target."""
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{uuid.uuid4().hex}")
    os.symlink(target, temporary)
    os.replace(temporary, link)
