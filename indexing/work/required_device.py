"""Chooses the device kind of workers that resume an artifact: that of its numerics class."""

from __future__ import annotations

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


def pinned_gpus(numerics: str | None, requested: int | None, place: str) -> int | None:
    """Returns the GPUs per worker: 0 or 1 as the pinned numerics class needs, or `requested` if none is pinned.

    Args:
        numerics: The numerics class of the artifact's parts; None: it has none yet.
        requested: GPUs that the user requests; None: no choice.
        place: The artifact, for the error.

    Raises:
        InputError: If the user requests the other kind of device.
    """
    if numerics is None:
        return requested
    gpus = int(numerics.startswith("cuda "))
    if requested not in (None, gpus):
        raise InputError(
            f"{Parameter('gpus', requested)}: {place} was begun on a {'GPU' if gpus else 'CPU'} (`{numerics}`), and an "
            f"artifact has one numerics class; leave {Parameter('gpus')} out, or give another name"
        )
    return gpus
