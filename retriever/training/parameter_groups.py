"""Parameter groups with their own settings, and the optimizer that updates all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.base.option_fields import check_values
from riptide.retriever.options.loop import OptimizerName
from riptide.retriever.training.adafactor import Adafactor, moment_shapes

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """A group of a System's parameters with its own settings. None: the setting of the training loop.

    Attributes:
        parameters: The parameters. Those that are frozen are left out.
        lr: Peak learning rate. The schedule is that of the loop.
        lr_factor: The learning rate is multiplied by this.
        weight_decay: Weight decay of the matrices. Vectors do not decay in any group.
        optimizer: "adamw" or "adafactor".
    """

    parameters: Iterable[nn.Parameter]
    lr: float | None = None
    lr_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: OptimizerName | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        rates = [self.lr_factor] if self.lr is None else [self.lr, self.lr_factor]
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        if not all(math.isfinite(rate) and rate > 0 for rate in rates) or not (math.isfinite(decay) and decay >= 0):
            raise InputError(
                f"a parameter group with lr {self.lr}, lr_factor {self.lr_factor} and weight_decay "
                f"{self.weight_decay}: expected rates above 0, and a decay of 0 or more"
            )
        check_values(self)


@runtime_checkable
class GroupedSystem(Protocol):
    """The interface of a System that declares parameter groups; other parameters use the training loop's settings."""

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Returns the groups, which have no parameter in common; every call returns the same groups."""


def split_parameters(
    parameters: Mapping[str, nn.Parameter],
    declared_groups: Sequence[ParameterGroup] = (),
    *,
    optimizer: OptimizerName,
    lr: float,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Returns optimizer groups in torch's form: first the parameters of no declared group, then the declared groups.

    Args:
        parameters: The trained parameters by name.
        declared_groups: Groups with their own settings.
        optimizer: The optimizer of all others.
        lr: Their peak learning rate.
        weight_decay: Their weight decay. Biases and the scales of layer norms do not decay.

    Returns:
        Groups with params, weight_decay, optimizer, and lr_scale, by which the loop's learning rate is multiplied.

    Raises:
        InputError: If a parameter is in two groups, or in none of the model.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    pending = dict.fromkeys(parameters.values())  # A dict serves as a set that keeps its order.
    groups = []
    for group in declared_groups:
        own = [parameter for parameter in dict.fromkeys(group.parameters) if parameter.requires_grad]
        for parameter in own:
            if parameter not in pending:
                problem = f"{names[parameter]} is in two" if parameter in names else "a parameter is not of the model"
                raise InputError(f"parameter groups: {problem}: expected each parameter of the model in one group")
            del pending[parameter]
        decay = weight_decay if group.weight_decay is None else group.weight_decay
        scale = group.lr_factor if group.lr is None else group.lr_factor * group.lr / lr
        groups += _groups_by_dimension(own, decay, group.optimizer or optimizer, scale)
    return [*_groups_by_dimension(list(pending), weight_decay, optimizer, 1.0), *groups]


def _groups_by_dimension(
    parameters: Sequence[nn.Parameter], weight_decay: float, optimizer: OptimizerName, lr_scale: float
) -> list[dict[str, Any]]:
    shared = {"optimizer": optimizer, "lr_scale": lr_scale}
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay, **shared},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, **shared},
    ]
    return [group for group in groups if group["params"]]


def describe_optimizers(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the optimizer; if groups use several, their names with the number of parameters of each."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[group["optimizer"]] = counts.get(group["optimizer"], 0) + len(group["params"])
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count} parameters)" for name, count in sorted(counts.items()))


def moments_of(
    parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, ...]]:
    """Returns the moment names that the optimizer keeps for each parameter, by parameter name."""
    optimizers = {parameter: group["optimizer"] for group in groups for parameter in group["params"]}
    return {
        name: ADAMW_MOMENTS if optimizers[parameter] == "adamw" else tuple(moment_shapes(parameter.shape))
        for name, parameter in parameters.items()
    }


def make_optimizer(
    groups: Sequence[dict[str, Any]],
    *,
    parameter_scale: bool = True,
    adamw: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """Builds one optimizer for the groups of `split_parameters`, with learning rate 0.

    Args:
        groups: The groups, one or more.
        parameter_scale: Adafactor multiplies its updates by the parameter's RMS.
        adamw: Makes AdamW from groups and lr.
    """
    parts: list[torch.optim.Optimizer] = []
    if own := [group for group in groups if group["optimizer"] == "adamw"]:
        parts.append(adamw(own, lr=0.0))
    if own := [group for group in groups if group["optimizer"] == "adafactor"]:
        parts.append(Adafactor(own, lr=0.0, parameter_scale=parameter_scale))
    return parts[0] if len(parts) == 1 else JoinedOptimizer(parts)


class JoinedOptimizer(torch.optim.Optimizer):
    """An optimizer that combines several optimizers; it has the groups and the state of all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Runs a step of each optimizer."""
        assert closure is None
        for part in self.parts:
            part.step()
