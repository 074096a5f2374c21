"""Estimates jobs one after the other, for which the sizes and models of earlier ones count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.sealed_json import MANIFEST
from riptide.indexing.store.store import Store
from riptide.jobs.planning import calibration
from riptide.jobs.planning.estimate import NOTHING, Estimate, sum_estimates, total_line
from riptide.jobs.planning.indexing_estimates import (
    estimate_bm25,
    estimate_encoding,
    estimate_import,
    estimate_index,
    estimate_query_import,
    estimate_topics,
)
from riptide.jobs.planning.machine import Machine, read_cluster
from riptide.jobs.planning.models import Model, encoder_options
from riptide.jobs.planning.planned_job import Facts, PlannedJob
from riptide.jobs.planning.search_estimates import (
    estimate_evaluation,
    estimate_mining,
    estimate_search,
    estimate_server,
)
from riptide.jobs.planning.training_estimates import (
    estimate_pretraining,
    estimate_reranker_training,
    estimate_training,
)

ESTIMATES: dict[str, Callable[[PlannedJob, Facts], Estimate | None]] = {
    "import_corpus": estimate_import,
    "import_queries": estimate_query_import,
    "encode_corpus": estimate_encoding,
    "build_index": estimate_index,
    "build_bm25": estimate_bm25,
    "fit_topics": estimate_topics,
    "search": estimate_search,
    "evaluate": estimate_evaluation,
    "mine_negatives": estimate_mining,
    "train_retriever": estimate_training,
    "train_reranker": estimate_reranker_training,
    "pretrain_rip": estimate_pretraining,
    "serve_search": estimate_server,
}
"""The estimate of each job: NOTHING if nothing is pending, None if a size is unknown."""

MADE_AT_ONCE = ("import_queries", "search", "mine_negatives", "train_retriever", "train_reranker", "pretrain_rip")
UNKNOWN = (
    "time     unknown, as a size of its data or of its model is: plan it again when its inputs exist, or give "
    f"{Parameter('expect')}"
)


@dataclass
class Planner:
    """Estimates the jobs of a chain in their order.

    Attributes:
        cluster: The file that describes the machines; None: this machine.
        gpus: The number of GPUs of this machine.
        is_calibrated: Whether this machine is measured first, with each new shape of model.
        facts: What is known of data and models.
        planned: The estimates so far, each with its machine.
        num_unknown: The number of jobs whose estimate is unknown.
        measured: The shapes of models with which this machine was measured.
    """

    cluster: str | None = None
    gpus: int = 0
    is_calibrated: bool = False
    facts: Facts = field(default_factory=Facts)
    planned: list[tuple[Estimate, Machine]] = field(default_factory=list)
    num_unknown: int = 0
    measured: set[str] = field(default_factory=set)
    _machine: Machine | None = None
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Reads the cluster file. Raises InputError for bad ones, or if both a file and a calibration are wanted."""
        if self.cluster is not None and self.is_calibrated:
            raise InputError(
                f"{Parameter('calibrate')} with {Parameter('cluster', self.cluster)}: expected one of them; calibrate "
                "measures this machine"
            )
        if self.cluster is not None:
            self._machine = read_cluster(self.cluster)
        self.facts.has_gpus = bool(self.gpus if self._machine is None else self._machine.gpus)

    def estimate(self, jobs: Sequence[PlannedJob]) -> Estimate | None:
        """Estimates a job, and records what it makes for later ones.

        Args:
            jobs: The job, or the jobs of which it consists, such as the runs of a sweep.

        Returns:
            The estimate; NOTHING if nothing is pending, None if a size is unknown.
        """
        estimates = [self._estimate_one(job) for job in jobs]
        known = [each for each in estimates if each is not None]
        pending = [each for each in known if each is not NOTHING]
        if len(known) < len(estimates):
            self.num_unknown += 1
            return None
        return sum_estimates(pending) if pending else NOTHING

    def _estimate_one(self, job: PlannedJob) -> Estimate | None:
        """Estimates one job, and records the bytes that it makes."""
        if job.name not in ESTIMATES or self._is_complete(job):
            return NOTHING
        estimate = ESTIMATES[job.name](job, self.facts)
        if estimate is not None and estimate is not NOTHING:
            keys = [key for key in job.makes if not key.endswith("/")]  # others have a default name
            self.facts.sizes.made_bytes |= {(job.store, key): estimate.written_bytes for key in keys}
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

    def plan(self, jobs: Sequence[PlannedJob]) -> Estimate | None:
        """Estimates a job, and adds it to the chain with its machine, which is measured first if that is wanted.

        Arguments and returns: those of `estimate`.
        """
        estimate = self.estimate(jobs)
        if estimate is not None and estimate is not NOTHING:
            model = self._model_of(jobs[0])
            if self.is_calibrated and model is not None and model.folder is not None:
                self._calibrate(jobs[0], model, model.folder)
            self.planned.append((estimate, self.machine(jobs[0].store, model)))
        return estimate

    def lines(self, jobs: Sequence[PlannedJob]) -> list[str]:
        """Estimates a job and returns the lines of its plan."""
        estimate = self.plan(jobs)
        if estimate is None:
            return [UNKNOWN]
        if estimate is NOTHING:
            return []
        lines = estimate.lines(self.planned[-1][1], is_remote="://" in jobs[0].store)
        return [*self.take_notes(), *lines]

    def take_notes(self) -> list[str]:
        """Returns the lines about measurements of this machine since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def machine(self, store: str, model: Model | None = None) -> Machine:
        """Returns the machine on which a job runs."""
        if self._machine is not None:
            return self._machine
        backbone = None if model is None else model.backbone
        dtype = "auto" if model is None else model.options.dtype
        return calibration.this_machine(Path(store), self.gpus, backbone, dtype)

    def total(self) -> list[str]:
        """Returns a line with the time and price of all jobs of a chain; none if no job is pending."""
        return [total_line(self.planned, self.num_unknown)] if self.planned else []

    def _model_of(self, job: PlannedJob) -> Model | None:
        """Returns the model that a job runs; None if it runs none, or of unknown size."""
        name = job.values.get("backbone") or job.values.get("task") or job.values.get("encoder")
        if name is None or job.name not in ESTIMATES:
            return None
        return self.facts.models.find(job.store, name, encoder_options(job.values))

    def _calibrate(self, job: PlannedJob, model: Model, folder: Path) -> None:
        """Measures this machine with a model, once per shape, and notes lines about it."""
        key = calibration.shape_key(model.backbone, model.options.dtype)
        if key in self.measured:
            return
        self.measured.add(key)
        measured = calibration.calibrate(folder, model.backbone, model.options, self.gpus, Path(job.store))
        rates = measured.models[key]
        load = calibration.describe_load(measured.busy_cores, self.machine(job.store).cores)
        self._notes += [
            f"measured {rates.forward_tflops:.2f} TFLOP/s forward, {rates.training_tflops:.2f} in training ({key}); "
            f"kept in {calibration.calibration_file()}",
            *filter(None, [load]),
        ]
