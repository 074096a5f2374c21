"""What a disk may hold after a loss of power: records the calls to a file system, and replays a prefix of them.

An entry of a folder (a new file, a link, a rename, a new folder, a removal) is on the disk once the folder was synced,
and the bytes of a file once the file was synced. Bytes that C++ code wrote count as not synced too.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from riptide.indexing.storage.storage import LocalStorage

CALLS = ("mkdir", "rmdir", "unlink", "replace", "link", "fsync")
MODES = ("dropped", "torn", "mixed")


@dataclass
class File:
    """The bytes of a file, and those of them that were synced; None: none."""

    data: bytes = b""
    synced: bytes | None = None


@dataclass
class Folder:
    """The entries of a folder, and those that were synced."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call that succeeded, with the bytes of the file that it moved or synced; "acknowledged": a write of a store."""

    name: str
    paths: tuple[str, ...]
    data: bytes | None = None


@contextlib.contextmanager
def recorded_calls(root: Path) -> Iterator[list[Call]]:
    """Within it, the calls of this process to files under `root` are recorded, and the writes of local stores."""
    calls: list[Call] = []
    lock = threading.RLock()

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            files = (
                (f"/proc/self/fd/{arguments[0]}",)
                if name == "fsync"
                else arguments[: 1 + (name in ("replace", "link"))]
            )
            paths = tuple(os.readlink(file) if name == "fsync" else os.fspath(file) for file in files)
            if not all(path.startswith(f"{root}/") or path == str(root) for path in paths):
                return call(*arguments, **options)
            with lock:
                data = Path(paths[0]).read_bytes() if os.path.isfile(paths[0]) else None
                result = call(*arguments, **options)
                calls.append(Call(name, paths, data))
            return result

        return recorded

    def acknowledged(write: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(storage: LocalStorage, key: str, data: Any, *arguments: Any) -> Any:
            content = data if isinstance(data, bytes) else data.read_bytes()
            result = write(storage, key, data, *arguments)
            if result is not False:
                with lock:
                    calls.append(Call("acknowledged", (str(storage.root / key),), content))
            return result

        return recorded

    wrapped = [(os, name, wrap(name, getattr(os, name))) for name in CALLS]
    for name in ("put", "put_new", "compare_and_swap"):
        wrapped.append((LocalStorage, name, acknowledged(getattr(LocalStorage, name))))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
    for owner, name, function in wrapped:
        setattr(owner, name, function)
    try:
        yield calls
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


class Disk:
    """A folder during a run: what programs see, and what a loss of power leaves of it.

    Attributes:
        acknowledged: The bytes of each file whose write a store has acknowledged, unless it was deleted since.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = self._load(root)
        self.acknowledged: dict[str, bytes] = {}

    def _load(self, folder: Path) -> Folder:
        """Returns a folder with its present content, all of it synced."""
        entries: dict[str, File | Folder] = {}
        for path in folder.iterdir():
            entries[path.name] = self._load(path) if path.is_dir() else File(data := path.read_bytes(), data)
        return Folder(entries, dict(entries))

    def _folder(self, path: str) -> Folder:
        """Returns the folder of a path."""
        node: File | Folder = self._top
        for name in Path(path).relative_to(self._root).parts:
            assert isinstance(node, Folder)
            node = node.entries[name]
        assert isinstance(node, Folder)
        return node

    def apply(self, call: Call) -> None:
        """Does what a recorded call did."""
        if call.name == "acknowledged":
            assert call.data is not None
            self.acknowledged[call.paths[0]] = call.data
            return
        parent, name = os.path.split(call.paths[0])
        if call.data is not None:  # a file; one that is unknown was made since the last call
            file = self._folder(parent).entries.setdefault(name, File())
            assert isinstance(file, File)
            file.data = call.data
        match call.name:
            case "mkdir":
                self._folder(parent).entries[name] = Folder()
            case "rmdir" | "unlink":
                self._folder(parent).entries.pop(name, None)
                self.acknowledged.pop(call.paths[0], None)
            case "link" | "replace":
                target_parent, target = os.path.split(call.paths[1])
                self._folder(target_parent).entries[target] = file
                if call.name == "replace":
                    del self._folder(parent).entries[name]
            case "fsync" if call.data is not None:
                file.synced = call.data
            case "fsync":
                folder = self._folder(call.paths[0])
                folder.synced = dict(folder.entries)

    def after_loss(self, mode: str, seed: int = 0) -> dict[str, bytes | None]:
        """Returns the files, and folders as None, that a loss of power leaves, by path.

        Args:
            mode: "dropped": what was not synced is lost. "torn": entries are kept, and half of the bytes of files that
                were not synced. "mixed": each entry is lost or kept.
            seed: Of the choice of entries.
        """
        draw = random.Random(seed)
        contents: dict[str, bytes | None] = {}

        def keep(folder: Folder, path: str) -> None:
            for name in sorted(folder.entries.keys() | folder.synced.keys()):
                is_lost = {"dropped": True, "torn": False}.get(mode, draw.random() < 0.5)
                node = (folder.synced if is_lost else folder.entries).get(name)
                if isinstance(node, Folder):
                    contents[f"{path}/{name}"] = None
                    keep(node, f"{path}/{name}")
                elif node is not None:
                    half = b"" if is_lost else node.data[: len(node.data) // 2]
                    contents[f"{path}/{name}"] = half if node.synced is None else node.synced

        keep(self._top, str(self._root))
        return contents


def write_files(files: Mapping[str, bytes | None], root: Path, folder: Path) -> None:
    """Writes files and folders (None) with paths under `root` to an empty folder."""
    folder.mkdir()
    for path, data in sorted(files.items()):
        place = folder / Path(path).relative_to(root)
        if data is None:
            place.mkdir()
        else:
            place.write_bytes(data)
