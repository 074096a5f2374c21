"""Compiles a frozen model once for all batch shapes, with warm-up batches of fixed shapes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from riptide.process import native

log = logging.getLogger(__name__)

# Batch shape for compilation: any shape works, but all processes must use the same one.
_WARM_UP = (8, 24)
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Maximum number of compiled models per process. torch counts all models of one class together and stops at 8 by
# default; a process that runs a chain of jobs, or a server whose releases change, opens more.
_MODELS = 1_000


def warm_up_batch(pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch of padding tokens with different lengths: ids int64 [8, 24], lengths int64 [8]."""
    ids = torch.full(_WARM_UP, pad_id, device=device)
    lengths = torch.arange(_WARM_UP[1] - _WARM_UP[0], _WARM_UP[1], device=device) + 1
    return ids, lengths


def compile_model(
    model: nn.Module,
    choice: str,
    device: torch.device,
    dtype: torch.dtype,
    warm_up_batches: Sequence[tuple[object, ...]],
) -> tuple[Callable[..., torch.Tensor], bool]:
    """Compiles a model if the choice, the device and the dtype make that worthwhile.

    Args:
        model: The model.
        choice: "auto" compiles if it makes the model faster, and logs a compiler that fails; "never" does not compile;
            "always" raises if the compiler fails.
        device: The device of the model.
        dtype: The dtype of its weights.
        warm_up_batches: Arguments for each kind of batch that can occur; the result needs no compilation for them.

    Returns:
        The function to call in place of the model, and whether it is compiled.
    """
    is_faster = device.type == "cuda" or dtype == torch.bfloat16
    if choice == "never" or (choice == "auto" and not is_faster):
        return model, False
    compiled: Callable[..., torch.Tensor] = torch.compile(model, dynamic=True, fullgraph=True)
    try:
        warm_up(compiled, warm_up_batches, device)
    except Exception as error:  # The compiler may raise any exception; the model works without it.
        if choice == "always":
            raise
        log.warning("not compiled, so slower: %s", (str(error).strip().splitlines() or [repr(error)])[0])
        return model, False
    return compiled, True


def warm_up(compiled: Callable[..., torch.Tensor], batches: Sequence[tuple[object, ...]], device: torch.device) -> None:
    """Runs the compiled model on one batch of each kind, which compiles the code for it.

    Args:
        compiled: The result of `torch.compile`.
        batches: Arguments for each kind of batch.
        device: The device of the model.
    """
    from torch._dynamo import config as limits
    from torch._inductor import config
    from torch.fx.experimental import _config as shapes

    # torch.compile ignores `freezing` (weights packed once in the CPU's own layout) among its options, so it is patched
    # here. Code for a fixed number of threads would make the output bytes depend on that number.
    settings = config.patch({"freezing": device.type == "cpu", "cpp.dynamic_threads": True})
    # With duck shapes, torch takes dimensions that are equal by chance (8 rows, 8 heads of a prompt) for one dimension.
    # That is wrong for other kinds of batches, and saves guards if there is one kind.
    alike = shapes.patch(use_duck_shape=len(batches) == 1)  # type: ignore[attr-defined]
    many = limits.patch(recompile_limit=_MODELS, accumulated_recompile_limit=_MODELS)
    with torch.no_grad(), settings, alike, many, _private_cache():
        for inputs in batches:
            compiled(*inputs)


def _private_cache() -> contextlib.AbstractContextManager[None]:
    """Context in which torch keeps compiled code in this user's private folder, unless the environment names one.

    The default is a folder of a known name among temporary files, which another user may make first.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    model, flags = native.cpu_info()[1], sorted(native.cpu_info()[0])
    cpu = hashlib.sha256("\0".join((model, *flags)).encode()).hexdigest()[:16]  # nodes may share a home directory
    # torch sets the variable to its default when parts of it are imported.
    named, defaults = os.environ.get(_CACHE_VARIABLE), (None, os.path.abspath(default_cache_dir()))
    if named not in defaults and Path(str(named)).name != f"torch-{cpu}":
        return contextlib.nullcontext()
    folder = native.cache_directory() / f"torch-{cpu}"
    os.environ[_CACHE_VARIABLE] = str(folder)
    return native.checked_libraries(folder)
