"""`import-corpus --sync --watch`: which changes are imported, which errors it survives, and how a signal ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from job_outcome import Outcome

from riptide.base.errors import InputError
from riptide.indexing.corpus import syncing
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.files.listing import file_states, walk_files
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.jobs.store_actions import watch_option

Change = Callable[[], object]
Watched = Callable[..., Outcome]


def change_nothing() -> None:
    """Stands for the time between two looks in which nothing changes."""


def write(file: Path, text: str, *, age_ns: int = 0) -> Path:
    """Writes a file; with an age, sets the time of its last change to this many nanoseconds after 1970."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if age_ns:
        os.utime(file, ns=(age_ns, age_ns))
    return file


def texts_of(store: Path) -> dict[str, str]:
    return {passage.id: passage.text for passage in Corpus.open(Store(str(store)))}


def num_generations(store: Path) -> int:
    return len(Store(str(store)).generations("corpus"))


def lines(outcome: Outcome, start: str) -> list[str]:
    """Returns the lines of the output that begin with a word, without it."""
    return [line.removeprefix(start).strip() for line in outcome.out.splitlines() if line.startswith(start)]


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_signals: None, job: Callable[..., Outcome]
) -> Watched:
    """watched(source, *changes) watches a source; between two looks it makes the next change, and at last SIGTERM."""

    def run(source: Path, *changes: Change) -> Outcome:
        pending = [*changes, lambda: signal.raise_signal(signal.SIGTERM)]
        monkeypatch.setattr(watch_option, "sleep", lambda seconds: pending.pop(0)())
        return job("import_corpus", "--store", tmp_path / "store", "--source", source, "--sync", "--watch", 5)

    return run


def test_a_change_is_imported_once_it_is_complete(tmp_path: Path, watched: Watched) -> None:
    folder, store = tmp_path / "docs", tmp_path / "store"
    for name in ("a.txt", "b.md", "c.txt"):
        write(folder / name, f"text of {name}", age_ns=1)

    def change() -> None:
        assert num_generations(store) == 1
        write(folder / "b.md", "another text")
        write(folder / "d.txt", "new")
        (folder / "c.txt").unlink()
        write(folder / "e.txt", "half of")

    def complete() -> None:
        assert num_generations(store) == 1, "e.txt was read while it was being written"
        write(folder / "e.txt", "half of a text, and the rest")

    def touch() -> None:
        os.utime(folder / "a.txt", ns=(2, 2))

    outcome = watched(folder, change_nothing, touch, change_nothing, change, complete, change_nothing)
    assert (outcome.status, outcome.err) == (0, "")
    assert texts_of(store) == {
        "a.txt": "text of a.txt",
        "b.md": "another text",
        "d.txt": "new",
        "e.txt": "half of a text, and the rest",
    }
    assert num_generations(store) == 2
    assert lines(outcome, "sync") == [
        "0 added, 0 changed, 0 removed, 3 unchanged; the newest generation is corpus/g0000",
        "2 added, 1 changed, 1 removed, 1 unchanged; the newest generation is corpus/g0001",
    ]
    printed = outcome.out.splitlines()
    assert printed[0] == f"watch    {folder}: looks every 5 s; SIGINT or SIGTERM ends the command"
    assert printed[-1] == f"watch    {folder}: ended by a signal; no sync was running"
    assert [line.partition(" in ")[0] for line in printed if line.startswith("import: ")] == ["import: 3 passages"]


def test_a_source_that_cannot_be_read_ends_nothing_and_deletes_nothing(tmp_path: Path, watched: Watched) -> None:
    folder, store, away = tmp_path / "docs", tmp_path / "store", tmp_path / "away"
    rows = [f'{{"_id": "{name}", "text": "text of {name}"}}\n' for name in "abc"]
    file = folder / "corpus.jsonl"

    def write_rows(*rows: str) -> Change:
        return lambda: write(file, "".join(rows))

    def empty() -> None:
        assert len(texts_of(store)) == 4
        file.unlink()

    outcome = watched(
        folder,
        write_rows(*rows),  # the folder is missing at the first look
        change_nothing,
        write_rows(*rows, '{"_id": "d", "te'),
        change_nothing,
        change_nothing,
        write_rows(*rows, '{"_id": "d", "text": "text of d"}\n'),
        change_nothing,
        lambda: folder.rename(away),
        change_nothing,
        lambda: away.rename(folder),
        empty,
        change_nothing,
        write_rows(rows[0]),
        change_nothing,
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert sorted(texts_of(store)) == ["a", "b", "c", "d"]
    assert num_generations(store) == 2
    gone = f"{folder}: found nothing readable"
    expected = [gone, f"{file}:4: found no valid JSON", gone, f"{folder}: found no files", "--sync: 3 of 4 ids"]
    warnings = lines(outcome, "warning:")
    assert [line[: len(start)] for line, start in zip(warnings, expected, strict=True)] == expected
    assert all(line.endswith("; the next attempt is in 5 s") for line in warnings)
    assert "is the source complete? If so, run --sync --max-removed 1 once without --watch; " in warnings[-1]
    assert f"watch    {folder}: has the files of the last sync again" in outcome.out
    assert lines(outcome, "sync")[0].startswith("1 added, 0 changed, 0 removed, 3 unchanged")


def test_files_that_change_during_the_comparison_are_not_imported(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f'{{"_id": "{name}", "text": "text of {name}"}}\n' for name in "abc"]
    file = write(tmp_path / "docs" / "corpus.jsonl", "".join(rows), age_ns=1)
    compare, compared = syncing.compare_source, []

    def compare_half(*arguments: object) -> object:
        compared.append(1)
        difference = compare(*arguments)
        if len(compared) == 1:
            write(file, "".join(rows))
        return difference

    def write_half() -> None:
        write(file, "".join(rows[:2]))
        monkeypatch.setattr(syncing, "compare_source", compare_half)

    outcome = watched(file.parent, write_half, change_nothing, change_nothing, change_nothing)
    warning = f"{file}: changed while it was compared with the corpus, or shortly before; the next attempt is in 5 s"
    assert lines(outcome, "warning:") == [warning]
    assert (sorted(texts_of(tmp_path / "store")), num_generations(tmp_path / "store")) == (["a", "b", "c"], 1)


def test_the_time_between_failed_syncs_of_the_same_files_doubles_up_to_ten_minutes(tmp_path: Path) -> None:
    file = write(tmp_path / "docs.csv", "id,text\n", age_ns=1)
    looks: list[int] = []
    attempts: list[int] = []

    def fail(is_same_source: Callable[[], bool]) -> None:
        attempts.append(looks[-1])
        raise InputError("docs.csv: is refused")

    def look(first: int, end: int) -> None:
        for number in range(first, end):
            looks.append(number)
            watcher.look()

    watcher = watch_option.SourceWatcher(str(file), 100, str(tmp_path), fail)
    look(0, 30)
    assert attempts == [0, 1, 3, 7, 13, 19, 25]
    write(file, "id,text\na,1\n", age_ns=2)
    look(30, 35)
    assert attempts[7:] == [31, 32, 34]


def test_a_look_takes_the_files_of_the_walk_that_an_import_takes(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "docs", tmp_path / "elsewhere"
    write(folder / "a.txt", "a", age_ns=1)
    write(folder / "below" / "b.txt", "bb")
    write(folder / ".hidden" / "c.txt", "c")
    write(folder / ".d.txt", "d")
    write(elsewhere / "e.txt", "eee", age_ns=5)
    (folder / "e.txt").symlink_to(elsewhere / "e.txt")
    (folder / "nothing").symlink_to(elsewhere / "none")
    (folder / "linked").symlink_to(elsewhere)
    os.mkfifo(folder / "pipe")
    os.utime(folder / "below" / "b.txt", ns=(0, 0))
    assert file_states(str(folder)) == {"a.txt": (1, 1), "below/b.txt": (2, 0), "e.txt": (3, 5)}
    reasons = {file.name: file.unread for file in walk_files(str(folder))}
    assert reasons == {
        ".d.txt": "",
        ".hidden/c.txt": "",
        "a.txt": "",
        "below/b.txt": "",
        "e.txt": "link",
        "linked": "link",
        "nothing": "link",
        "pipe": "special",
    }


def test_a_signal_during_a_sync_is_resumed_by_the_same_command(
    tmp_path: Path, watched: Watched, done: Callable[..., str]
) -> None:
    file, run = write(tmp_path / "docs.csv", "id,text\na,1\n", age_ns=1), LocalRunner.run

    with pytest.MonkeyPatch.context() as patch:

        def change() -> None:
            write(file, "id,text\na,1\nb,2\n")
            patch.setattr(LocalRunner, "run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))

        outcome = watched(file, change, change_nothing)
    assert outcome.status == 143
    assert outcome.err == "error: terminated\n"  # nothing was committed that would be resumed
    assert LocalRunner.run is run
    assert texts_of(tmp_path / "store") == {"a": "1"}
    done("import_corpus", "--store", tmp_path / "store", "--source", file, "--sync")
    assert texts_of(tmp_path / "store") == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("--watch without --sync", ["--source", "docs", "--watch", 5]),
        ("--watch of a source in a cloud", ["--source", "s3://bucket/docs", "--sync", "--watch", 5]),
    ],
)
def test_a_watch_that_cannot_work_is_refused(
    tmp_path: Path, refused: Callable[..., str], documented: Callable[..., None], case: str, options: list[object]
) -> None:
    documented("Importing", case, refused("import_corpus", "--store", tmp_path / "store", *options), 1)
