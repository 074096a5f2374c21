"""A file that could not be written completely is an error: a cut file would be committed with its own hash."""

from __future__ import annotations

import errno
import functools
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import save_array
from riptide.indexing.dense.faiss_index import write_index
from riptide.indexing.storage.storage import describe_os_error, explain_disk_errors

ARRAY = np.arange(3_060, dtype=np.int64)
MISSING = (1, 100, 3_000, 4_000, 10_000)  # bytes; C's stdio holds back the last 4,096 of them


def flat() -> faiss.Index:
    """An index of 60 vectors."""
    index = faiss.IndexFlat(100)
    index.add(np.random.default_rng(0).standard_normal((60, 100), dtype=np.float32))
    return index


@pytest.mark.parametrize(
    ("write", "peer"),
    [
        (functools.partial(save_array, ARRAY), lambda path: np.save(path, ARRAY)),
        (lambda path: write_index(flat(), path), lambda path: faiss.write_index(flat(), str(path))),
    ],
    ids=("array", "index"),
)
def test_a_file_is_written_completely_or_an_error_is_raised(
    write: Callable[[Path], None], peer: Callable[[Path], None], tmp_path: Path
) -> None:
    """The bytes are those of the library's own function. A limit on the size of files stands for a full disk."""
    path, expected = tmp_path / "file.npy", tmp_path / "peer.npy"
    peer(expected)
    write(path)
    assert path.read_bytes() == expected.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for missing in MISSING:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - missing, before[1]))
        try:
            with (
                pytest.raises(InputError, match="free some space and run the same command again"),
                explain_disk_errors(tmp_path),
            ):
                write(tmp_path / f"{missing}.npy")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_copy_names_the_file_that_could_not_be_written(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 10_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EFBIG) as raised:
            shutil.copyfile(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = describe_os_error(raised.value, "")
    assert line is not None
    assert line.startswith(f"{target}: ")
