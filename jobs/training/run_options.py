"""Options that all training jobs share: steps, workers, checkpoints, and evaluation during training."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from riptide.base.errors import InputError
from riptide.base.option_fields import TextForm, option
from riptide.base.wording import Parameter
from riptide.indexing.work.local_runner import cores_of_process
from riptide.jobs.common.job_options import ClusterJob, EstimatedJob
from riptide.jobs.common.session import find_cluster
from riptide.retriever.options import Precision
from riptide.retriever.options.loop import LoopOptions, OptimisationOptions

ADAFACTOR_LR = 1e-3  # learning rate of T5 and GTR; Adafactor multiplies it by the RMS of each parameter


class DevPool(TextForm):
    """The pool in which the queries of a dev split are searched: N, hard:N or N+hard:N.

    The first N counts the relevant passages and random others; the second one counts hits of BM25 per query.
    """

    METAVAR = "N|[N+]hard:N"
    EXPECTED = "a number of passages, hard:N or N+hard:N, each number at least 1"
    PYTHON_TYPE = "int | str"
    _FORM: ClassVar = re.compile(r"(?P<size>[1-9][0-9]{0,17})?(?:(?(size)\+)hard:(?P<hits>[1-9][0-9]{0,17}))?")
    _DEFAULT_SIZE: ClassVar = 2000

    def __new__(cls, text: str | int) -> Self:
        """Returns the pool. Raises ValueError for a text of another form."""
        if not text or cls._FORM.fullmatch(str(text)) is None:
            raise ValueError(text)
        return super().__new__(cls, str(text))

    @property
    def size(self) -> int:
        """The number of relevant passages and random others."""
        return int(self._number("size") or self._DEFAULT_SIZE)

    @property
    def hits_per_query(self) -> int:
        """The number of hits of BM25 for each query; 0: none."""
        return int(self._number("hits") or 0)

    def _number(self, name: str) -> str | None:
        form = self._FORM.fullmatch(self)
        assert form is not None
        return form[name]


@dataclass(frozen=True, kw_only=True)
class Training(ClusterJob, EstimatedJob):
    """Options of all training jobs."""

    GROUP: ClassVar = "optimisation"

    epochs: float = option(1.0, positive=True)
    """Number of passes over the queries or passages."""
    steps: int | None = option(None, minimum=1)
    """Number of steps; overrides --epochs."""
    loop: OptimisationOptions = field(default_factory=OptimisationOptions)
    dev_split: str | None = option(None, group="quality during training")
    """Measure MRR@10 on this split of the query set during training, and keep the best weights."""
    dev_limit: int | None = option(500, group="quality during training", minimum=1)
    """Use the first N queries of the dev split."""
    dev_passages: DevPool = option(DevPool(2000), group="quality during training")
    """The passages in which the queries of the dev split are searched. N: their relevant ones, and random others up to
    N passages; N+hard:K: these, and the first K hits of BM25 for each query, which are harder to tell from the relevant
    ones; hard:K: 2000+hard:K. Hits need a BM25 index (`riptide build-bm25`)."""
    curves: str | None = option(None, group="quality during training")
    """Write TensorBoard events to this folder during training, and a picture at the end."""
    workers: int = option(1, group="workers", minimum=1)
    """Number of workers. One worker trains in this process unless there is a Ray cluster; several run on Ray, which is
    started on this machine if there is no cluster."""
    cpus: int | None = option(None, group="workers", minimum=1)
    """CPU cores per worker. Default: 2, or 1 without Ray on a machine with one core. The numbers of workers and of
    cores decide how sums are rounded, so both shape the result."""
    gpus: Literal[0, 1] | None = option(None, group="workers")
    """GPUs per worker. Default: 1 if there is one for each worker, or for --min-workers; otherwise 0."""
    min_workers: int | None = option(None, group="workers", minimum=1)
    """Continue with at least N workers, on the same batches, if the cluster loses nodes. Default: --workers."""
    dtype: Precision = option("auto", group="memory and precision")
    """Precision of the forward and backward pass; auto: bfloat16 if the device multiplies it, otherwise float32."""
    checkpointing: bool = option(False, group="memory and precision")
    """Activation checkpointing: recompute activations in the backward pass, which needs less memory and more time."""

    def __post_init__(self) -> None:
        """Raises InputError if an option is out of range or options contradict each other."""
        super().__post_init__()
        if self.rows_per_step < self.workers:
            raise InputError(
                f"{Parameter('workers', self.workers)} {Parameter('batch', self.rows_per_step)}: expected a row of "
                f"the batch for each worker"
            )
        if self.loop.patience and not self.steps_per_evaluation:
            raise InputError(
                f"{Parameter('patience', self.loop.patience)}: expected {Parameter('dev_split')} too, which measures "
                f"quality, and {Parameter('evaluate_every')}"
            )
        if self.dev_passages.hits_per_query and self.dev_split is None:
            raise InputError(
                f"{Parameter('dev_passages', self.dev_passages)}: expected {Parameter('dev_split')} too, whose queries "
                "have the hits"
            )
        if self.curves and "://" in self.curves:
            raise InputError(f"{Parameter('curves', self.curves)}: expected a folder that this machine sees")
        if self.min_workers is not None and self.min_workers > self.workers:
            raise InputError(
                f"{Parameter('min_workers', self.min_workers)}: expected 1 to {Parameter('workers', self.workers)}"
            )
        if self.frozen_by and (self.loop.zero or 0) >= 2:
            raise InputError(
                f"{Parameter('zero', self.loop.zero)} {self.frozen_by}: stages 2 and 3 are for training the backbone, "
                "which is frozen: give 0 or 1"
            )

    @property
    def worker_cpus(self) -> int:
        """The CPU cores per worker: --cpus, or its default."""
        if self.cpus is not None:
            return self.cpus
        is_on_ray = find_cluster(private=self.ray or self.workers > 1) is not None
        return 2 if is_on_ray else min(2, cores_of_process())

    @property
    def rows_per_step(self) -> int:
        """The training examples per step: queries, or passages in pretraining."""
        raise NotImplementedError

    @property
    def frozen_by(self) -> str:
        """The option that freezes the weights of the backbone; "" if the weights are trained."""
        return ""

    @property
    def steps_per_evaluation(self) -> int:
        """The number of steps between two evaluations on the dev split; 0: no evaluation."""
        return self.loop.evaluate_every if self.dev_split else 0

    def count_steps(self, rows: int, batch: int) -> int:
        """Returns the number of steps: --steps, or the steps of --epochs over `rows` examples in batches."""
        return math.ceil(self.epochs * rows / batch) if self.steps is None else self.steps

    def describe_steps(self, steps: int) -> str:
        """Formats the number of steps of a run for its plan."""
        if self.loop.max_minutes is None:
            return f"{steps:,}"
        return f"at most {steps:,}, as many as take {Parameter('max_minutes', f'{self.loop.max_minutes:g}')},"

    def loop_options(
        self, steps: int, *, lr: float, warm_up: float = 0.1, weight_decay: float = 0.01, refresh_every: int = 0
    ) -> LoopOptions:
        """Returns the options of the training loop. Defaults of Adafactor are those of T5X.

        Args:
            steps: Number of steps.
            lr: The default with AdamW.
            warm_up: The default.
            weight_decay: The default with AdamW.
            refresh_every: Steps between two minings of negatives; 0: never.
        """
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        if self.loop.optimizer == "adafactor":
            defaults = {"lr": ADAFACTOR_LR, "weight_decay": 0.0}
        values = {name: value for name, value in vars(self.loop).items() if value is not None}
        fixed = {"steps": steps, "evaluate_every": self.steps_per_evaluation, "refresh_every": refresh_every}
        return LoopOptions(**{"warm_up": warm_up, **defaults, **values, **fixed})

    def checkpoint_bytes(self, weights: int) -> int:
        """Returns about the bytes of a checkpoint: trained weights (`weights` bytes) and the optimizer's moments."""
        return 3 * weights if self.loop.optimizer == "adamw" else weights

    def dev_config(self) -> dict[str, Any] | None:
        """Returns the settings of the dev split that affect which weights are the best; None without --dev-split."""
        if self.dev_split is None:
            return None
        pool = self.dev_passages
        hard = {"hard": pool.hits_per_query} if pool.hits_per_query else {}
        return {"split": self.dev_split, "limit": self.dev_limit, "passages": pool.size, **hard}

    def describe_dev(self, num_queries: int) -> str:
        """Returns the line of the plan that describes the dev split, of which `num_queries` queries are used."""
        pool = self.dev_passages
        hits = f", and the first {pool.hits_per_query:,} hits of BM25 for each" if pool.hits_per_query else ""
        return (
            f"dev       {num_queries:,} queries of {self.dev_split} in {pool.size:,} passages, relevant ones and "
            f"random others{hits}"
        )

    def length_advice(self, noun: str) -> str:
        """Returns the advice how to raise the length limit for a kind of texts (`riptide.base.cuts.NOUNS`)."""
        return f"give a larger {Parameter('max_length')} under another {Parameter('name')}"
