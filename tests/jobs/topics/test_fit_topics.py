"""fit_topics: what it prints, its plan, its page, growth, and one line for bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from planted_topics import planted_texts
from samples import write_beir

from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_reader import Topics

Done = Callable[..., str]
Refused = Callable[..., str]
SMALL = ("--min-passages", 2, "--most-frequent", 2, "--iterations", 20)


@pytest.fixture
def store(tmp_path: Path, done: Done) -> Path:
    """A store with 80 passages of planted topics."""
    done("import_corpus", "--store", tmp_path / "store", "--source", source(tmp_path / "source", 80))
    return tmp_path / "store"


def source(folder: Path, count: int, seed: int = 0) -> Path:
    texts, _ = planted_texts(count, seed)
    return write_beir(folder, [{"_id": f"{seed}-{n}", "title": "", "text": text} for n, text in enumerate(texts)])


def test_topics_are_fitted_printed_and_shown_on_a_page(store: Path, tmp_path: Path, done: Done) -> None:
    page = tmp_path / "page.html"
    out = done("fit_topics", "--store", store, *SMALL, "--plan", "--page", page)
    assert "stage    fit: 20 iterations in 1 unit of work\n" in out
    assert "stage    assign: 80 passages in 1 unit of work\n" in out
    assert not page.exists()
    out = done("fit_topics", "--store", store, *SMALL, "--page", page)
    topics = Topics.open(Store(str(store)))
    sizes = topics.passages_per_topic().tolist()
    for number, (size, words) in enumerate(zip(sizes, topics.model.words, strict=True)):
        assert f"topic {number}: {size} passages ({size / 80:.1%}): {' '.join(words[:10])}\n" in out
    assert f"topics/topics/g0000: {len(sizes)} topics of 80 passages, 0 small topics merged, 0 passages without" in out
    assert out.endswith(f"\n{page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert "Fitted by hierarchical LDA (tomotopy" in page.read_text()
    again = done("fit_topics", "--store", store, *SMALL, "--page", page)  # the same page may be there
    assert "fit:" not in again
    assert done("fit_topics", "--store", store, *SMALL, "--plan") == (
        f"nothing to make: {store}/topics/topics/g0000 is complete\n"
    )


def test_lda_is_a_control_with_a_given_number_of_topics(store: Path, done: Done) -> None:
    out = done("fit_topics", "--store", store, *SMALL, "--name", "control", "--method", "lda", "--topics", 3)
    assert "topics/control/g0000: 3 topics of 80 passages" in out
    config = Store(str(store)).open("topics", "control/g0000").config
    assert (config["method"], config["topics"]) == ("lda", 3)
    assert "gamma" not in config


def test_a_grown_corpus(store: Path, tmp_path: Path, done: Done) -> None:
    done("fit_topics", "--store", store, *SMALL)
    before = Topics.open(Store(str(store))).topic_per_row()
    done("import_corpus", "--store", store, "--source", source(tmp_path / "more", 10, seed=5), "--append")
    plan = done("fit_topics", "--store", store, *SMALL, "--plan")
    assert f"topics   inferred by {store}/topics/topics/g0000\n" in plan
    assert "stage    fit" not in plan
    assert "g0001: " in done("fit_topics", "--store", store, *SMALL)
    after = Topics.open(Store(str(store))).topic_per_row()
    assert after[:80].tolist() == before.tolist()
    assert len(after) == 90


def test_bad_input_is_one_line(
    store: Path,
    tmp_path: Path,
    done: Done,
    refused: Refused,
    documented: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(case: str, *arguments: object, store: Path = store) -> str:
        line = refused("fit_topics", "--store", store, *arguments).removeprefix("error: ")
        documented("Topics", f"fit_topics {case}", line, 1)
        return line

    small = tmp_path / "small"
    done("import_corpus", "--store", small, "--source", source(tmp_path / "few", 49))
    assert "49 passages, expected at least 50" in refuse("on 49 passages", store=small)
    assert "--min-passages or --most-frequent" in refuse("whose words are all rare", "--min-passages", 81)
    assert "found 1 (of 1 in all)" in refuse("that finds one topic", *SMALL, "--gamma", 1e-6, "--eta", 20)
    assert "its outcome" in refuse("--method hlda --topics 5", "--topics", 5)
    assert "at least 2" in refuse("--method lda without --topics", "--method", "lda")
    assert "--depth 1" in refuse("--depth 1", "--depth", 1)
    assert Store(str(store)).incomplete_keys() == []
    page = tmp_path / "page.html"
    page.write_text("other")
    assert "is kept" in refuse("--page FILE over another file", *SMALL, "--page", page)
    done("fit_topics", "--store", store, *SMALL, "--page", page, "--overwrite")
    assert "--seed 0, now 7" in refuse("under a name with another seed", *SMALL, "--seed", 7)

    monkeypatch.setitem(sys.modules, "tomotopy", None)
    assert "pip install" in refuse("without the package tomotopy", "--name", "new")
    assert "fit:" not in done("fit_topics", "--store", store, *SMALL)  # needs no tomotopy
