"""The training kernels for a CPU (attention, dropout, the loss over a vocabulary) against torch's functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from riptide.retriever.forward import kernels
from riptide.retriever.forward.kernels import Dropout, apply_dropout, attention, swap_dropout, vocabulary_loss


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_equal_torchs(dtype: torch.dtype, close: float, masked: bool) -> None:
    torch.manual_seed(0)
    shapes = [(3, 4, 6, 8), (3, 4, 9, 8), (3, 4, 9, 8)]
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    theirs = [one.detach().double().requires_grad_() for one in ours]
    mask = None
    if masked:
        mask = torch.rand(3, 1, 6, 9) > 0.4
        mask[..., 0] = True
    weights = torch.randn(3, 4, 6, 8)
    found = attention(*ours, mask, None)
    expected = functional.scaled_dot_product_attention(*theirs, mask)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, atol=close, rtol=close)


def test_dropout_and_its_gradient_use_one_mask() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.1))
    swap_dropout(module)
    [drop] = module
    assert isinstance(drop, Dropout)
    values = torch.ones(1001, 37, requires_grad=True)
    torch.manual_seed(5)
    found = drop(values)
    torch.manual_seed(5)
    assert torch.equal(drop(values), found), "the mask depends on the seed"
    assert not torch.equal(drop(values), found)
    dropped = found == 0
    assert abs(float(dropped.float().mean()) - 26 / 256) < 0.005
    torch.testing.assert_close(found[~dropped], torch.full_like(found[~dropped], 256 / 230))
    found.sum().backward()
    torch.testing.assert_close(values.grad, found.detach())
    module.eval()
    assert drop(values) is values


def test_dropout_is_replaced_everywhere_in_a_model_and_other_models_keep_theirs() -> None:
    shared, other = torch.nn.Dropout(0.1), torch.nn.Sequential()
    module = torch.nn.ModuleDict({"one": shared, "two": torch.nn.Sequential(shared, torch.nn.Dropout(0.3).eval())})
    other.append(shared)
    swap_dropout(module)
    drops = [part for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, torch.nn.Dropout)]
    assert [(type(part), part.p, part.training) for part in drops] == [
        (Dropout, 0.1, True),
        (Dropout, 0.1, True),
        (Dropout, 0.3, False),
    ]
    assert type(other[0]) is torch.nn.Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_per_row_draws_a_mask_for_each_row(dtype: torch.dtype) -> None:
    values = (0.5 + torch.rand(2, 1, 3, 40)).requires_grad_()
    torch.manual_seed(5)
    found = apply_dropout(values, 0.1, 50, dtype)
    torch.manual_seed(5)
    assert torch.equal(apply_dropout(values, 0.1, 50, dtype), found)
    assert (found.shape, found.dtype) == ((2, 50, 3, 40), dtype)
    kept = found != 0
    assert abs(float((~kept).float().mean()) - 26 / 256) < 0.01
    assert len({tuple(row.flatten().tolist()) for row in kept.transpose(0, 1)}) == 50
    expected = (values.detach() * 256 / 230).to(dtype).expand_as(found)
    torch.testing.assert_close(found[kept], expected[kept])
    weights = torch.randn(found.shape).to(dtype)
    (found * weights).sum().backward()
    gradient = torch.where(kept, weights.double(), 0).sum(1, keepdim=True) * 256 / 230
    torch.testing.assert_close(values.grad, gradient.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("block", [1 << 23, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_loss_over_a_vocabulary_is_torchs(
    monkeypatch: pytest.MonkeyPatch, low: bool, block: int, with_bias: bool
) -> None:
    """Blocks of 2 rows of 97 words, the last one short; gradients of both tables and of what is not asked for."""
    monkeypatch.setattr("riptide.retriever.forward.kernels.LOGITS", block)
    torch.manual_seed(0)
    given = [torch.randn(7, 12), torch.randn(97, 12), torch.randn(97)]
    ours = [one.clone().requires_grad_() for one in given]
    theirs = [one.clone().double().requires_grad_() for one in given]
    targets = torch.randint(0, 97, (7,))
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        found = vocabulary_loss(ours[0], ours[1], ours[2] if with_bias else None, targets)
    logits = functional.linear(theirs[0], theirs[1], theirs[2] if with_bias else None)
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    (found * 0.7).backward()
    (expected * 0.7).backward()
    assert found.dtype == torch.float32
    close = {"atol": 5e-2, "rtol": 3e-2} if low else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(found.double(), expected, **close)
    for one, other in zip(ours[: 2 + with_bias], theirs, strict=False):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, **close)


def test_the_loss_without_gradients_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the matrix products: one for the logits, and one more for each of the two gradients."""
    products = []
    real = torch.mm
    monkeypatch.setattr(kernels.torch, "mm", lambda *a, **k: (products.append(1), real(*a, **k))[1])
    hidden, table = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.tensor([1, 1, 8])
    with torch.no_grad():
        loss = vocabulary_loss(hidden, table, None, targets)
    assert len(products) == 1
    products.clear()
    torch.testing.assert_close(vocabulary_loss(hidden, table, None, targets).detach(), loss)
    assert len(products) == 3


def test_the_loss_over_a_frozen_vocabulary_gives_the_states_their_gradient() -> None:
    torch.manual_seed(0)
    hidden, table, targets = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4), torch.tensor([1, 1, 8])
    vocabulary_loss(hidden, table, None, targets).backward()
    expected = torch.autograd.grad(functional.cross_entropy(hidden @ table.t(), targets, reduction="sum"), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)
    with torch.no_grad():
        loss = vocabulary_loss(hidden, table, None, targets)
        torch.testing.assert_close(loss, functional.cross_entropy(hidden @ table.t(), targets, reduction="sum"))
    assert vocabulary_loss(hidden[:0], table, None, targets[:0]) == 0
