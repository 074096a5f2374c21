"""Verification over a whole store: what is damaged is named, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from samples import files_of

from riptide.indexing.store.store import Store
from riptide.serve.release.live import save_as_live
from riptide.serve.release.planning import plan_release


def test_a_whole_store_is_as_it_was_committed(world, done) -> None:
    before = files_of(world.store, but=())
    out = done("verify", "--store", world.store)
    assert "6 artifacts are as they were committed" in out
    assert files_of(world.store, but=()) == before
    assert f"would read {len(before)} files" in done("verify", "--store", world.store, "--plan")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damaged_file_is_named_with_status_1(world, job, damage: str) -> None:
    files = [
        "corpus/g0000/part-00001-*.arrow",
        "corpus/g0000/manifest.json",
        "queries/tiny/qrels-test.json",
        "embeddings/enc/g0000/part-00002-*.npy",
        "embeddings/enc/g0000/manifest.begun.json",
        "index/idx/g0000/shard-00001-*.faiss",
        "runs/exact/provenance.json",
    ]
    damaged = [next(world.store.glob(pattern)) for pattern in files]
    for path in damaged:
        data = path.read_bytes()
        if damage == "flip":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        elif damage == "cut":
            path.write_bytes(data[:-1])
        else:
            path.unlink()
    outcome = job("verify", "--store", world.store)
    assert outcome.status == 1
    bad = [line for line in outcome.out.splitlines() if line.startswith("bad: ")]
    for path in damaged:
        assert any(str(path) in line for line in bad), path
    told = {line.removeprefix("bad: ").split(": ")[0] for line in bad}
    assert told == {str(path) for path in damaged}
    assert outcome.err.startswith(f"error: {world.store}: {len(bad)} bad or missing files; restore them, or remove")
    assert outcome.err.count("\n") == 1


def test_what_is_not_complete_is_told_and_is_no_damage(world, done) -> None:
    for file in ("manifest.json", "provenance.json"):
        (world.store / "runs/dense" / file).unlink()
    out = done("verify", "--store", world.store)
    assert f"incomplete: {world.store}/runs/dense: the command that makes it resumes it" in out
    assert "5 artifacts are as they were committed" in out


def test_limit_hashes_the_first_parts_only(world, job, done) -> None:
    [last] = (world.store / "corpus/g0000").glob("part-00003-*.arrow")
    last.write_bytes(b"x" * last.stat().st_size)
    done("verify", "--store", world.store, "--limit", 1)
    assert job("verify", "--store", world.store).status == 1


def test_the_live_release_is_verified(world, job, done, documented) -> None:
    at, store = ("--store", world.store), Store(str(world.store))
    release, _ = plan_release(store)
    assert save_as_live(store, release, None)
    assert "7 artifacts are as they were committed" in done("verify", *at)
    current, whole = world.store / "serving/current.json", (world.store / "serving/current.json").read_bytes()
    damages = {"is empty": b"", "is truncated": whole[:-5], "was changed": whole.replace(b"before", b"bef0re")}
    for case, data in damages.items():
        current.write_bytes(data)
        outcome = job("verify", *at)
        assert outcome.status == 1
        [line] = [line for line in outcome.out.splitlines() if line.startswith("bad: ")]
        assert line.startswith(f"bad: {current}: ")
        documented("Releases", f"`verify` where serving/current.json {case}", line, 1)
    current.write_bytes(whole)
    shutil.rmtree(world.store / "releases" / release.id)
    outcome = job("verify", *at)
    assert outcome.status == 1
    [line] = [line for line in outcome.out.splitlines() if line.startswith("bad: ")]
    documented("Releases", "`verify` where the live release is missing", line, 1)
    assert save_as_live(store, release, store.storage.read_tagged("serving/current.json")[1])
    shutil.rmtree(world.store / "index/idx/g0000")
    assert "index/idx/g0000/manifest.json: releases/" in job("verify", *at).out


def test_a_store_that_is_not_there_is_no_whole_store(tmp_path: Path, refused) -> None:
    assert f"{tmp_path}/none: there is no store here" in refused("verify", "--store", tmp_path / "none")


@pytest.mark.parametrize(
    ("shift", "similarity", "kind"), [(0.0, "0.99999", ""), (0.02, "0.997", "warning: "), (1.0, "0.230", "bad: ")]
)
def test_an_encoder_whose_output_has_moved_is_told(
    world, job, monkeypatch, shift: float, similarity: str, kind: str
) -> None:
    """The model's files are the same. As by another version of torch, its normalisation returns other values."""
    layer_norm = torch.nn.functional.layer_norm
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda *args, **kw: layer_norm(*args, **kw).add_(shift))
    outcome = job("verify", "--store", world.store, "--encoders")
    embeddings = f"{world.store}/embeddings/enc/g0000: "
    [line] = [line for line in outcome.out.splitlines() if embeddings in line]
    assert line.startswith(f"{kind}{embeddings}")
    assert f"smallest similarity {similarity}" in line
    assert "of 8 passages" in line
    assert outcome.status == (kind == "bad: ")
    if outcome.status:
        assert outcome.err == (
            f"error: {world.store}: the encoders of 1 artifacts give other vectors or cannot be compared, see above\n"
        )
        assert "expected at least 0.99: use the versions of packages that" in line


def test_encoders_are_not_compared_if_they_or_files_of_the_store_are_missing(world, job, tmp_path: Path) -> None:
    Path(world.model).rename(tmp_path / "model")
    file = next((world.store / "embeddings/enc/g0000").glob("*.npy"))
    content = file.read_bytes()
    try:
        outcome = job("verify", "--store", world.store, "--encoders")
        file.write_bytes(content[:-1])
        damaged = job("verify", "--store", world.store, "--encoders")
    finally:
        (tmp_path / "model").rename(world.model)  # other tests use it
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert outcome.err.endswith("of 1 artifacts give other vectors or cannot be compared, see above\n")
    assert "bad: embeddings/enc: its encoder cannot be compared with its vectors: " in outcome.out
    assert damaged.err.endswith("and make them again, and run the command again: no encoder was compared\n")
