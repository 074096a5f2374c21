"""The job `migrate`: forecasts that know the truth, the gate, the switch, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import save_tiny_bert

from riptide import Store
from riptide.serve.release.live import live_release_id, read_live_release

Done = Callable[..., str]
Refused = Callable[..., str]
AREA = "Serving a store"  # of tests/bad_input.md
EXACT_NUMERICS = ("--dtype", "float32", "--compile", "never")  # those of the embeddings of `world`


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an encoder of other dimensions than that of `world`."""
    return save_tiny_bert(tmp_path_factory.mktemp("models") / "other", hidden=48)


def forecast(done: Done, store: Path, folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    path = folder / "forecast.json"
    out = done("migrate", "--store", store, "--split", "test", "--json", path, "--overwrite", *arguments)
    return json.loads(path.read_text()), out


def test_the_forecast_of_a_wholly_known_corpus_is_the_truth(
    world: SimpleNamespace, other: str, done: Done, tmp_path: Path
) -> None:
    document, out = forecast(done, world.store, tmp_path, "--to", other, "--html", tmp_path / "page.html")
    [keep, *mapped, whole] = document["choices"]
    assert [each["name"] for each in mapped] == ["map (orthogonal)", "map (affine)"]
    done("encode_corpus", "--store", world.store, "--encoder", other, "--name", "new")
    evaluation = Store(world.store).evaluate(["exact:enc", "exact:new"], split="test", metrics=["nDCG@10"])
    old, new = (evaluation.per_query[name]["nDCG@10"].mean() for name in ("exact:enc", "exact:new"))
    assert keep["value"] == pytest.approx(old, abs=1e-6)
    assert whole["value"] == pytest.approx(new, abs=0.02)  # the sample is encoded in other batches
    assert (whole["passages"], whole["size_bytes"]) == (240, 240 * 48 * 2)
    assert document["num_random"] + document["num_chosen"] == 240
    assert "encode all" in out
    assert "From enc to" in (tmp_path / "page.html").read_text()
    plan = done("migrate", "--store", world.store, "--split", "test", "--to", other, "--plan")
    assert "encodes  up to 240 of 240 passages and 30 judged queries" in plan


def test_a_sample_stands_for_the_whole_corpus(world: SimpleNamespace, other: str, done: Done, tmp_path: Path) -> None:
    document, out = forecast(done, world.store, tmp_path, "--to", other, "--sample", 100, "--hard", 1)
    assert 130 <= document["num_random"] + document["num_chosen"] < 220
    difference = document["choices"][-1]["difference"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert "Intervals cover the draw of the queries" in out


def test_the_gate_needs_embeddings_and_queries(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, documented
) -> None:
    at = ("--store", world.store, "--to", other)
    line = refused("migrate", *at, "--split", "test", "--require", "overlap@10 >= 0.9")
    assert "no complete embeddings of" in line
    assert "riptide encode-corpus --store" in line
    documented(AREA, "migrate --require before the corpus is encoded", line.replace(other, "other"), 1)
    done("encode_corpus", "--store", world.store, "--encoder", other, "--name", "new")
    line = refused("migrate", *at, "--split", "test", "--require", "nDCG@10 >= -0.9", "--switch")
    assert "30 queries; required >= -0.9: not met; about 50 queries are needed to tell: nothing was switched" in line
    documented(AREA, "migrate: too few queries for a gate", re.sub(r"[+-]0\.\d{4}", "…", line), 1)
    plan = done("migrate", *at, "--split", "all", "--require", "overlap@10 >= -1", "--switch", "--plan")
    assert "compares index:idx and exact:new" in plan
    assert live_release_id(Store(world.store)) is None


def test_the_gate_refuses_a_worse_encoder_and_a_switch_can_be_undone(
    world: SimpleNamespace, other: str, done: Done, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worse encoder reads only the first word of a passage."""
    monkeypatch.setattr("riptide.indexing.migration.requirements.MIN_QUERIES", 30)
    store, at = Store(world.store), ("--store", world.store)
    worse = ("--passage-length", 3, *EXACT_NUMERICS)
    done("encode_corpus", *at, "--encoder", world.model, "--name", "worse", *worse)
    gate = ("migrate", *at, "--embeddings", "enc", "--to", world.model, "--switch", "--split", "test")
    line = refused(*gate, *worse, "--require", "nDCG@10 >= -0.005", "R@20 >= -1")
    assert "nDCG@10 -0." in line
    assert "not met, and more queries of this kind would not change it: nothing was switched" in line
    assert live_release_id(store) is None

    done("encode_corpus", *at, "--encoder", other, "--name", "new")
    switch = ("migrate", *at, "--split", "all", "--switch", "--require", "overlap@10 >= -1")
    out = done(*switch, "--embeddings", "enc", "--to", other)
    first = live_release_id(store)
    assert first is not None
    assert f"live     release {first[0]}, embeddings/new" in out
    assert "serve it with riptide serve-search" in out
    assert "nothing was switched" in refused(*switch[:-1], "overlap@10 >= 0.99", "--to", world.model, *EXACT_NUMERICS)
    assert live_release_id(store) == first
    out = done(*switch, "--to", world.model, *EXACT_NUMERICS)
    assert "from     embeddings/new" in out
    assert f'back     PUT /v1/release with {{"release": "{first[0]}"}}' in out
    live, _ = read_live_release(store)
    assert live is not None
    assert [(task.name, task.embeddings, task.index) for task in live.tasks] == [("default", "enc", "idx")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--require", "nDCG@10 > 0"), "expected a metric, >= and a number"),
        (("--switch",), "--switch without --require: expected both, as it is for the gate"),
        (("--metric", "AP"), "--metric AP: expected nDCG@K, R@K or RR@K"),
        (("--split", "dev"), "--split dev: queries/tiny has no judgements of it, which a forecast needs"),
        (("--split", "all"), "name a split with judgements (test, train)"),
        (("--require", "nDCG@10 >= 0", "--html", "x"), "--html with --require: expected one of them"),
    ],
)
def test_bad_input_is_one_line(
    world: SimpleNamespace, other: str, refused: Refused, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("migrate", "--store", world.store, "--to", other, *arguments)


def test_the_same_encoder_is_refused(world: SimpleNamespace, refused: Refused, documented) -> None:
    line = refused("migrate", "--store", world.store, "--split", "test", "--to", world.model, *EXACT_NUMERICS)
    assert "embeddings/enc are of this encoder with these settings" in line
    documented(AREA, "migrate to the encoder that made the embeddings", line.replace(world.model, "tiny"), 1)
