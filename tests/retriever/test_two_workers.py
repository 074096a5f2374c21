"""The shared pair of workers: what a case changes is reset, and a failed or lost case does not affect the next one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from two_workers import CaseFailed, TwoWorkers

VARIABLE = "RIPTIDE_TEST_TWO_WORKERS"


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoWorkers]:
    workers = TwoWorkers()
    yield workers
    workers.end()


def state(rank: int, patch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Returns the sum of the ranks over both workers, and what `change` changes."""
    ranks = torch.tensor(rank)
    dist.all_reduce(ranks)
    names = random.random.__name__, torch.nn.functional.linear.__name__
    return int(ranks), VARIABLE in os.environ, torch.get_num_threads(), torch.initial_seed(), names


def change(rank: int, patch: pytest.MonkeyPatch) -> None:
    os.environ[VARIABLE] = "1"
    torch.set_num_threads(2)
    torch.manual_seed(123)
    patch.setattr(random, "random", random.randrange)
    torch.nn.functional.linear = torch.nn.functional.relu


def raise_on_rank_1(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        raise ValueError("only on one worker")
    dist.barrier()


def end_on_rank_1(rank: int, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_a_case_leaves_nothing_behind(pair: TwoWorkers) -> None:
    before = pair.run(state)
    assert [rank_sum for rank_sum, *_ in before] == [1, 1]
    assert pair.run(change) == [None, None]
    assert pair.run(state) == before
    assert pair.starts == 1


def test_after_a_failed_case_the_next_one_runs_in_new_processes(pair: TwoWorkers) -> None:
    starts = pair.starts
    with pytest.raises(CaseFailed, match=r"(?s)worker 1:\nTraceback.*ValueError: only on one worker"):
        pair.run(raise_on_rank_1)
    with pytest.raises(CaseFailed, match="worker 1 ended with the status 3"):
        pair.run(end_on_rank_1)
    assert pair.run(state)[0][0] == 1
    assert pair.starts == starts + 2 + (starts == 0)
