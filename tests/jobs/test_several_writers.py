"""Two processes make the same artifact at the same time: the advice of each refusal loses nobody's work.

A process stops itself at its first write to the store, so the order of the two does not depend on time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crash_points
import pytest
from samples import make_passages, write_beir

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store

Done = Callable[..., str]


class StoppedJob:
    """A job in another process, which has stopped itself at its first write."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def end(self) -> tuple[int, str]:
        """Lets the job continue; returns its status and what it printed to stderr, without the line about its time."""
        self.process.send_signal(signal.SIGCONT)
        error = self.process.communicate(timeout=120)[1]
        return self.process.returncode, re.sub(r"^spent .*\n", "", error, flags=re.MULTILINE)


@contextmanager
def stopped(when: str, name: str, *arguments: object) -> Iterator[StoppedJob]:
    """Starts a job that stops before or after its first write to the store."""
    command = [sys.executable, crash_points.__file__, "0", f"stop-{when}", name, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), process.communicate()
        yield StoppedJob(process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def imports(tmp_path: Path, done: Done) -> tuple[tuple[object, ...], Path, Path]:
    """The command that appends to a corpus of 20 passages, and two sources of 10 passages to append."""
    store = tmp_path / "store"
    passages = make_passages(40)
    sources = []
    for number, (first, end) in enumerate([(0, 20), (20, 30), (30, 40)]):
        sources.append(write_beir(tmp_path / f"raw{number}", passages[first:end], [], {}))
    done("import_corpus", "--store", store, "--source", sources[0])
    return ("import_corpus", "--store", store, "--append", "--source"), sources[1], sources[2]


def test_of_two_appends_at_once_both_are_kept(imports, done: Done, refused, documented) -> None:
    """The second one is refused while the first one runs; repeated after it, it adds the next generation."""
    append, first, second = imports
    at = append[1:3]
    with stopped("after", *append, first) as other:
        for plan in ((), ("--plan",)):
            line = refused(*append, second, *plan)
            assert "corpus/g0001: another command is making it, otherwise: source " in line
            assert "; run this command again when that one has ended (" in line
            assert "remove" not in line
        documented("Importing", "a second --append while another one runs", line, 1)
        line = refused("store", "remove", "corpus/g0001", *at)
        assert "corpus/g0001: a command worked on it " in line
        assert line.endswith("s ago; others may need it: add --yes if nobody does")
        assert other.end() == (0, "")
    done(*append, second)
    assert Store(str(at[1])).keys("corpus") == ["corpus/g0000", "corpus/g0001", "corpus/g0002"]
    assert Corpus.open(Store(str(at[1]))).num_rows == 40
    assert "corpus/g0002: complete, made " in refused("store", "remove", "corpus/g0002", *at)


def test_an_append_that_another_one_overtakes_is_told_to_run_again(imports, done: Done, refused) -> None:
    append, first, second = imports
    with stopped("before", *append, first) as overtaken:
        done(*append, second)
        status, error = overtaken.end()
    assert status == 1
    assert "corpus/g0001: another command has made it meanwhile, otherwise: source " in error
    assert error.endswith("; run this command again\n")
    done(*append, first)
    assert Corpus.open(Store(str(append[2]))).num_rows == 40


def queries_command(world: Any, tmp_path: Path, variant: int) -> tuple[object, ...]:
    """Returns the import of a query set `more`, from one of two files."""
    file = tmp_path / f"more{variant}.csv"
    file.write_text(f"id,text\nq{variant},some words\n")
    return ("import_queries", "--store", world.store, "--queries", "more", "--source", file)


def embeddings_command(world: Any, tmp_path: Path, variant: int) -> tuple[object, ...]:
    """Returns the encoding `new` of the corpus, with one of two lengths."""
    length = (8, 16)[variant]
    return (
        "encode_corpus",
        "--store",
        world.store,
        "--encoder",
        world.model,
        "--name",
        "new",
        "--passage-length",
        length,
    )


@pytest.mark.parametrize(
    ("make", "key", "option"),
    [
        (queries_command, "queries/more", "--queries"),
        (embeddings_command, "embeddings/new", "--name"),
    ],
)
def test_a_name_that_another_command_takes_is_kept(
    world, tmp_path: Path, done: Done, refused, make: Callable[..., tuple[object, ...]], key: str, option: str
) -> None:
    """Without a question nothing of the other command is removed, while it runs and after it."""
    theirs, mine = (make(world, tmp_path, variant) for variant in (0, 1))
    with stopped("after", *theirs) as other:
        line = refused(*mine)
        assert f"{world.store}/{key}" in line
        assert "another command is making it, otherwise: " in line
        assert f"another name ({option}), or run this command again when that one has ended (" in line
        assert "a command worked on it " in refused("store", "remove", key, "--store", world.store)
        assert other.end() == (0, "")
    line = refused(*mine)
    assert "otherwise" in line
    assert line.endswith(f"or, if nobody needs it, remove it: riptide store remove {key} --store {world.store}")
    assert ": complete, made " in refused("store", "remove", key, "--store", world.store)
    assert Store(str(world.store)).names(key.partition("/")[0]).count(key.partition("/")[2]) == 1


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("", False), ("n", False)])
def test_a_removal_asks_on_a_terminal(
    world, job, monkeypatch: pytest.MonkeyPatch, answer: str, is_removed: bool
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    with os.fdopen(terminal) as stdin, os.fdopen(keyboard):
        monkeypatch.setattr(sys, "stdin", stdin)
        outcome = job("store", "remove", "runs/exact", "--store", world.store)
    assert "runs/exact: complete, made " in outcome.err
    assert f"Others may need this. Remove it from {world.store}? [y/N] " in outcome.err
    assert outcome.status == (0 if is_removed else 1)
    assert ("not confirmed, so nothing was removed" in outcome.err) != is_removed
    assert Store(str(world.store)).names("runs") == ["dense"] + ["exact"] * (not is_removed)


def test_a_draft_that_no_command_makes_is_removed_without_a_question(world, interrupt, done: Done, refused) -> None:
    at = ("--store", world.store)
    interrupt(2, "encode_corpus", *at, "--encoder", world.model, "--name", "new")
    assert "removed embeddings/new/g0000" in done("store", "remove", "embeddings/new", *at)
    assert "gc --yes: only remove asks a question" in refused("store", "gc", "--yes", *at)
