"""`import riptide` and its methods change nothing of the program that calls them; only an import prints a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from riptide import jobs

ROOT = Path(jobs.__file__).resolve().parents[1]
# A program of a few lines, without `if __name__ == "__main__"`: the spawned processes of Lucene must not run it again.
PROGRAM = """
import logging, signal, sys

def state():
    return (
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        list(sys.path),
        (list(logging.root.handlers), logging.root.level, logging.root.manager.disable),
        sys.modules["__main__"].__file__,
    )

before = state()
import riptide

store = riptide.Store("store")
assert state() == before
rows = [{"id": f"p{number}", "text": f"passage {number}"} for number in range(200)]
corpus = store.import_corpus(rows)
assert corpus.num_rows == 200
assert store.build_bm25(shards=2).num_rows == 200
assert store.import_queries([{"query": "passage 3", "passage_id": "p3"}], name="mine").artifact.rows == 1
assert store.encode_corpus(sys.argv[1], name="tiny").num_rows == 200
assert store.build_index(factory="Flat", shards=1).name == "tiny"
assert state() == before
open("runs", "a").write("x")
"""


FROM_STDIN = """
import riptide

store = riptide.Store({store!r})
store.import_corpus([{{"id": str(number), "text": f"passage {{number}}"}} for number in range(200)])
assert store.build_bm25(shards=2).num_rows == 200
open({runs!r}, "a").write("x")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs PROGRAM in a folder, as a user does."""
    (folder / "program.py").write_text(PROGRAM)
    hidden = ("HF_HUB_DISABLE_PROGRESS_BARS",)  # a user's environment need not have it
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


IMPORTED = "imported 200 passages: id = id, title = none, text = text, metadata = none\n"


def test_a_program_stays_as_it_is_and_only_an_import_prints_a_line(tmp_path: Path, model: str) -> None:
    done = run(tmp_path, model)
    assert (done.returncode, done.stdout) == (0, "")
    imported, warning = done.stderr.splitlines(keepends=True)
    assert imported == IMPORTED
    assert warning.startswith("warning: the tokenizer breaks 200 of 200 passages"), "the model knows few words"
    assert (tmp_path / "runs").read_text() == "x"
    again = run(tmp_path, model)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", warning)


def test_a_program_on_stdin_runs_once_in_the_folder_of_the_project(tmp_path: Path) -> None:
    """There, its name <stdin> looks like that of a file of the project."""
    program = FROM_STDIN.format(store=str(tmp_path / "store"), runs=str(tmp_path / "runs"))
    done = subprocess.run(
        [sys.executable, "-"], input=program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", IMPORTED)
    assert (tmp_path / "runs").read_text() == "x"
