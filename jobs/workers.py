"""Options for the size of workers, and the request that the options of a job make."""

from __future__ import annotations

from jobs.cli import Workers, as_options, say

from dataclasses import dataclass

from indexing.work.nodes import parse_labels
from indexing.work.tasks import WorkerRequest


@dataclass(frozen=True, kw_only=True)
class SizedWorkers(Workers):
    """Options of a job whose workers use several cores."""

    cpus: int | None = None
    """Cores of a worker that uses several. Default: all of this machine; on a cluster they are chosen when the first
    node is there: all of the smallest node, at most 4 with a GPU; of an encoder on the CPU about 4 (packed batches of
    BERT-family models), or as few as memory allows."""


@dataclass(frozen=True, kw_only=True)
class GpuWorkers(SizedWorkers):
    """Options of a job with a model that may run on GPUs."""

    gpus: int | None = None
    """GPUs of a worker with a model, 0 or 1. Default: 1 if there are GPUs when the job begins; a job that is resumed
    uses the kind of device that began it."""


def worker_request(options: Workers) -> WorkerRequest:
    """Returns what the options request of the workers. Raises InputError for impossible ones."""
    return WorkerRequest(
        min_workers=options.min_workers,
        max_workers=options.max_workers,
        cpus=options.cpus if isinstance(options, SizedWorkers) else None,
        gpus=options.gpus if isinstance(options, GpuWorkers) else None,
        wait_s=options.wait,
        labels=parse_labels(options.node_label),
    )


def say_line(line: str) -> None:
    """Prints a line of the library for the user of a job."""
    say(as_options(line))
