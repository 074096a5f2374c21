"""BM25 by its job: built, grown with its corpus, resumed, refused; what it finds against one built anew."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from samples import files_of, make_passages, write_beir

from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store

Done = Callable[..., str]
Found = dict[str, list[tuple[str, float]]]


def command(world, *more: object) -> tuple:
    return ("build_bm25", "--store", world.store, *more)


def hits_of(store: Path, run: str) -> Found:
    found: Found = {}
    for table in read_run(Store(str(store)).open("runs", run)):
        for row in table.to_pylist():
            found.setdefault(row["query_id"], []).append((row["id"], row["score"]))
    return found


def searched(done: Done, store: Path, name: str, *more: object, k: int = 50) -> Found:
    done("search", "--store", store, "--split", "all", "--k", k, "--name", name, *(more or ("--mode", "bm25")))
    return hits_of(store, name)


def times(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}


def test_any_number_of_shards_finds_the_same(world, done: Done) -> None:
    out = done(*command(world))
    assert f"{world.store}/bm25/bm25/g0000: 240 passages in 1 shards, k1 0.9, b 0.4, Lucene " in out
    assert "240 passages in 7 shards" in done(*command(world, "--name", "seven", "--shards", 7))
    one = searched(done, world.store, "one", "--source", "bm25:bm25")
    seven = searched(done, world.store, "seven", "--source", "bm25:seven")
    assert len(one) == 40
    assert seven == one


def test_growth_indexes_what_is_new_and_finds_what_a_store_built_anew_finds(
    world, done: Done, refused, tmp_path: Path
) -> None:
    new = make_passages(24, seed=11, prefix="n")
    at = ("--store", world.store)
    done(*command(world, "--shards", 2))
    before = searched(done, world.store, "before")
    done("import_corpus", *at, "--source", write_beir(tmp_path / "more", new), "--append", "--part-size", 10)
    line = refused("search", *at, "--mode", "bm25", "--name", "after")
    assert "bm25/bm25 covers 240 of the corpus' 264 passages: run riptide" in line
    assert "riptide build-bm25 --name bm25 again, with the same options, to add the new ones" in line

    kept = times(world.store)
    assert "264 passages in 4 shards" in done(*command(world, "--shards", 2))
    parts = Store(str(world.store)).open("bm25", "bm25/g0001").parts
    assert [(part.facts["first_row"], part.facts["end"]) for part in parts] == [(240, 252), (252, 264)]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept

    anew = write_beir(tmp_path / "anew", [*world.passages, *new], world.queries, {"test": world.judged})
    fresh = tmp_path / "fresh"
    done("import_corpus", "--store", fresh, "--source", anew, "--part-size", 100)
    done("build_bm25", "--store", fresh, "--shards", 3)
    grown = searched(done, world.store, "grown")
    assert grown == searched(done, fresh, "anew")
    assert grown != before
    assert any(id.startswith("n") for hits in grown.values() for id, _ in hits)

    # A run was made of what there was: under its name another one is refused.
    line = refused("search", *at, "--mode", "bm25", "--split", "all", "--k", 50, "--name", "before")
    assert "runs/before was made otherwise" in line
    assert "bm25/g0001" in line


def test_deleted_passages_are_left_out_at_once_and_all_hits_are_still_found(world, done: Done, tmp_path: Path) -> None:
    done(*command(world))
    whole = searched(done, world.store, "whole", k=240)
    gone = {hits[0][0] for hits in whole.values()} | {f"p{n}" for n in range(0, 240, 2)}
    (tmp_path / "gone").write_text("\n".join(sorted(gone)))
    done("import_corpus", "--store", world.store, "--delete", tmp_path / "gone")
    kept = files_of(world.store / "bm25", but=())
    assert "240 passages in 1 shards" in done(*command(world))
    assert files_of(world.store / "bm25", but=()) == kept
    less = searched(done, world.store, "less", k=20)
    for query, hits in whole.items():
        assert less.get(query, []) == [hit for hit in hits if hit[0] not in gone][:20]
    assert max(len(hits) for hits in less.values()) == 20


def test_what_is_left_is_filled_and_the_rest_kept(world, done: Done) -> None:
    build = command(world, "--shards", 4)
    done(*build)
    before = searched(done, world.store, "before")
    folder = world.store / "bm25/bm25/g0000"
    done("store", "remove", "runs/before", "--yes", "--store", world.store)
    for path in [folder / "manifest.json", folder / "shard-00002.json", *folder.glob("shard-00001*")]:
        path.unlink()
    assert "\nbm25/bm25/g0000       incomplete" in done("store", "list", "--store", world.store)
    kept = times(folder)
    assert "240 passages (120 kept)" in done(*build)
    written = ("provenance.json", "manifest.begun.json")  # the time of the second one shows that a command works on it
    assert {path: path.stat().st_mtime_ns for path in kept if path.name not in written} == {
        path: time for path, time in kept.items() if path.name not in written
    }
    assert searched(done, world.store, "after") == before
    done("verify", "--store", world.store)


def test_a_finished_one_is_found_done_and_another_refused(world, done: Done, refused, no_work) -> None:
    done(*command(world, "--shards", 2))
    no_work()
    before = files_of(world.store, but=())
    assert "240 passages in 2 shards" in done(*command(world, "--shards", 2))
    line = refused(*command(world, "--k1", 1.2, "--b", 0.75, "--language", "de"))
    assert f"{world.store}/bm25/bm25/g0000 was built otherwise (--k1 0.9, now 1.2, --b 0.4, now 0.75, " in line
    assert "--language en, now de, --shards 2, now unset): give the same options, or another name (--name)" in line
    assert files_of(world.store, but=()) == before


def test_one_of_another_corpus_is_refused_with_both_fingerprints(world, done: Done, refused, tmp_path: Path) -> None:
    other = tmp_path / "other"
    source = write_beir(tmp_path / "source", make_passages(10, seed=5))
    done("import_corpus", "--store", other, "--source", source)
    done("build_bm25", "--store", other)
    os.rename(other / "bm25", world.store / "bm25")
    prints = [Store(str(store)).open("corpus", "g0000").fingerprint[:12] for store in (other, world.store)]
    for line in (refused(*command(world)), refused("search", "--store", world.store, "--mode", "bm25")):
        assert f"bm25/bm25/g0000 was built from corpus/g0000 {prints[0]}, the corpus is now {prints[1]}" in line


def test_a_limit_is_of_the_name_and_takes_the_first_passages(world, done: Done) -> None:
    assert "bm25/few/g0000: 50 passages" in done(*command(world, "--limit", 50, "--name", "few"))
    found = searched(done, world.store, "few")
    names = {id for hits in found.values() for id, _ in hits}
    assert names == {f"p{n}" for n in range(50)} & names
    assert len(names) > 25


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("ending", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job_with_one_line_and_without_temporary_files(
    world,
    done: Done,
    job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    documented: Callable[..., None],
    ending: signal.Signals,
    status: int,
) -> None:
    """It comes in the middle of the second shard; the first one is kept."""
    texts = 0

    def counted(contents: Iterable[str], report: object) -> Iterator[str]:
        nonlocal texts
        for text in contents:
            texts += 1
            if texts == 200:
                os.kill(os.getpid(), ending)
            yield text

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setattr("riptide.indexing.lucene.bm25_index.report_texts", counted)
        patch.setattr("riptide.indexing.work.local_runner.cores_of_process", lambda: 1)
        outcome = job(*command(world, "--shards", 2))
    word = "terminated" if ending == signal.SIGTERM else "interrupted"
    assert (outcome.status, outcome.err) == (status, f"error: {word}; run the same command again to resume\n")
    documented("Stores", f"a job that {ending.name} ends", outcome.err, status)
    assert list(temporary.iterdir()) == []
    assert (world.store / "bm25/bm25/g0000/shard-00000.json").exists()
    assert "index text: 240 passages (120 kept)" in done(*command(world, "--shards", 2))


def test_plan_says_what_and_does_nothing(world, done: Done, no_work) -> None:
    no_work()
    before = files_of(world.store, but=())
    out = done(*command(world, "--plan", "--shards", 7, "--limit", 100))
    assert "corpus   100 passages to index" in out
    assert "shards   7 of about 14 passages" in out
    assert f"{world.store}/bm25/bm25" in out
    assert "2 GB of Java" in out
    assert files_of(world.store, but=()) == before


def test_bad_input_is_named_and_leaves_nothing(world, refused, no_work, tmp_path: Path) -> None:
    no_work()
    before = files_of(world.store, but=())
    assert "--k1 -1.0, --b 0.4: expected k1 >= 0 and 0 <= b <= 1" in refused(*command(world, "--k1", -1))
    assert "--b 1.5" in refused(*command(world, "--b", 1.5))
    assert "--k1 nan" in refused(*command(world, "--k1", "nan"))
    assert "--shards 0" in refused(*command(world, "--shards", 0))
    assert "--limit 0" in refused(*command(world, "--limit", 0))
    assert "name 'a b'" in refused(*command(world, "--name", "a b"))
    assert files_of(world.store, but=()) == before
    assert "there is no store here" in refused("build_bm25", "--store", tmp_path / "none")


def test_an_unknown_language_is_named_and_leaves_nothing(world, refused) -> None:
    before = files_of(world.store, but=())
    line = refused(*command(world, "--language", "xx"))
    assert "language 'xx': Anserini has no analyzer for it" in line
    assert files_of(world.store, but=()) == before


def test_a_flipped_byte_is_found_by_verify_and_not_searched(world, done: Done, job, refused) -> None:
    done(*command(world, "--shards", 2))
    [file] = (world.store / "bm25/bm25/g0000").glob("shard-00001-*.cfs")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    outcome = job("verify", "--store", world.store)
    assert outcome.status == 1
    assert [line.split(": ")[1] for line in outcome.out.splitlines() if line.startswith("bad: ")] == [str(file)]
    line = refused("search", "--store", world.store, "--mode", "bm25", "--name", "bad")
    assert f"{file.name}: its sha256 is not the committed one" in line
    assert "bad" not in Store(str(world.store)).names("runs")


def test_the_store_knows_it(world, done: Done, refused) -> None:
    done(*command(world))
    done("search", "--store", world.store, "--mode", "bm25", "--name", "words")
    [line] = [line for line in done("store", "list", "--store", world.store).splitlines() if line.startswith("bm25/")]
    assert line.endswith("  corpus/g0000")
    shown = done("store", "show", "bm25/bm25/g0000", "--store", world.store)
    config = json.loads(shown.partition("config ")[2].partition("notes ")[0])
    assert config.items() >= {"k1": 0.9, "b": 0.4, "language": "en", "limit": None}.items()
    assert {"lucene", "anserini"} <= set(config)
    assert "needed by    runs/words" in shown
    assert "is needed by runs/words" in refused("store", "remove", "bm25/bm25/g0000", "--store", world.store)
    for key in ("runs/words", "bm25/bm25/g0000"):
        done("store", "remove", key, "--yes", "--store", world.store)
    assert not list((world.store / "bm25").rglob("*.*"))
    assert "there is no such artifact (complete bm25: none)" in refused(
        "search", "--store", world.store, "--mode", "bm25"
    )


@pytest.mark.slow
def test_scifact_reaches_the_figures_published_for_its_flat_index(
    shared_data: Path, tmp_path: Path, done: Done
) -> None:
    """Anserini's two-click reproduction of BEIR, BM25 over title and text as one field, k1 0.9, b 0.4."""
    at = ("--store", tmp_path / "s")
    done("import_corpus", *at, "--source", shared_data / "scifact", "--part-size", 1000)
    done("build_bm25", *at, "--shards", 3)
    done("search", *at, "--mode", "bm25", "--k", 100, "--name", "bm25")
    done("evaluate", *at, "--run", "bm25", "--metrics", "nDCG@10", "R@100", "--json", tmp_path / "e.json")
    mean = json.loads((tmp_path / "e.json").read_text())["mean"]["bm25"]
    assert mean["nDCG@10"] == pytest.approx(0.6789, abs=0.002)
    assert mean["R@100"] == pytest.approx(0.9253, abs=0.002)
