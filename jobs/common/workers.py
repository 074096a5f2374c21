"""Options for the size of workers."""

from __future__ import annotations

from riptide.jobs.common.cli import Workers, say

from dataclasses import dataclass, replace
from typing import ClassVar

from riptide.indexing.work.tasks import WorkerRequest


@dataclass(frozen=True, kw_only=True)
class SizedWorkers(Workers):
    """Options of a job whose workers use several cores."""

    GROUP: ClassVar = "workers"

    cpus: int | None = None
    """CPU cores per worker, for work that uses several. Default: all cores of this machine. On a cluster: all cores of
    its smallest node, at most 4 for a worker with a GPU; for an encoder on the CPU about 4 with packed batches of
    BERT-family models, otherwise the smallest number with which the encoders of a node fit into its memory."""

    def worker_request(self) -> WorkerRequest:
        """See ClusterJob."""
        return replace(super().worker_request(), cpus=self.cpus)


@dataclass(frozen=True, kw_only=True)
class GpuWorkers(SizedWorkers):
    """Options of a job with a model that may run on GPUs."""

    GROUP: ClassVar = "workers"

    gpus: int | None = None
    """GPUs of a worker with a model, 0 or 1. Default: 1 if there are GPUs when the job begins; a job that is resumed
    uses the kind of device that began it."""

    def worker_request(self) -> WorkerRequest:
        """See ClusterJob."""
        return replace(super().worker_request(), gpus=self.gpus)


def say_line(line: str) -> None:
    """Prints a line of the library for the user of a job."""
    say(line)
