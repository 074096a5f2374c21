"""Chooses the device kind of workers: the CPU for int8; to resume an artifact, that of its numerics class."""

from __future__ import annotations

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


def pinned_gpus(numerics: str | None, requested: int | None, place: str, dtype: str = "auto") -> int | None:
    """Returns the GPUs per worker: 0 or 1 as the pinned numerics class needs, or `requested` if none is pinned.

    Args:
        numerics: The numerics class of the artifact's parts; None: it has none yet.
        requested: GPUs that the user requests; None: no choice.
        place: The artifact, for the error.
        dtype: The dtype of the model; int8 needs a CPU.

    Raises:
        InputError: If the user requests the other kind of device.
    """
    if dtype == "int8":
        if requested:
            raise InputError(
                f"{Parameter('gpus', requested)}: {Parameter('dtype', 'int8')} runs on the CPU: leave out "
                f"{Parameter('gpus')}, or use bfloat16"
            )
        return 0
    if numerics is None:
        return requested
    gpus = int(numerics.startswith("cuda "))
    if requested not in (None, gpus):
        raise InputError(
            f"{Parameter('gpus', requested)}: {place} was begun on a {'GPU' if gpus else 'CPU'} (`{numerics}`), and an "
            f"artifact has one numerics class; leave {Parameter('gpus')} out, or give another name"
        )
    return gpus
