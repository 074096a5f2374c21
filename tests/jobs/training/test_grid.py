"""The grid of a sweep: every combination, with the types of the job's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from riptide.base.errors import InputError
from riptide.jobs.common.starting import COMMAND_LINE
from riptide.jobs.training.sweep import SweepRun, parse_grid


@dataclass(frozen=True)
class Options:
    """Options of a job."""

    store: str = "s"
    lr: float | None = None
    seed: int = 0
    batch_size: int = 8
    normalize: bool = True
    method: Literal["prompt", "finetune"] = "prompt"


def test_every_combination_once_the_last_option_changing_fastest() -> None:
    runs = parse_grid(["lr=1e-2,3e-2", "seed=0,1,2"], Options(batch_size=4), {"store"})
    assert [(run.options.lr, run.options.seed) for run in runs] == [
        (lr, seed) for lr in (0.01, 0.03) for seed in (0, 1, 2)
    ]
    assert {run.options.batch_size for run in runs} == {4}
    assert runs[4] == SweepRun({"lr": 0.03, "seed": 1}, Options(lr=0.03, seed=1, batch_size=4))
    assert runs[4].suffix == "lr0.03-seed1"


def test_values_have_the_types_of_their_options() -> None:
    [run] = parse_grid(["normalize=false", "--batch-size=16", "method=finetune"], Options(), {"store"})
    assert run.options == Options(normalize=False, batch_size=16, method="finetune")


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["seeds=1"], "--sweep seeds=1: seeds is not an option that can be swept; did you mean seed?"),
        (["colour=1"], "--sweep colour=1: colour is not an option that can be swept; --help lists the options"),
        (["store=a,b"], "--sweep store=a,b: all runs of a sweep have the same store; give it as --store"),
        (["lr"], "--sweep lr: expected NAME=VALUE,VALUE"),
        (["lr="], "--sweep lr=: expected NAME=VALUE,VALUE"),
        (["seed=1,x"], "--sweep seed=1,x: expected a whole number, got 'x'"),
        (["seed=1,,2"], "--sweep seed=1,,2: expected a whole number, got ''"),
        (["lr=1,x"], "--sweep lr=1,x: expected a number, got 'x'"),
        (["method=lora"], "--sweep method=lora: expected prompt or finetune, got 'lora'"),
        (["normalize=yes"], "--sweep normalize=yes: expected true or false, got 'yes'"),
        (["lr=0.1,1e-1"], "--sweep lr=0.1,1e-1: a value comes twice"),
        (["lr=1", "lr=2"], "--sweep lr=2: lr is swept twice; give all values in one list"),
    ],
)
def test_what_is_no_grid_is_refused_in_one_line(texts: list[str], line: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_grid(texts, Options(), {"store"})
    assert COMMAND_LINE.render(f"{raised.value}") == line


def test_a_grid_that_nobody_would_wait_for_is_refused() -> None:
    seeds = ",".join(map(str, range(101)))
    with pytest.raises(InputError, match="10,201 runs; expected at most 1,000"):
        parse_grid([f"seed={seeds}", f"batch_size={seeds.replace('0,', '', 1)},101"], Options(), {"store"})
