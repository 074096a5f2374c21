"""An artifact that was begun on the CPU is resumed there, also on a machine that has a GPU by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import files_of

from riptide.base.errors import InputError
from riptide.indexing.search import retrieval
from riptide.indexing.work.required_device import pinned_gpus
from riptide.jobs import encode_corpus
from riptide.jobs.common import session
from riptide.retriever.forward import numerics

Done = Callable[..., str]


@pytest.fixture
def add_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """add_gpu() makes this machine pretend that it has a GPU."""

    def add() -> None:
        for module in (session, encode_corpus):
            monkeypatch.setattr(module, "num_gpus", lambda: 1)

    return add


def unfinish(folder: Path) -> None:
    """Removes the manifest of an artifact and the record of its last part."""
    (folder / "manifest.json").unlink()
    max(folder.glob("part-*.json")).unlink()


def check(folder: Path, command: tuple[object, ...], add_gpu: Callable[[], None], done: Done, refused: Done) -> None:
    """Checks that a command completes an artifact as it was, and refuses a GPU, of which it begins nothing."""
    expected = files_of(folder)
    unfinish(folder)
    left = files_of(folder)
    add_gpu()
    line = refused(*command, "--gpus", 1)
    assert line.startswith(f"error: --gpus 1: {folder} was begun on a CPU (`cpu ")
    assert line.endswith("`), and an artifact has one numerics class; leave --gpus out, or give another name")
    assert files_of(folder) == left
    done(*command)
    assert files_of(folder) == expected


def test_embeddings_are_resumed_on_the_cpu(world, add_gpu, done: Done, refused: Done) -> None:
    encode = ("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "mine", "--dtype", "float32")
    done(*encode, "--compile", "never")
    check(world.store / "embeddings/mine/g0000", (*encode, "--compile", "never"), add_gpu, done, refused)


def test_a_reranked_run_is_resumed_on_the_cpu(
    world, classifier: str, add_gpu, done: Done, refused: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "QUERY_BLOCK", 16)
    search = ("search", "--store", world.store, "--mode", "exact", "--k", 20, "--rerank", classifier, "--name", "mine")
    done(*search)
    check(world.store / "runs/mine", search, add_gpu, done, refused)


def test_scores_are_resumed_on_the_cpu(world, classifier: str, add_gpu, done: Done, refused: Done) -> None:
    mine = (
        "mine_negatives",
        "--store",
        world.store,
        "--sources",
        "exact:enc",
        "--depth",
        20,
        "--part-queries",
        5,
        "--reranker",
        classifier,
    )
    done(*mine)
    [scores] = (world.store / "scores").glob("*/g0000")
    check(scores, mine, add_gpu, done, refused)


def test_the_pinned_class_decides_unless_the_user_wants_the_other_device() -> None:
    cpu, cuda = "cpu amd avx2 float32 eager torch-2", "cuda NVIDIA H100 bfloat16 compiled torch-2"
    assert [pinned_gpus(None, requested, "x") for requested in (None, 0, 1)] == [None, 0, 1]
    assert [pinned_gpus(pinned, None, "x") for pinned in (cpu, cuda)] == [0, 1]
    assert (pinned_gpus(cpu, 0, "x"), pinned_gpus(cuda, 1, "x")) == (0, 1)
    with pytest.raises(InputError, match="parameter gpus 0: x was begun on a GPU"):
        pinned_gpus(cuda, 0, "x")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--gpus", 1), "--gpus 1: this machine has no GPU"),
        (("--cpus", 10_000), "--cpus 10000: expected at most "),
        (("--wait", -1), "--wait -1: expected seconds, at least 0"),
        (("--node-label", "kind"), "--node-label 'kind': expected KEY=VALUE, for example node-type=gpu"),
        (("--min-workers", 3, "--max-workers", 2), "--min-workers 3: expected at most the 2 of --max-workers"),
    ],
)
def test_impossible_workers_are_refused_and_nothing_is_begun(
    options: tuple[object, ...], line: str, world, classifier: str, refused: Done
) -> None:
    before = files_of(world.store, but=())
    search = ("search", "--store", world.store, "--mode", "exact", "--rerank", classifier, "--name", "mine", *options)
    assert f"error: {line}" in refused(*search)
    if "expected at most" not in line and "this machine" not in line:  # a plan is also made on another machine
        assert f"error: {line}" in refused(*search, "--plan")
    assert files_of(world.store, but=()) == before


def test_a_gpu_without_a_reranker_has_no_use(world, refused: Done) -> None:
    search = ("search", "--store", world.store, "--mode", "exact", "--gpus", 0)
    assert "--gpus 0: exact:enc has no use for it, it goes with --rerank" in refused(*search)
    mine = ("mine_negatives", "--store", world.store, "--sources", "exact:enc", "--gpus", 0)
    assert "--gpus 0 without --reranker" in refused(*mine)


def test_auto_follows_the_class_with_which_the_embeddings_were_begun(
    world, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine on which the other dtype is faster by then: in a resumed encoding, and for queries."""
    monkeypatch.setattr(numerics, "bfloat16_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(numerics, "bfloat16_speed", lambda: 0.5)
    encode = ("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "auto")
    assert " float32 " in done(*encode)
    folder = Path(world.store, "embeddings/auto/g0000")
    expected = files_of(folder)
    unfinish(folder)
    monkeypatch.setattr(numerics, "bfloat16_speed", lambda: 8.0)
    done(*encode)
    assert files_of(folder) == expected
    done("search", "--store", world.store, "--embeddings", "auto", "--name", "auto")
    [record] = Path(world.store, "runs/auto").glob("part-*.json")
    assert " float32 " in json.loads(record.read_text())["facts"]["query_numerics"]["auto"]
