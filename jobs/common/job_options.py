"""Options that jobs share: those of every job, of jobs on a cluster, and of jobs with workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from riptide.base.errors import InputError, renamed_parameters
from riptide.base.option_fields import check_values, option
from riptide.base.wording import Parameter
from riptide.indexing.store.model_artifacts import resolve_task
from riptide.indexing.store.store import Store
from riptide.indexing.work.nodes import parse_labels
from riptide.indexing.work.required_device import pinned_gpus
from riptide.indexing.work.worker_tasks import MAX_WORKERS, WorkerRequest
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.printing import say
from riptide.jobs.planning.plan_options import PlanOptions
from riptide.retriever.options import RerankPrecision
from riptide.telemetry.logs import LogFormat

# Options of a whole process: not of a step of a chain, nor of a method.
PROCESS_OPTIONS = ("store", "plan", "cluster", "calibrate", "expect", "log_format", "watch")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every job."""

    GROUP: ClassVar = "every job"
    HELP_FIRST: ClassVar[tuple[str, ...]] = ()  # headings that --help lists first
    # Kinds of artifacts that the job makes; a task is an artifact of kind prompts or models.
    MAKES: ClassVar[tuple[str, ...]] = ()
    NAMED_BY: ClassVar[tuple[str, ...]] = ()  # options that name the made artifact; the first one that is set counts
    # Options that name artifacts or sources of hits, with the kinds of these artifacts.
    READS: ClassVar[Mapping[str, str]] = {}

    store: str = option(metavar="STORE")
    """Where the artifacts are: a local folder, or s3://, gs:// or az://bucket/prefix."""
    plan: bool = False
    """Print what the job would do (parts, rows, bytes, requests, memory, time), and exit."""
    limit: int | None = option(None, minimum=1)
    """Use only the first N rows. N is part of the fingerprint and not of the name: give a limited artifact another
    name or store."""
    log_format: LogFormat = "text"
    """The form of the lines on stderr: text, or json for a system that collects logs: an object per line, with time,
    level, job, submission, artifact, part, node and message. With json, a job also logs each part that it commits, and
    its lines about stages, nodes and retries go to stderr. RIPTIDE_LOG_FORMAT=json does the same."""

    def made_keys(self, label: str) -> list[str]:
        """Returns the keys of the artifacts that the job makes, as far as its options name them.

        Args:
            label: The value of the first of the options NAMED_BY that is set.
        """
        return [f"{kind}/{label}" for kind in self.MAKES]

    def __post_init__(self) -> None:
        """Raises InputError for a value that its field does not allow, and for a text with a NUL character."""
        check_values(self)
        for each in options_by_name(type(self)).values():
            value = each.value(self)
            if isinstance(value, dict):
                value = [piece for pair in value.items() for piece in pair]
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str) and "\0" in text:
                    raise InputError(f"{Parameter(each.name, repr(text))}: expected text without NUL characters")


@dataclass(frozen=True, kw_only=True)
class EstimatedJob(Common):
    """Options of a job whose --plan has an estimate of its work, time and price."""

    estimates: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        """Raises InputError for options of estimates without --plan, too."""
        super().__post_init__()
        if self.estimates.is_used and not self.plan:
            name = next(name for name, value in vars(self.estimates).items() if value)
            raise InputError(f"{Parameter(name)} without {Parameter('plan')}: expected both, as it is for estimates")

    def estimated_as(self, job: str) -> Sequence[tuple[str, EstimatedJob]]:
        """Returns the jobs whose estimates are added to that of this job: itself, or the runs of a sweep.

        Args:
            job: The name of this job, with underscores.
        """
        return [(job, self)]


@dataclass(frozen=True, kw_only=True)
class ClusterJob(Common):
    """Options of a job that may run on the nodes of a cluster."""

    GROUP: ClassVar = "workers"

    wait: int | None = None
    """On a cluster: seconds to wait for the nodes that the job needs; 0: they must be there now. Default: 1800 if the
    head of the cluster has no CPUs, as an autoscaler is then expected to add nodes, else 0."""
    node_label: tuple[str, ...] = option((), metavar="KEY=VALUE")
    """On a cluster: run on nodes with these labels, each as KEY=VALUE; for example, use one kind of several GPUs."""
    ray: bool = False
    """Start a Ray on this machine and run the job on it. Without it, a job runs in this process unless there is a
    cluster: RAY_ADDRESS, a submitted job, or a Ray that runs on this machine."""

    def __post_init__(self) -> None:
        """Raises InputError for impossible settings of workers, also with --plan."""
        super().__post_init__()
        self.worker_request()

    def worker_request(self) -> WorkerRequest:
        """Returns the resources that the options request for the workers. Raises InputError for impossible options."""
        return WorkerRequest(wait_s=self.wait, labels=parse_labels(self.node_label))


@dataclass(frozen=True, kw_only=True)
class Workers(ClusterJob):
    """Options of a job whose work is spread over workers."""

    GROUP: ClassVar = "workers"

    min_workers: int = 1
    """On a cluster: the job needs nodes for N workers; see --wait."""
    max_workers: int = MAX_WORKERS
    """The largest number of workers on a cluster. The job requests nodes for as many of them as it can use, and the
    limits of the cluster bound them too. Without a cluster, a job uses the cores of this machine."""

    def worker_request(self) -> WorkerRequest:
        """Adds the minimum and maximum number of workers to the request of ClusterJob."""
        return replace(super().worker_request(), min_workers=self.min_workers, max_workers=self.max_workers)


@dataclass(frozen=True, kw_only=True)
class SizedWorkers(Workers):
    """Options of a job whose workers use several cores."""

    GROUP: ClassVar = "workers"

    cpus: int | None = None
    """CPU cores per worker, for work that uses several. Default: all cores of this machine. On a cluster: all cores of
    its smallest node, at most 4 for a worker with a GPU; for an encoder on the CPU about 4 with packed batches of
    BERT-family models, otherwise the smallest number with which the encoders of a node fit into its memory."""

    def worker_request(self) -> WorkerRequest:
        """Adds the CPU cores per worker to the request."""
        return replace(super().worker_request(), cpus=self.cpus)


@dataclass(frozen=True, kw_only=True)
class GpuWorkers(SizedWorkers):
    """Options of a job with a model that may run on GPUs."""

    GROUP: ClassVar = "workers"

    gpus: int | None = None
    """GPUs of a worker with a model, 0 or 1. Default: 1 if there are GPUs when the job begins; a job that is resumed
    uses the kind of device that began it."""

    def worker_request(self) -> WorkerRequest:
        """Adds the GPUs per worker to the request."""
        return replace(super().worker_request(), gpus=self.gpus)


@dataclass(frozen=True, kw_only=True)
class RerankWorkers(RerankPrecision, GpuWorkers):
    """Options of a job whose re-ranker may run on GPUs."""

    GROUP: ClassVar = "workers"

    def worker_request(self) -> WorkerRequest:
        """Raises InputError for a GPU with int8, too."""
        with renamed_parameters(dtype="rerank_dtype"):
            pinned_gpus(None, self.gpus, "", self.rerank_dtype)
        return super().worker_request()


def chosen_task(store: Store, name: str | None) -> str | None:
    """Returns the value of --task; for a sweep, the task that the sweep chose, which is also printed."""
    if name is None:
        return None
    task = resolve_task(store, name)
    if task != name:
        say(f"task     {task}, chosen by sweeps/{name.removeprefix('sweeps/')}")
    return task
