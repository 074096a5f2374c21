"""A job that is ended at any storage write is completed by the same command, with the same bytes.

Every write and every deletion of a small import, sync, erasure, encoding, index, BM25 index, fit of topics, search,
mining and training run is tried: it raises (all of them; of an erasure, every third), and the process ends at it (a
seeded sample). The long form tries all. A fault strikes before the write, or after it, as if its acknowledgement was
lost.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import crash_points
import pytest
from crash_points import EXIT_STATUS, counted_writes
from local_cluster import LONG
from samples import make_passages, make_queries, save_tiny_bert, write_beir

from riptide.base.errors import StorageError
from riptide.indexing.store.keys import BEGUN_ERASURE
from riptide.indexing.store.store import Store

SEED = int(os.environ.get("RIPTIDE_CRASH_SEED", "0"))
SAMPLED = 2  # writes of each job at which the process ends, in the short form
SYNC = "import_corpus --sync"
ERASE = "import_corpus --erase"
NUMERICS = ("--dtype", "float32", "--compile", "never")


def job_of(name: str) -> str:
    """Returns the job of a step."""
    return name.partition(" ")[0]


@dataclass(frozen=True)
class Step:
    """A job with its arguments, the store before it, the store after the last job, and the state after this one."""

    name: str
    arguments: tuple[str, ...]
    before: Path
    last: Path
    expected: dict[str, object]
    writes: int


def state(folder: Path) -> dict[str, object]:
    """Returns the fingerprint, parts and notes of every artifact; there must be no draft and no checkpoint."""
    store = Store(str(folder))
    assert store.incomplete_keys() == []
    assert list(store.storage.list("checkpoints")) == []
    found: dict[str, object] = {}
    for key in sorted(store.keys()):
        artifact = store.open(*key.split("/", 1))
        random_bytes = artifact.kind == "bm25"  # Lucene writes random identifiers and times
        parts = [(part.name, part.rows, None if random_bytes else part.sha256) for part in artifact.parts]
        found[key] = (artifact.fingerprint, parts, artifact.notes)
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> dict[str, Step]:
    """Every job, run without a fault, one after the other on one store."""
    root = tmp_path_factory.mktemp("crash")
    passages = make_passages(60)
    queries, judged = make_queries(passages, 12)
    source = write_beir(root / "source", passages, queries, {"train": judged})
    new = [*make_passages(3, seed=5, prefix="n"), *({**passage, "text": "changed"} for passage in passages[:9])]
    changed = write_beir(root / "changed/source", [*new, *passages[12:]], queries, {"train": judged})
    erased = root / "erased-ids.txt"
    erased.write_text("p1\np30\n")
    model = save_tiny_bert(root / "model")
    commands = {
        "import_corpus": ("--source", str(source), "--part-size", "25"),
        "encode_corpus": ("--encoder", str(model), "--name", "enc", *NUMERICS),
        "build_index": ("--embeddings", "enc", "--factory", "IVF2,SQ8", "--shards", "2"),
        "build_bm25": ("--shards", "2"),
        "fit_topics": ("--min-passages", "2", "--most-frequent", "0", "--iterations", "3", "--merge-below", "0"),
        "search": ("--mode", "bm25", "--split", "train", "--k", "5"),
        "mine_negatives": ("--sources", "bm25", "--depth", "10", "--part-queries", "5", "--denoised-negatives", "0"),
        "tune_prompts": (
            *("--backbone", str(model), "--task", "task", "--split", "train", "--dev-split", "train", "--length", "2"),
            *("--steps", "4", "--batch", "4", "--negatives-per-query", "1", "--lr", "0.1", "--cpus", "1"),
            *("--checkpoint-every", "2", "--evaluate-every", "2", "--dtype", "float32"),
        ),
        SYNC: ("--source", str(changed), "--part-size", "4", "--sync"),
        ERASE: ("--erase", str(erased)),
    }
    found = {}
    store = root / "store"
    store.mkdir()
    for name, arguments in commands.items():
        before = root / f"before-{name}"
        shutil.copytree(store, before)
        # The others are complete after the last job, so a corpus that changes is in a copy.
        last = Path(shutil.copytree(before, root / f"after-{name}")) if name in (SYNC, ERASE) else store
        with counted_writes(None, lambda: None) as counter:
            assert call_job(job_of(name), "--store", last, *arguments) == 0
        found[name] = Step(name, arguments, before, last, state(last), counter.count)
    return found


JOBS = (
    *("import_corpus", "encode_corpus", "build_index", "build_bm25", "fit_topics", "search", "mine_negatives"),
    *("tune_prompts", SYNC, ERASE),
)


def fail() -> None:
    """The fault of a write that raises."""
    raise StorageError("a write failed")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_write_fails_is_completed_by_the_same_command(
    name: str, steps: dict[str, Step], call_job: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps[name]
    tried = 0
    stride = 1 if LONG or name != ERASE else 3
    for number in range(SEED % stride, step.writes, stride):
        store = tmp_path / str(number)
        shutil.copytree(step.before, store)
        with counted_writes(number, fail, after=(number + SEED) % 2 == 1) as counter:
            assert call_job(job_of(name), "--store", store, *step.arguments) == 1, f"write {number} failed unnoticed"
        assert counter.count > number
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert lines == ["error: a write failed"]
        assert call_job(job_of(name), "--store", store, *step.arguments) == 0
        assert state(store) == step.expected, f"after write {number}"
        shutil.rmtree(store)
        tried += 1
    assert tried >= step.writes // stride > 0


@pytest.mark.parametrize("name", JOBS)
def test_the_plan_of_a_completed_job_says_that_nothing_is_to_be_made(
    name: str, steps: dict[str, Step], call_job: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps[name]
    keys = {
        "import_corpus": "corpus/g0000",
        "encode_corpus": "embeddings/enc/g0000",
        "build_index": "index/enc/g0000",
        "build_bm25": "bm25/bm25/g0000",
        "fit_topics": "topics/topics/g0000",
        "search": "runs/source-train-bm25",
        "mine_negatives": "negatives/source-train-bm25",
        "tune_prompts": "prompts/task",
        SYNC: "corpus/g0001",
        ERASE: next((f"erasures/{file.name}" for file in step.last.glob("erasures/e*.json")), ""),
    }
    capsys.readouterr()
    with counted_writes(None, lambda: None) as counter:
        assert call_job(job_of(name), "--store", step.last, *step.arguments, "--plan") == 0
    assert capsys.readouterr() == (f"nothing to make: {step.last}/{keys[name]} is complete\n", "")
    assert counter.count == 0
    assert call_job(job_of(name), "--store", step.before, *step.arguments, "--plan") == 0
    assert "nothing to make" not in capsys.readouterr().out


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_process_ends_at_a_write_is_completed_by_the_same_command(
    name: str, steps: dict[str, Step], call_job: Callable[..., int], tmp_path: Path
) -> None:
    step = steps[name]
    numbers = list(range(step.writes))
    chosen = numbers if LONG else sorted(random.Random(f"{name} {SEED}").sample(numbers, min(SAMPLED, len(numbers))))
    for number in chosen:
        store = tmp_path / str(number)
        shutil.copytree(step.before, store)
        when = "after" if (number + SEED) % 2 else "before"
        command = [sys.executable, crash_points.__file__, str(number), when, job_of(name), "--store", str(store)]
        ended = subprocess.run([*command, *step.arguments], capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == EXIT_STATUS, ended.stderr
        if (store / BEGUN_ERASURE).exists():  # a killed erasure counts as ended after a while
            os.utime(store / BEGUN_ERASURE, (0, 0))
        assert call_job(job_of(name), "--store", store, *step.arguments) == 0
        assert state(store) == step.expected, f"after write {number}"
        shutil.rmtree(store)
