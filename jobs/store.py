"""List what a store holds, show or remove an artifact, copy a model's files out, or clear what nothing names.

python jobs/store.py list --store data/squad
python jobs/store.py show index/minilm/g0000 --store data/squad
python jobs/store.py remove index/minilm/g0000 --store data/squad
python jobs/store.py export prompts/legal --to legal --store data/squad
python jobs/store.py gc --store data/squad
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jobs.cli import Common, human, run, say

import tyro

from indexing.artifact import Artifact
from indexing.models import abandoned_checkpoints, model_folder, own_checkpoints
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class StoreJob(Common):
    action: Annotated[Literal["list", "show", "remove", "export", "gc"], tyro.conf.Positional]
    key: Annotated[str | None, tyro.conf.Positional] = None
    """The artifact, as list prints it (show, remove, export); --limit N lists, shows or clears at most N."""
    to: str | None = None
    """The folder for the files of a model or a prompt, under their own names (export)."""


def main(options: StoreJob) -> None:
    store = Store(options.store).require()
    if options.action in ("show", "remove", "export") and options.key is None:
        raise InputError(f"{options.action}: expected an artifact; jobs/store.py list shows what there is")
    if options.key is not None and options.action in ("list", "gc"):
        raise InputError(f"{options.action} {options.key}: takes no artifact, it is for the whole store")
    if options.limit is not None and options.action in ("remove", "export"):
        raise InputError(f"{options.action} --limit {options.limit}: an artifact is taken whole")
    if options.to is not None and options.action != "export":
        raise InputError(f"{options.action} --to {options.to}: only export takes a folder")
    key = (options.key or "").strip("/")
    if options.action == "list":
        list_artifacts(store, options.limit)
    elif options.action == "show":
        show(store, key, options.limit)
    elif options.action == "remove":
        kind, _, name = key.partition("/")
        files = store.removable(key) + own_checkpoints(store, kind, name)
        if not options.plan:
            for file, _ in files:
                store.storage.delete(file)
        freed = human(sum(size for _, size in files))
        say(f"{'would remove' if options.plan else 'removed'} {key}, {freed}")
    elif options.action == "export":
        export(store, key, options)
    else:
        for file, size in [*store.garbage(), *abandoned_checkpoints(store)][: options.limit]:
            if not options.plan:
                store.storage.delete(file)
            say(f"{'would remove' if options.plan else 'removed'} {file}, {human(size)}")


def list_artifacts(store: Store, limit: int | None) -> None:
    """A line for each artifact: key, size, rows, what it was made from."""
    for key in store.keys()[:limit]:
        artifact = Artifact(store.storage, store.cache, key)
        size = human(sum(part.bytes for part in artifact.parts))
        parents = ", ".join(entry["artifact"] for entry in artifact.inputs.values()) or "-"
        say(f"{key:32} {size:>10} {artifact.rows:>14,} rows  {artifact.fingerprint[:12]}  from {parents}")
    superseded = store.superseded()
    for key in store.incomplete()[:limit]:
        if key in superseded:
            say(f"{key:32} superseded: a later generation has its rows; gc removes it a day after its last change")
        else:
            say(f"{key:32} incomplete: the command that makes it goes on with it")


def export(store: Store, key: str, options: StoreJob) -> None:
    """A copy of a model's or a prompt's files, for any library, and for a server that is to serve it."""
    kind, _, name = key.partition("/")
    artifact = store.open(kind, name)
    if options.to is None or "://" in options.to:
        raise InputError(f"--to {options.to}: expected a folder that this machine sees")
    if not artifact.group("file"):
        raise InputError(f"{key}: expected models/NAME or prompts/TASK, whose files have names")
    target, size = Path(options.to).expanduser(), human(sum(part.bytes for part in artifact.parts))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"--to {target}: is there and is no empty folder")
    if options.plan:
        say(f"would copy {key}, {size}, to {target}")
        return
    folder = model_folder(artifact)
    try:
        copy_whole(folder, target.resolve())
    except OSError as error:  # shutil.Error too, which has a list of them
        raise InputError(f"--to {target}: {error.strerror or error}") from error
    say(f"copied {key}, {size}, to {target}")


def copy_whole(folder: Path, target: Path) -> None:
    """A copy under its name once all is there, in place of an empty folder: half a model opens in some libraries."""
    if target.exists():
        target.rmdir()
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        shutil.copytree(folder, begun, dirs_exist_ok=True)
        begun.rename(target)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def show(store: Store, key: str, limit: int | None) -> None:
    """An artifact's lineage, configuration, notes and parts."""
    kind, _, name = key.partition("/")
    artifact = store.open(kind, name)
    provenance = json.loads(store.storage.read(f"{key}/provenance.json"))
    say(f"{artifact.url}\nfingerprint  {artifact.fingerprint}")
    for role, entry in artifact.inputs.items():
        say(f"input        {role}: {entry['artifact']} {entry['fingerprint'][:12]}")
    for needed_by in store.dependents(key):
        say(f"needed by    {needed_by}")
    say(f"made         {provenance['finished']} on {provenance['host']} by {' '.join(provenance['command'])}")
    say(f"config       {json.dumps(artifact.config, indent=1, ensure_ascii=False)}")
    say(f"notes        {json.dumps(artifact.notes, indent=1, ensure_ascii=False)}")
    for part in artifact.parts[:limit]:
        say(f"part         {part.file:44} {part.rows:>12,} rows {human(part.bytes):>10}  {part.sha256[:12]}")


if __name__ == "__main__":
    run(main, StoreJob)
