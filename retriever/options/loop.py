"""Options of the training loop of any system."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter

OptimizerName = Literal["adamw", "adafactor"]
# Maximum tokens of a worker's chunks for which graphs are kept, by device; larger batches run forward passes twice.
GRAPH_TOKENS = {"cpu": 65_536, "cuda": 131_072}
# Loop options that do not change the result: a run may resume with other values.
HOW = ("checkpoint_every", "checkpoint_minutes", "grad_cache", "zero", "offload")


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions(OptionGroup):
    """Options of the optimizer and its schedule, for any system. None: the default depends on the trained weights."""

    GROUP: ClassVar = "optimisation"

    lr: float | None = option(None, positive=True)
    """Peak learning rate, reached after linear warm-up and decayed linearly to 0. Default: 7e-3 for prompts of a frozen
    backbone (DPTDR), 1e-3 for the networks that compute synthesised prompts (HYPER), prompts per task and prompts of
    topics, 4e-4 for LoRA (Hu et al. 2021, RoBERTa), 2e-5 for fine-tuning and for a re-ranker, 1e-4 for pretraining
    (DPTDR), 1e-3 with --optimizer adafactor. A prompt, or its network, that is trained together with the backbone
    always has 1e-3. A prompt that is trained for a few hundred steps may need a larger rate (0.1 in
    docs/measurements/quality.md): `riptide train-retriever --sweep` compares several."""
    warm_up: float | None = option(None, share=True)
    """Fraction of the steps in which the learning rate rises. Default: 0.1, or 0.04 with sparse vectors (naver/splade:
    6,000 of 150,000 steps)."""
    weight_decay: float | None = option(None, minimum=0)
    """Weight decay. Default: 0.01, or 0 for LoRA, for prompts that are not pretrained, and with --optimizer
    adafactor."""
    clip: float = option(1.0, positive=True)
    """Scale the gradient down to this norm if its norm is larger. Lower it if the loss rises suddenly."""
    optimizer: OptimizerName = "adamw"
    """adafactor: as T5X has it (T5, GTR): updates are scaled by the size of the weights, and a checkpoint holds little
    more than the weights; not with --zero 1 to 3."""
    max_minutes: float | None = option(None, positive=True)
    """Train for at most N minutes, but at least 4 steps. The time starts with the first step, and measurements on the
    dev split count; mining between epochs (--refresh-epochs) does not. The speed of the first steps decides how many
    steps fit, and the learning rate falls to 0 in them; --steps or --epochs is the largest number. The number is kept
    in the checkpoint, so a run that is resumed makes as many steps; one that is repeated from the start may make
    another number. Default: no limit."""
    seed: int = option(0, minimum=0)
    """Seed of the batches, of dropout and of new weights."""
    zero: Literal[0, 1, 2, 3] | None = option(None, group="memory and precision")
    """DeepSpeed's ZeRO stage. Default: plain data parallelism."""
    offload: bool = option(False, group="memory and precision")
    """Keep the optimizer's state in the memory of the CPU (with --zero 1 to 3)."""
    checkpoint_every: int = option(100, group="checkpoints", minimum=1)
    """Steps between two checkpoints. After SIGINT or SIGTERM the job finishes its step, saves a checkpoint and ends;
    `ray job stop` kills a job on Ray before it can."""
    checkpoint_minutes: float = option(5.0, group="checkpoints", minimum=0)
    """Also write a checkpoint after a step if the last one is at least this many minutes old; 0: only every
    --checkpoint-every steps. Increase it if writing a checkpoint takes long."""
    evaluate_every: int = option(100, group="quality during training", minimum=0)
    """Steps between two measurements on the dev split; 0: none."""
    patience: int = option(0, group="quality during training", minimum=0)
    """Stop after N measurements without an improvement; 0: never."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        if self.offload and not self.zero:
            raise InputError(f"{Parameter('offload')}: expected {Parameter('zero', '1')} to 3")
        check_sharding([self.optimizer], self.zero)


@dataclass(frozen=True, kw_only=True)
class ContrastiveOptimisation(OptimisationOptions):
    """Options for systems whose loss is computed over the vectors of the whole batch."""

    GROUP: ClassVar = "optimisation"

    grad_cache: Literal["auto", "on", "off"] = option("auto", group="memory and precision")
    """GradCache (Gao et al. 2021) computes the vectors of a batch twice, which needs less memory. auto: if a worker's
    share of the batch has too many tokens for the intermediate values of all of them to be kept."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions(ContrastiveOptimisation):
    """Resolved options of the training loop. Warm-up and decay default to those of BERT fine-tuning.

    Attributes:
        steps: Number of steps; with max_minutes, the largest one.
        parameter_scale: Adafactor multiplies the learning rate by the RMS of each parameter.
        refresh_every: Steps between two minings of negatives; 0: never.
    """

    steps: int = option(minimum=1)
    lr: float = option()
    warm_up: float = 0.1
    weight_decay: float = 0.01
    parameter_scale: bool = True
    evaluate_every: int = 0
    refresh_every: int = option(0, minimum=0)

    def fingerprint_options(self) -> dict[str, Any]:
        """Returns the options that shape the result, for a fingerprint.

        AdamW and no time limit, the defaults, are not among them.
        """
        options = {name: value for name, value in asdict(self).items() if name not in HOW}
        if self.optimizer == "adamw":
            del options["optimizer"], options["parameter_scale"]
        if self.max_minutes is None:
            del options["max_minutes"]
        return options

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        rising = max(1, round(self.warm_up * self.steps))
        return self.lr * min((step + 1) / rising, (self.steps - step) / max(1, self.steps - rising))


def check_sharding(optimizers: Iterable[str], zero: int | None) -> None:
    """Raises InputError if one of the optimizers does not support this ZeRO stage."""
    if zero and "adafactor" in optimizers:
        raise InputError(
            f"{Parameter('optimizer', 'adafactor')} {Parameter('zero', zero)}: Adafactor needs the rows and columns of "
            f"whole matrices, which stages 1 to 3 split: give {Parameter('zero', '0')}, or leave it out, or "
            f"{Parameter('optimizer', 'adamw')}"
        )
