"""Training says how many texts of its batches were cut to a length limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from training_commands import RERANK, RIP, TUNE, command

from riptide.base.cuts import Cuts
from riptide.indexing.store.store import Store

Done = Callable[..., str]


def lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if "were cut" in line]


def test_queries_and_passages_are_counted_apart(
    world, mined: Store, done: Done, documented: Callable[..., None]
) -> None:
    """The last step is a checkpoint; queries have at most 17 tokens and few of them are cut."""
    short = ("--passage-length", 12, "--query-length", 17, "--steps", 4, "--checkpoint-every", 3)
    found = lines(done(*command(TUNE, world, "short", *short)))
    stored = mined.open("prompts", "short").notes["cuts"]
    queries, passages = (Cuts(**stored[noun]) for noun in ("queries", "passages"))
    assert (queries.texts, queries.limit, passages.limit) == (4 * 8, 17, 12)
    assert passages.are_many
    warning = [line for line in found if "passages of the batches" in line]
    assert len(warning) == 1, "it is printed once"
    assert re.fullmatch(
        r"warning: \d+ of \d+ passages of the batches were cut to 12 tokens; [\d.]+% of all tokens were kept; give a "
        r"larger --passage-length under another --task \(the model allows at most 64\), or split long documents into "
        r"passages, as riptide import-corpus --split-words does",
        warning[0],
    )
    assert len(found) == 1 + bool(queries.cut_texts)
    documented("Training", "tune_prompts of passages that are longer than --passage-length", warning[0], 0)


def test_a_resumed_run_counts_the_steps_of_both(world, mined: Store, done: Done, job: Any, monkeypatch) -> None:
    from riptide.retriever.training.loop import Trainer

    more = ("--max-length", 20, "--steps", 4, "--checkpoint-every", 2)
    whole = lines(done(*command(RERANK, world, "whole", *more)))
    step = Trainer.step

    def interrupted(trainer: Trainer, number: int) -> float:
        if number == 3:
            raise KeyboardInterrupt
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert job(*command(RERANK, world, "killed", *more)).status == 130
    resumed = lines(done(*command(RERANK, world, "killed", *more)))
    notes = [mined.open("models", name).notes["cuts"] for name in ("whole", "killed")]
    assert notes[0] == notes[1]
    assert notes[0]["pairs"]["texts"] == 4 * 8 * 3
    assert whole[0].startswith("warning: ")
    assert "pairs of the batches were cut to 20 tokens" in whole[0]
    assert "give a larger --max-length under another --name (the model allows at most 64), or split" in resumed[0]


@pytest.mark.parametrize(("objective", "is_counted"), [("rip", False), ("mlm", True)])
def test_spans_are_cut_by_design(world, done: Done, objective: str, is_counted: bool) -> None:
    """A span of random words ends where it was cut; a passage that is drawn as a whole loses its end."""
    out = done(*command(RIP, world, objective, "--objective", objective, "--steps", 2, "--max-length", 12))
    notes = Store(str(world.store)).open("models", objective).notes["cuts"]
    assert notes.keys() == ({"passages"} if is_counted else set())
    assert [line.partition(" of ")[2][:12] for line in lines(out)] == (["16 passages "] if is_counted else [])


def test_texts_that_fit_give_no_line(world, mined: Store, done: Done) -> None:
    assert lines(done(*command(RERANK, world, "fits", "--steps", 1, "--max-length", 64))) == []
    assert Cuts(**mined.open("models", "fits").notes["cuts"]["pairs"]).cut_texts == 0
