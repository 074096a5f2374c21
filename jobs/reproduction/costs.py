"""Estimates the hours of planned steps at a stated rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from riptide.jobs.common.plans import planned_job
from riptide.jobs.common.steps import JobStep
from riptide.jobs.planning.planned_job import Facts
from riptide.jobs.planning.planner import ESTIMATES
from riptide.jobs.reproduction.raw_data import IMPORTS, add_sizes

WITHOUT_MODEL = (*IMPORTS, "build_bm25", "build_index")  # jobs whose time depends on other rates


@dataclass
class Costs:
    """The estimated operations of steps, which must be given in their order.

    A text counts as many tokens as its limit allows. Measurements on dev splits and the work of the CPU do not count.

    Attributes:
        raw: Folder of the raw data.
        tflops: The rate, in 10^12 operations per second.
        operations: The operations of each step by `step_key`; None: unknown, as a size is.
    """

    raw: str
    tflops: float
    operations: dict[str, float | None] = field(default_factory=dict)
    _facts: Facts = field(default_factory=Facts)

    def describe(self, step: JobStep) -> str:
        """Adds a step. Returns its hours as text; "" for a step without a model."""
        add_sizes(self._facts.sizes, step, self.raw)
        if step.job in WITHOUT_MODEL or step.job not in ESTIMATES:
            return ""
        estimate = ESTIMATES[step.job](planned_job(step.job, step.options), self._facts)
        if estimate is None:
            self.operations[step.step_key] = None
            return "unknown time"
        operations = estimate.forward_flops + estimate.training_flops + estimate.exact_flops
        self.operations[step.step_key] = operations
        hours = self.hours(operations)
        return f"{hours:,.1f} h" if hours >= 0.05 else f"{3600 * hours:,.0f} s" if operations else ""

    def hours(self, operations: float) -> float:
        """Returns the hours of a number of operations."""
        return operations / (self.tflops * 1e12) / 3600

    def total(self) -> str:
        """Returns the hours of all steps as text."""
        known = [each for each in self.operations.values() if each is not None]
        unknown = len(self.operations) - len(known)
        more = f", and {unknown} steps of unknown time" if unknown else ""
        return f"{self.hours(sum(known)):,.1f} h of one device at {self.tflops:g} TFLOP/s{more}"
