"""kill -9 in the middle of mining: the same command again gives the same candidates, scores and negatives.

The moment is counted in committed parts, never in time; the driver's private Ray ends with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from local_cluster import run, start, wait_for
from tiny import save_bert, write_corpus

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PARTS, QUESTIONS = 12, 240


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[object]]:
    """(a store with all that mining needs, the same after an undisturbed run, the command's arguments)."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("mining")
    source = write_corpus(root / "raw", 1_000, questions=QUESTIONS)
    os.environ["RIPTIDE_CACHE"] = str(root / "cache")
    model = save_bert(root / "model")
    reranker = shutil.copytree(model, root / "cross")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, num_labels=1, initializer_range=0.5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(reranker)
    store = root / "store"
    run("import_corpus", "--store", store, "--source", source, "--part-size", 250)
    run("encode_corpus", "--store", store, "--encoder", model, "--name", "tiny", "--compile", "never")
    run("build_bm25", "--store", store, "--shards", 2)
    arguments: list[object] = [
        "--split", "test", "--sources", "bm25", "exact:tiny", "--depth", 60, "--part-queries", QUESTIONS // PARTS,
        "--reranker", reranker, "--denoise-threshold", 0.5, "--candidates", "pool", "--name", "drawn",
    ]  # fmt: skip
    after = Path(shutil.copytree(store, root / "after"))
    run("mine_negatives", "--store", after, *arguments)
    lines = [json.loads(line)["_id"] for line in (source / "queries.jsonl").read_text().splitlines()]
    assert len(lines) == QUESTIONS
    return store, after, arguments


@pytest.mark.parametrize(
    ("folder", "moment"), [("candidates/pool", 4), ("scores/pool-cross/g0000", 5), ("negatives/drawn", 1)]
)
def test_the_same_bytes_come_out(worlds, tmp_path: Path, folder: str, moment: int) -> None:
    before, after, arguments = worlds
    store = Path(shutil.copytree(before, tmp_path / "store"))
    job = start("mine_negatives", "--store", store, *arguments)

    def parts() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (store / folder).glob("part-?????.json")}

    wait_for(lambda: len(parts()) >= moment, f"{moment} parts of {folder}", job.process)
    job.process.send_signal(signal.SIGKILL)
    job.process.communicate()
    assert not (store / folder / "manifest.json").exists() or folder == "negatives/drawn"  # which takes a moment only
    kept = parts()
    run("mine_negatives", "--store", store, *arguments)
    assert contents(store) == contents(after)
    assert kept.items() <= parts().items(), "what had been committed was committed again"
    run("verify", "--store", store)


def contents(store: Path) -> dict[str, str]:
    """File -> sha256 of all that mining made, less who made it and when. (Lucene's files are made before.)"""
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and path.name != "provenance.json" and ".tmp" not in path.parts
    }
