"""Named outputs: the loop computes the loss and the gradients of one graph over the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import output_cases as cases
import pytest
import torch
from output_cases import CPU, DENSE, NUM_QUERIES, NamedSystem, one_graph
from two_workers import TwoWorkers

from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput, check_outputs


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("grad_cache", ["on", "off"])
@pytest.mark.parametrize("num_queries", [NUM_QUERIES, 1])
def test_gradients_are_those_of_one_graph(
    two_workers: TwoWorkers, monkeypatch: pytest.MonkeyPatch, grad_cache: str, num_queries: int
) -> None:
    """Dense, sparse, attention and summed outputs; with one query, the second worker has no chunk with attention."""
    expected = one_graph(NamedSystem(num_queries=num_queries))
    assert all(bool(value.abs().sum() > 0) for name, value in expected.items() if name != "loss")
    assert_equal(cases.gradients(0, monkeypatch, 1, num_queries, grad_cache), expected)
    first, second = two_workers.run(cases.gradients, 2, num_queries, grad_cache)
    assert_equal(first, expected)
    assert_equal(second, expected)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_steps_on_named_outputs(
    two_deepspeed_workers: TwoWorkers, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """Workers with unequal numbers of chunks: three and three of the first, two and three of the second."""
    expected = cases.two_steps(0, monkeypatch, 1, NUM_QUERIES - 2, "off", None)
    actual, _ = two_deepspeed_workers.run(cases.two_steps, 2, NUM_QUERIES - 2, "auto", zero)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "losses" or name.startswith("weight."):
            torch.testing.assert_close(actual[name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_grad_cache_repeats_the_dropout_of_all_outputs() -> None:
    losses = []
    for grad_cache in ("on", "off"):
        system = NamedSystem(rate=0.5)
        options = LoopOptions(steps=4, lr=1e-2, grad_cache=grad_cache)  # type: ignore[arg-type]
        trainer = Trainer(system, options, device=CPU, dtype=torch.float32)
        losses.append([trainer.step(number) for number in range(3)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "rows of dense, which forward did not return"),
        ({"dense": torch.zeros(2, DENSE + 1)}, rf"'dense' of a chunk: expected \[2, {DENSE}\], got \[2, {DENSE + 1}\]"),
        ({"dense": torch.zeros(1, DENSE)}, rf"expected \[2, {DENSE}\], got \[1, {DENSE}\]"),
        ({"dense": torch.zeros(2, DENSE), "sum": torch.zeros(4)}, r"'sum' of a chunk: expected \[any, 4\], got \[4\]"),
        ({"dense": torch.zeros(2, DENSE), "other": torch.zeros(2, 4)}, "'other' of a chunk: expected it in Batch"),
        ({"dense": torch.zeros(2, DENSE), "attention": torch.zeros(2, 3)}, "in BatchChunk.rows if it has rows"),
    ],
)
def test_outputs_that_the_batch_does_not_declare_are_refused(outputs: dict[str, torch.Tensor], message: str) -> None:
    batch = Batch({"dense": BatchOutput(DENSE, 6), "attention": BatchOutput(3, 4), "sum": BatchOutput(4)}, [])
    chunk = BatchChunk({"dense": np.array([1, 3])}, None)
    check_outputs({"dense": torch.zeros(2, DENSE), "sum": torch.zeros(5, 4)}, chunk, batch)
    with pytest.raises(ValueError, match=message):
        check_outputs(outputs, chunk, batch)
