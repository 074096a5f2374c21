"""Steppers apply gradients to weights: plain data parallelism in torch, or DeepSpeed's ZeRO.

Both add up the gradients of all workers, clip them and step the optimizer. Their state is saved and loaded as complete
float32 tensors by name, also if several workers each hold a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from riptide.retriever.training.parameter_groups import make_optimizer, moments_of


class Stepper(Protocol):
    """The interface that runs forward and backward passes and optimizer steps.

    Attributes:
        needs_equal_calls: Whether all workers must call `forward` and `backward` equally often.
    """

    needs_equal_calls: bool

    def forward(self, *inputs: Any) -> Any:
        """Runs the model's forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass, which adds the gradients of a loss to those of the step."""

    def step(self, lr: float) -> float:
        """Steps the optimizer, sets gradients to 0, and returns the gradient norm before clipping."""

    def state(self) -> dict[str, torch.Tensor]:
        """Returns float32 tensors on the CPU by name. Every worker must call it.

        They are weight.X, and MOMENT.X for each moment of the optimizer, for example exp_avg.X of AdamW.
        """

    def load(
        self, read_tensor: Callable[[str], torch.Tensor], steps: int, output_sum: Callable[[], torch.Tensor]
    ) -> None:
        """Loads the tensors of `state` after a number of steps. Every worker must call it.

        Args:
            read_tensor: Returns a tensor by its name.
            steps: The number of steps.
            output_sum: Returns a scalar that depends on the outputs of the model.
        """

    def gathered_weights(self) -> AbstractContextManager[object]:
        """Returns a context in which every worker holds all weights, to save the model. Every worker must enter it."""


class PlainStepper:
    """A Stepper whose workers each hold the complete model and optimizer state."""

    needs_equal_calls = False

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        *,
        groups: Sequence[dict[str, Any]],
        parameter_scale: bool,
        clip: float,
        world: int,
    ):
        self.parameters = trained_parameters(module)
        self.run, self.clip, self.world = run, clip, world
        self.moment_names = moments_of(self.parameters, groups)
        adamw = functools.partial(torch.optim.AdamW, fused=True)
        self.optimizer = make_optimizer(groups, parameter_scale=parameter_scale, adamw=adamw)

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> float:
        parameters = list(self.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:  # No chunk of this worker used the parameter.
                parameter.grad = torch.zeros_like(parameter)
        if self.world > 1:
            flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            dist.all_reduce(flat)
            pieces = flat.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip))
        _set_rates(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            for kind, value in (
                ("weight", parameter.detach()),
                *((kind, state[kind]) for kind in self.moment_names[name]),
            ):
                tensors[f"{kind}.{name}"] = value.cpu().contiguous()
        return tensors

    def load(
        self, read_tensor: Callable[[str], torch.Tensor], steps: int, output_sum: Callable[[], torch.Tensor]
    ) -> None:
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                parameter.copy_(read_tensor(f"weight.{name}"))
            moments = {kind: read_tensor(f"{kind}.{name}").to(parameter.device) for kind in self.moment_names[name]}
            # AdamW's fused kernel counts steps in a tensor on the device; Adafactor counts them in Python.
            count = torch.tensor(float(steps), device=parameter.device) if "exp_avg" in moments else steps
            self.optimizer.state[parameter] = {"step": count, **moments}

    def gathered_weights(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


class DeepSpeedStepper:
    """A Stepper over DeepSpeed's engine, which shards the optimizer state (stage 1), gradients (2) and weights (3).

    Stage 0 shards nothing. With `offload`, the optimizer state is in CPU memory (stages 1 to 3).
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        *,
        groups: Sequence[dict[str, Any]],
        parameter_scale: bool,
        clip: float,
        world: int,
        stage: int,
        offload: bool = False,
        device: torch.device,
    ):
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
        import deepspeed

        # DeepSpeed would compile this operator under a lock that a killed worker never releases; gloo replaces it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.stage, self.world = stage, world
        self.needs_equal_calls = stage >= 2 and world > 1
        self.parameters = trained_parameters(module)
        self.moment_names = moments_of(self.parameters, groups)
        adamw = DeepSpeedCPUAdam if offload else torch.optim.AdamW
        optimizer = make_optimizer(groups, parameter_scale=parameter_scale, adamw=adamw)
        if stage == 0:  # DeepSpeed would clip gradients without returning the norm.
            self.clip, self._norm = clip, torch.zeros(())
            optimizer.register_step_pre_hook(self._clip)
        zero: dict[str, Any] = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": clip if stage else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 62,
            "zero_optimization": zero,
        }
        self.engine, *_ = deepspeed.initialize(
            model=_EngineModule(module, run),
            optimizer=optimizer,
            config=config,
            dist_init_required=not dist.is_initialized(),
        )

    def forward(self, *inputs: Any) -> Any:
        return self.engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over workers, whereas chunk losses must be summed.
        self.engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        _set_rates(self.engine.optimizer, lr)
        self.engine.step()
        return float(self.engine.get_global_grad_norm() if self.stage else self._norm)

    def _clip(self, *_: object) -> None:
        self._norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)

    def state(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._link()
        tensors = {}
        for name, parameter in self.parameters.items():
            moments = self.moment_names[name]
            if self.stage == 0:
                values = [parameter.detach(), *(self.engine.optimizer.state[parameter][kind] for kind in moments)]
            else:
                values = [safe_get_full_fp32_param(parameter)]
                values += [safe_get_full_optimizer_state(parameter, kind) for kind in moments]
            for kind, value in zip(("weight", *moments), values, strict=True):
                tensors[f"{kind}.{name}"] = value.detach().float().cpu().contiguous().clone()
        return tensors

    def load(
        self, read_tensor: Callable[[str], torch.Tensor], steps: int, output_sum: Callable[[], torch.Tensor]
    ) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, parameter in self.parameters.items():
            value = read_tensor(f"weight.{name}").to(parameter.device)
            if self.stage == 0:
                with torch.no_grad():
                    parameter.copy_(value)
            else:
                safe_set_full_fp32_param(parameter, value)
        # A step with zero gradients copies the optimizer's weights to the model and creates the optimizer state.
        self.backward(output_sum().float().sum() * 0)
        self.step(0.0)
        self._link()
        optimizer = self.engine.optimizer
        for name, parameter in self.parameters.items():
            for kind in self.moment_names[name]:
                value = read_tensor(f"{kind}.{name}").to(parameter.device)
                if self.stage == 0:
                    optimizer.state[parameter][kind].copy_(value)
                else:
                    safe_set_full_optimizer_state(parameter, value, kind)
        for state in getattr(optimizer, "optimizer", optimizer).state.values():
            state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps

    def gathered_weights(self) -> AbstractContextManager[object]:
        import deepspeed

        if self.stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(list(self.engine.module.parameters()))

    def _link(self) -> None:
        """Links parameters to their optimizer state, which `safe_get_full_optimizer_state` reads.

        In stages 1 and 2, DeepSpeed 0.19 does so once, after the step of the first parameter group, when the others
        have no state yet.
        """
        if link := getattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state", None):
            self.engine.optimizer._hp_optimizer_states_linked = False
            link()


class _EngineModule(nn.Module):
    """The module that DeepSpeed runs: it has the parameters of `module`, and its forward pass is `run`."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]):
        super().__init__()
        self.module = module
        self._run = run

    def forward(self, *inputs: Any) -> Any:
        return self._run(*inputs)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained (not frozen) parameters by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _set_rates(optimizer: Any, lr: float) -> None:
    """Sets the learning rate of each parameter group of an optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
