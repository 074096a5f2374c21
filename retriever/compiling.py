"""Compiled code for a frozen model: made once, for all shapes, with a batch of one fixed shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

log = logging.getLogger(__name__)

# What compiled code is made for; any fixed shape will do, as long as every process takes the same.
_WARM_UP = (8, 24)


def warm_up_batch(pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding of every length: ids int64 [8, 24], lengths int64 [8]."""
    ids = torch.full(_WARM_UP, pad_id, device=device)
    lengths = torch.arange(_WARM_UP[1] - _WARM_UP[0], _WARM_UP[1], device=device) + 1
    return ids, lengths


def compile_model(
    model: nn.Module,
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    warm_ups: Sequence[tuple[object, ...]],
) -> tuple[Callable[..., torch.Tensor], bool]:
    """What to run, and whether it is compiled: run once with each of `warm_ups`, it is ready for all that come.

    asked: "auto" (where it pays; a compiler that fails is logged), "never", or "always" (a failure is raised).
    """
    pays = device.type == "cuda" or dtype == torch.bfloat16
    if asked == "never" or (asked == "auto" and not pays):
        return model, False
    from torch._inductor import config
    from torch.fx.experimental import _config as shapes

    compiled: Callable[..., torch.Tensor] = torch.compile(model, dynamic=True, fullgraph=True)
    try:
        # Freezing (weights packed once, in the processor's own order) is left out when given as an option of
        # torch.compile; code that fixes the number of threads would tie the bytes to it.
        freezing = device.type == "cpu"
        # Dimensions that are alike by chance (a batch of 8, and 8 heads of a prompt) are not the same one.
        alike = shapes.patch(use_duck_shape=len(warm_ups) == 1)  # type: ignore[attr-defined]
        with torch.no_grad(), config.patch({"freezing": freezing, "cpp.dynamic_threads": True}), alike:
            for inputs in warm_ups:
                compiled(*inputs)
    except Exception as error:  # whatever the compiler stumbles over: eager is always right
        if asked == "always":
            raise
        log.warning("not compiled, so slower: %s", (str(error).strip().splitlines() or [repr(error)])[0])
        return model, False
    return compiled, True
