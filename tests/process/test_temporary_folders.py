"""Temporary folders of processes that were killed, that run, and of other users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from riptide.process.temporary_folders import TemporaryFolder, remove_abandoned

PROGRAM = """
import sys
from riptide.process.temporary_folders import TemporaryFolder
folder = TemporaryFolder("task")
(folder.path / "file").write_bytes(b"x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, of which this process has removed no abandoned ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_abandoned.cache_clear()
    return tmp_path


def test_folders_of_killed_processes_are_removed_and_no_others(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [parent / name for name in ("riptide-task-old", "other.tmp", "riptide-link.tmp", "riptide-file.tmp")]
    others[0].mkdir()
    others[1].mkdir()
    others[2].symlink_to(others[1])
    others[3].write_bytes(b"")
    with (
        TemporaryFolder("mine") as mine,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(parent)},
        ) as process,
    ):
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())

        def remaining() -> set[Path]:
            remove_abandoned.cache_clear()
            remove_abandoned(str(parent))
            return set(parent.iterdir())

        assert remaining() == {*others, mine, folder}
        process.send_signal(signal.SIGKILL)
        process.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert folder in remaining()
        assert remaining() == {*others, mine}
    assert set(parent.iterdir()) == set(others)


def test_a_folder_that_is_removed_before_its_lock_is_made_again(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, folders = tempfile.mkdtemp, list[Path]()

    def make_and_lose(*args: str, **options: str) -> str:
        folders.append(Path(make(*args, **options)))
        if len(folders) == 1:
            folders[0].rmdir()
        return str(folders[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with TemporaryFolder("task") as folder:
        assert folder == folders[1]
        assert folder.is_dir()
    assert not list(parent.iterdir())
