"""The interface of a value of the option `loss`: a loss over query vectors and passage vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossFunction:
    """A named loss of judged pairs. Its module imports torch within functions, so that `--help` stays fast.

    Attributes:
        name: The value of the option.
        help: What the loss is, for --help.
        function: Called as `contrastive_loss`; a loss that needs a teacher, as `kl_loss`.
        needs_teacher: Whether it needs the scores of a re-ranker.
        is_symmetric: Whether it is also a loss of passages over the queries of the batch.
    """

    name: str
    help: str
    function: Callable[..., torch.Tensor]
    needs_teacher: bool = False
    is_symmetric: bool = False
