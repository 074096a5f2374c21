"""Copies artifacts to a folder or another store, and models into a store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, list_first
from riptide.indexing.files.raw import check_path
from riptide.indexing.maintenance.copying import copy_artifacts, copy_live_record, plan_copy
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.storage.cache import file_sha256
from riptide.indexing.store.draft import ABANDONED_S
from riptide.indexing.store.keys import Key
from riptide.indexing.store.live_release import CURRENT
from riptide.indexing.store.model_artifacts import PICKLES, commit_files, model_folder
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store, check_name
from riptide.jobs.common.printing import say
from riptide.jobs.common.stage_progress import StageProgress
from riptide.jobs.store_actions.store_options import StoreJob
from riptide.process.memory import format_bytes
from riptide.process.temporary_folders import TemporaryFolder


def export_artifact(store: Store, key: str, options: StoreJob) -> None:
    """Copies the files of a model or a prompt to a folder, for other libraries or another server."""
    artifact = store.open(*Key.parse(key))
    if options.to is None:
        raise InputError(f"export {key}: expected {Parameter('to')}, the folder for its files")
    if "://" in options.to:
        raise InputError(f"{Parameter('to', options.to)}: expected a folder that this machine sees")
    if not artifact.numbered_parts("file"):
        raise InputError(f"{key}: expected models/NAME or prompts/TASK, whose files have names")
    target, size = expand_home(options.to), format_bytes(sum(part.bytes for part in artifact.parts))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{Parameter('to', target)}: it exists and is not an empty folder")
    if options.plan:
        say(f"would copy {key}, {size}, to {target}")
        return
    folder = model_folder(artifact)
    try:
        copy_whole(folder, target.resolve())
    except OSError as error:  # includes shutil.Error, which has no `strerror`
        raise InputError(f"{Parameter('to', target)}: {error.strerror or error}") from error
    say(f"copied {key}, {size}, to {target}")


def copy_whole(folder: Path, target: Path) -> None:
    """Copies a folder so that `target` appears only when it is complete: some libraries open incomplete models."""
    if target.exists():
        target.rmdir()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_store(store: Store, key: str, options: StoreJob) -> list[str]:
    """Copies artifacts to another store: KEY with all that it was made from, or all complete ones.

    Returns:
        The keys of the copied artifacts, without those that the other store had.
    """
    if options.to is None:
        raise InputError(f"copy: expected {Parameter('to')}, the store to copy to")
    target = Store(options.to)
    source_url, target_url = _canonical_url(store), _canonical_url(target)
    if target_url == source_url:
        raise InputError(f"copy {Parameter('to', options.to)}: it is the store itself")
    if f"{target_url}/".startswith(f"{source_url}/") or f"{source_url}/".startswith(f"{target_url}/"):
        raise InputError(
            f"copy {Parameter('to', options.to)}: one store would be inside the other, {store.url}: "
            "expected a folder or a prefix outside of it"
        )
    keys = None if not key else sorted(set(store.find_keys(key)).intersection(store.keys(key)))
    if keys == []:
        raise InputError(f"{store.url}/{key}: it is not complete; only complete artifacts are copied")
    plan = plan_copy(store, target, keys)
    check = "not verified" if not options.verify else "to be verified" if options.plan else "verified"
    present = f"; {len(plan.present):,} are there, {check}" if plan.present else ""
    if options.plan:
        for artifact in plan.pending:
            say(f"would copy {artifact.key}, {format_bytes(sum(part.bytes for part in artifact.parts))}")
        say(f"would copy {len(plan.pending):,} artifacts, {format_bytes(plan.size)}, to {target.url}{present}")
        return []
    with StageProgress("copy", plan.size, "bytes") as stage:

        def count(part: ArtifactPart, is_kept: bool) -> None:
            stage.count(part.bytes, is_kept)

        for artifact in copy_artifacts(store, target, plan, count):
            stage.say(f"copied {artifact.key}, {format_bytes(sum(part.bytes for part in artifact.parts))}")
    if not key and (release := copy_live_record(store, target)):
        say(f"copied {CURRENT}: release {release} is live")
    if options.verify:  # after the copy, which may bring what they were made from
        _verify_present(target, plan.present)
    say(f"copied {len(plan.pending):,} artifacts, {format_bytes(plan.size)}, to {target.url}{present}")
    if not key and (drafts := store.incomplete_keys()):
        say(f"left out {list_first(drafts)}: not complete")
    return [artifact.key for artifact in plan.pending]


def _verify_present(target: Store, keys: Sequence[str]) -> None:
    """Hashes the artifacts that the target of a copy has. Raises InputError if one is damaged."""
    problems = []
    with StageProgress("verify", unit="bytes") as stage:
        for finding in verify(target, keys=keys):
            stage.count(finding.bytes)
            problems += [finding.problem] if finding.problem else []
    if problems:
        more = f", and {len(problems) - 1} more bad or missing files" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}: remove their artifacts in {target.url}, and copy again")


def _canonical_url(store: Store) -> str:
    """Returns the address of a store; of a folder, without symbolic links and `..`."""
    folder = store.storage.local_path("")
    return store.url if folder is None else os.path.realpath(folder).rstrip("/")


def import_model(store: Store, options: StoreJob) -> None:
    """Stores the files of a model as models/NAME, without those that transformers does not read."""
    from riptide.retriever.model.model_folder import find_model_folder, weight_files

    if options.model is None or options.name is None:
        raise InputError(f"import-model: expected {Parameter('model')} and {Parameter('name')}")
    check_name("models", options.name)
    folder = find_model_folder(options.model)
    if not any(file.suffix == ".safetensors" for file in weight_files(folder)):
        raise InputError(f"{folder}: no model.safetensors; save the model with save_pretrained, which writes one")
    files, left_out = _model_files(folder)
    size = format_bytes(sum((folder / file).stat().st_size for file in files))
    if options.plan:
        say(f"would import {len(files)} files, {size}, as models/{options.name}")
        return
    config = {"imported": {file: file_sha256(folder / file) for file in files}}
    with (
        store.create("models", options.name, config=config, by_content=True, abandoned_s=ABANDONED_S) as draft,
        TemporaryFolder("model") as links,
    ):
        if not draft.is_complete:
            for file in files:
                link = Path(links, file)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to((folder / file).resolve())
            draft.add_notes(model=options.model)
            commit_files(draft, Path(links))
    say(f"models/{options.name}: {len(files)} files, {size}, of {options.model}")
    if left_out:
        say(f"left out {list_first(left_out)}: pickled, hidden, or for other runtimes")


def _model_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the paths of a model's files in its folder, and of those that are not imported.

    Raises:
        InputError: If one that is imported is a pipe, a device or a broken link, or if its name is not UTF-8.
    """
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    imported = [
        path
        for path in files
        if path.suffix not in (*PICKLES, ".onnx", ".h5", ".msgpack", ".gguf")
        and path.parts[0] not in ("onnx", "openvino")
        and not any(part.startswith(".") for part in path.parts)
    ]
    for path in imported:
        check_path(str(folder / path))
        if not (folder / path).is_file():
            raise InputError(f"{folder / path}: not a file: expected a file of a model; copy it again")
    return [path.as_posix() for path in imported], [path.as_posix() for path in files if path not in imported]
