"""Estimates jobs one after the other, for which the sizes and models of earlier ones count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.sealed_json import MANIFEST
from riptide.indexing.store.store import Store
from riptide.jobs.planning import calibration
from riptide.jobs.planning.estimate import Estimate, total_line
from riptide.jobs.planning.indexing_estimates import estimate_bm25, estimate_encoding, estimate_import, estimate_index
from riptide.jobs.planning.machine import Machine, read_cluster
from riptide.jobs.planning.models import Model, encoder_options
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.training_estimates import (
    estimate_mining,
    estimate_pretraining,
    estimate_reranker_training,
    estimate_search,
    estimate_training,
)

ESTIMATES: dict[str, Callable[[PlannedJob, Facts], Estimate | None]] = {
    "import_corpus": estimate_import,
    "encode_corpus": estimate_encoding,
    "build_index": estimate_index,
    "build_bm25": estimate_bm25,
    "search": estimate_search,
    "mine_negatives": estimate_mining,
    "train_retriever": estimate_training,
    "tune_prompts": estimate_training,
    "train_reranker": estimate_reranker_training,
    "pretrain_rip": estimate_pretraining,
}
"""The estimate of each job; None: some size is unknown, or nothing is pending."""

MADE_AT_ONCE = frozenset(ESTIMATES) - {"import_corpus", "encode_corpus", "build_index", "build_bm25"}


@dataclass
class Planner:
    """Estimates the jobs of a chain in their order.

    Attributes:
        cluster: The file that describes the machines; None: this machine.
        gpus: The number of GPUs of this machine.
        is_calibrated: Whether this machine is measured first, with each new shape of model.
        facts: What is known of data and models.
        estimates: The estimates so far.
    """

    cluster: str | None = None
    gpus: int = 0
    is_calibrated: bool = False
    facts: Facts = field(default_factory=Facts)
    estimates: list[Estimate] = field(default_factory=list)
    _machine: Machine | None = None

    def __post_init__(self) -> None:
        """Reads the cluster file. Raises InputError for bad ones, or if both a file and a calibration are wanted."""
        if self.cluster is not None and self.is_calibrated:
            raise InputError(
                f"{Parameter('calibrate')} with {Parameter('cluster', self.cluster)}: expected one of them; calibrate "
                "measures this machine"
            )
        if self.cluster is not None:
            self._machine = read_cluster(self.cluster)

    def estimate(self, job: PlannedJob) -> Estimate | None:
        """Estimates a job, and records what it makes for later ones; None: nothing is pending, or a size is unknown."""
        if (function := ESTIMATES.get(job.name)) is None or self._is_complete(job):
            return None
        if (estimate := function(job, self.facts)) is not None:
            self.estimates.append(estimate)
        return estimate

    def _is_complete(self, job: PlannedJob) -> bool:
        """Returns whether a job that makes no generations has made its artifact; then it has nothing to do."""
        if job.name not in MADE_AT_ONCE or not self.facts.models.reads_stores:
            return False
        storage = Store(job.store).storage
        keys = [key.replace("tasks/", "prompts/", 1) for key in job.makes if not key.endswith("/")]
        with contextlib.suppress(InputError, OSError):
            return any(storage.size(f"{key}/{MANIFEST}") is not None for key in keys)
        return False

    def lines(self, job: PlannedJob) -> list[str]:
        """Estimates a job and returns the lines of its plan."""
        if (estimate := self.estimate(job)) is None:
            return []
        model = self._model_of(job)
        notes: list[str] = []
        if self.is_calibrated and model is not None and model.folder is not None:
            notes = self._calibrate(job, model, model.folder)
        machine = self.machine(job.store, model)
        return [*notes, *estimate.lines(machine, is_remote="://" in job.store)]

    def machine(self, store: str, model: Model | None = None) -> Machine:
        """Returns the machine on which a job runs."""
        if self._machine is not None:
            return self._machine
        backbone = None if model is None else model.backbone
        dtype = "auto" if model is None else model.options.dtype
        return calibration.this_machine(Path(store), self.gpus, backbone, dtype)

    def total(self, store: str) -> str:
        """Returns a line with the time and price of all jobs of a chain on a store."""
        return total_line(self.estimates, self.machine(store))

    def _model_of(self, job: PlannedJob) -> Model | None:
        """Returns the model that a job runs; None if it runs none, or of unknown size."""
        name = job.values.get("backbone") or job.values.get("task") or job.values.get("encoder")
        if name is None or job.name not in ESTIMATES:
            return None
        return self.facts.models.find(job.store, name, encoder_options(job.values))

    def _calibrate(self, job: PlannedJob, model: Model, folder: Path) -> list[str]:
        """Measures this machine with a model, once per shape, and returns lines about it."""
        key = calibration.shape_key(model.backbone, model.options.dtype)
        if key in self._measured:
            return []
        self._measured.add(key)
        measured = calibration.calibrate(folder, model.backbone, model.options, self.gpus, Path(job.store))
        rates = measured.models[key]
        load = calibration.describe_load(measured.busy_cores, self.machine(job.store).cores)
        return [
            f"measured {rates.forward_tflops:.2f} TFLOP/s forward, {rates.training_tflops:.2f} in training ({key}); "
            f"kept in {calibration.calibration_file()}",
            *filter(None, [load]),
        ]

    _measured: set[str] = field(default_factory=set)
