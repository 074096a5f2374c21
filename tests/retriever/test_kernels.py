"""The processor's own ways of attention and dropout, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from retriever.kernels import Dropout, attention, swap_dropout


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs_there_and_back(dtype: torch.dtype, close: float, masked: bool) -> None:
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


def test_dropout_drops_scales_and_goes_back_the_same_way() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.1))
    swap_dropout(module)
    [drop] = module
    assert isinstance(drop, Dropout)
    values = torch.ones(1001, 37, requires_grad=True)
    torch.manual_seed(5)
    found = drop(values)
    torch.manual_seed(5)
    assert torch.equal(drop(values), found), "a function of the seed"
    assert not torch.equal(drop(values), found)
    dropped = found == 0
    assert abs(float(dropped.float().mean()) - 26 / 256) < 0.005
    torch.testing.assert_close(found[~dropped], torch.full_like(found[~dropped], 256 / 230))
    found.sum().backward()
    torch.testing.assert_close(values.grad, found.detach())
    module.eval()
    assert drop(values) is values
