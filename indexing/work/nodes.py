"""Counts the workers that the nodes of a Ray cluster can hold, and waits for nodes."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from riptide.base.errors import BusyStorageError, InputError, StorageError
from riptide.base.wording import Parameter
from riptide.indexing.work.measured_worker import open_measured
from riptide.indexing.work.polling import call_repeatedly
from riptide.indexing.work.visibility import StoreMarker
from riptide.indexing.work.worker_tasks import Allocation, Report, WorkerRequest, WorkerTask, ignore_progress
from riptide.telemetry.phases import Phase, add_measures

HEAD = "node:__internal_head__"  # a resource that Ray gives only to the head of a cluster
NODE_ID = "ray.io/node-id"  # the label in which Ray stores the id of a node
LABEL_PATTERN = re.compile(r"([^=\s]+)=([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)", re.ASCII)
WAIT_S = 30.0  # seconds between two lines about workers that wait for nodes
LOST_NODE_CHECK_S = 5.0  # seconds between two checks for lost nodes
ENDED_IDLE = 4  # Ray's death reason of a node that the autoscaler ended because it was idle
POLL_S = 0.5  # seconds between two polls of the nodes while a job waits for them
GROWTH_S = 1_800.0  # default seconds to wait for nodes that an autoscaler adds
STARTING_S = 10.0  # maximum seconds that actors may take to start before they are killed
INFEASIBLE_S = 30.0  # seconds for which an autoscaler must report a worker as infeasible before a job ends
MAX_EXCLUDED = 3  # maximum number of nodes that a run excludes after failures

Say = Callable[[str], object]
"""Prints a line for the user."""


@dataclass(frozen=True)
class Reports:
    """What a run on a cluster reports to the program that started it.

    Attributes:
        say: Prints a line for the user, about workers that wait for nodes, and nodes that are excluded or lost.
        waiting_workers: Receives the number of workers that wait for a node, while some may.
    """

    say: Say = ignore_progress
    waiting_workers: Report = ignore_progress


NO_REPORTS = Reports()


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Parses labels of the form KEY=VALUE. Raises InputError for any other form."""
    labels: dict[str, str] = {}
    for text in texts:
        match = LABEL_PATTERN.fullmatch(text)
        if match is None:
            raise InputError(f"{Parameter('node_label', repr(text))}: expected KEY=VALUE, for example node-type=gpu")
        labels[match[1]] = match[2]
    return labels


@dataclass(frozen=True)
class ClusterNodes:
    """The nodes of the cluster on which a job may run: all with the labels, except for the excluded ones.

    Attributes:
        labels: Labels that they must have.
        excluded: Ids of nodes that are excluded.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()

    @property
    def selector(self) -> dict[str, str]:
        """Ray's `label_selector` that restricts tasks and actors to these nodes."""
        return dict(self.labels) | ({NODE_ID: f"!in({','.join(self.excluded)})"} if self.excluded else {})

    def live_resources(self) -> list[Mapping[str, float]]:
        """Returns the resources of each of these nodes that is alive and has CPUs."""
        nodes = [
            node["Resources"]
            for node in live_nodes()
            if node.get("NodeID") not in self.excluded and self.labels.items() <= node.get("Labels", {}).items()
        ]
        return [node for node in nodes if node.get("CPU", 0) >= 1]

    def resources_for(self, gpus: int) -> list[Mapping[str, float]]:
        """Returns the resources of each live node for workers with `gpus` GPUs.

        Work without GPUs counts the nodes without GPUs; if all nodes have GPUs, it counts all of them.
        """
        nodes = self.live_resources()
        if gpus:
            return [node for node in nodes if node.get("GPU", 0) >= gpus]
        return [node for node in nodes if not node.get("GPU", 0)] or nodes

    def cores_of_smallest(self, gpus: int = 0) -> int:
        """Returns the number of cores of the smallest node for workers with `gpus` GPUs; 0 if there is no such node."""
        return int(min((node["CPU"] for node in self.resources_for(gpus)), default=0))

    def num_gpus(self) -> int:
        """Returns the current total number of GPUs of the nodes."""
        return int(sum(node.get("GPU", 0) for node in self.live_resources()))

    def count_worker_slots(self, cores: int, gpus: int = 0) -> int:
        """Returns the number of workers of this size that the nodes can hold at once."""
        places = 0
        for node in self.live_resources():
            by_cores = int(node["CPU"] // cores)
            places += min(by_cores, int(node.get("GPU", 0) // gpus)) if gpus else by_cores
        return places


def live_nodes() -> list[dict[str, Any]]:
    """Returns the entries of `ray.nodes()` of live nodes."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def may_nodes_be_added() -> bool:
    """Returns whether an autoscaler may add nodes.

    Ray does not report whether a cluster has an autoscaler. A cluster whose head has no CPUs is assumed to have one, as
    in the cluster files of this project: only other nodes can run work.
    """
    heads = [node["Resources"] for node in live_nodes() if HEAD in node["Resources"]]
    return bool(heads) and not any(head.get("CPU", 0) for head in heads)


def seconds_to_wait(wait_s: float | None) -> float:
    """Returns `wait_s`; if it is None, GROWTH_S if an autoscaler may add nodes, otherwise 0."""
    return GROWTH_S * may_nodes_be_added() if wait_s is None else wait_s


class Autoscaler:
    """A client that asks Ray's autoscaler (version 2) about pending workers; Ray has no public function for this."""

    def __init__(self) -> None:
        self._client: Any = None

    def is_infeasible(self, nodes: ClusterNodes, cores: int, gpus: int) -> bool:
        """Returns whether the autoscaler reports pending workers of this size and with these labels as infeasible.

        It reports workers as infeasible that no type of node holds, and those that exceed the limits of the cluster; so
        no node may be on its way.
        """
        import ray
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

        reply = GetClusterStatusReply()
        try:
            self._client = self._client or GcsClient(ray.get_runtime_context().gcs_address)
            reply.ParseFromString(self._client.get_cluster_status(timeout_s=10))
        except ray.exceptions.RayError:  # the head is busy or restarts; the job keeps waiting
            self._client = None
            return False
        state = reply.autoscaling_state
        if state.pending_instance_requests or state.pending_instances:
            return False
        wanted = cores, gpus, {key: [value] for key, value in nodes.labels.items()}
        return any(
            (request.resources_bundle.get("CPU", 0), request.resources_bundle.get("GPU", 0), _required_labels(request))
            == wanted
            for request in state.infeasible_resource_requests
        )


def _required_labels(request: Any) -> dict[str, list[str]]:
    """Returns the labels that a resource request requires, each with its allowed values."""
    from ray.core.generated.common_pb2 import LabelSelectorOperator

    return {
        constraint.label_key: list(constraint.label_values)
        for selector in request.label_selectors
        for constraint in selector.label_constraints
        if constraint.operator == LabelSelectorOperator.LABEL_OPERATOR_IN
    }


def wait_for_room(nodes: ClusterNodes, cores: int, gpus: int, workers: int, wait_s: float | None) -> float:
    """Waits until the nodes have room for all workers, or until the maximum waiting time has passed.

    It requests no nodes: the caller has pending tasks or actors, which make an autoscaler add them.

    Args:
        nodes: The nodes.
        cores, gpus: The size of a worker.
        workers: The number of workers.
        wait_s: Maximum seconds; None: as `seconds_to_wait` says, and less if no node can hold a worker.

    Returns:
        The maximum.

    Raises:
        InputError: If `wait_s` is None and the autoscaler has reported the worker as infeasible for INFEASIBLE_S.
    """
    autoscaler = Autoscaler()
    begun = last_feasible_s = time.monotonic()
    maximum = seconds_to_wait(wait_s)
    while (present := nodes.count_worker_slots(cores, gpus)) < workers and time.monotonic() < begun + maximum:
        time.sleep(POLL_S)
        if wait_s is not None or present or not autoscaler.is_infeasible(nodes, cores, gpus):
            last_feasible_s = time.monotonic()
        elif time.monotonic() > last_feasible_s + INFEASIBLE_S:
            raise InputError(_infeasible_message(nodes, cores, gpus))
    return maximum


def _infeasible_message(nodes: ClusterNodes, cores: int, gpus: int) -> str:
    """Returns the error message for an infeasible worker, with all resources and labels that its node needs."""
    labels = [f"{key}={value}" for key, value in nodes.labels.items()]
    needs = [Parameter("cpus", cores), *[Parameter("gpus", gpus)] * bool(gpus)]
    needs += [Parameter("node_label", label) for label in labels]
    where = f" with {' '.join(labels)}" if labels else ""
    largest = max((node["CPU"] for node in nodes.live_resources()), default=0)
    shown = f"; the largest node that is there has {_count_noun(largest, 'CPU')}" if largest else ""
    return (
        f"{', '.join(f'{need}' for need in needs)}: the autoscaler starts no node{where} for "
        f"{describe_workers(1, cores, gpus)}, as no type of node has all of this or its limits are reached{shown}: "
        f"request less, add such a type, or give {Parameter('wait', 'SECONDS')} to wait for it"
    )


def wait_for_required_room(nodes: ClusterNodes, cores: int, gpus: int, workers: int, request: WorkerRequest) -> None:
    """Waits for room for the workers for at most the requested time, then raises as `check_room` if there is none."""
    with Phase("wait"):
        wait_s = wait_for_room(nodes, cores, gpus, workers, request.wait_s)
    check_room(nodes, cores, gpus, workers, wait_s, Parameter("min_workers", request.min_workers))


def check_room(nodes: ClusterNodes, cores: int, gpus: int, workers: int, waited_s: float, option: Parameter) -> None:
    """Raises InputError if the nodes have no room for all workers.

    Args:
        nodes: The nodes.
        cores, gpus: The size of a worker.
        workers: The number of workers.
        waited_s: Seconds that the job has waited for room.
        option: The parameter that sets the number of workers, with its value.

    Raises:
        InputError: If there is no room: no node has the labels, a worker is larger than every node, or there are too
            few nodes.
    """
    present = nodes.count_worker_slots(cores, gpus)
    if present >= workers:
        return
    waited = f", after {waited_s:,.0f} s" if waited_s else ""
    more = f"; {Parameter('wait', 'SECONDS')} waits for more nodes"
    live = nodes.live_resources()
    if not live and nodes.labels and (others := live_nodes()):
        known = sorted({f"{key}={value}" for node in others for key, value in _user_labels(node).items()})
        labels_text = " ".join(f"{key}={value}" for key, value in nodes.labels.items())
        have = f"the labels of the nodes are {', '.join(known)}" if known else "the nodes have no labels"
        raise InputError(f"{Parameter('node_label', labels_text)}: no node has it{waited}; {have}")
    if live and not present:
        fitting = [node["CPU"] for node in live if node.get("GPU", 0) >= gpus]
        if not fitting:
            raise InputError(f"{Parameter('gpus', gpus)}: expected nodes with GPUs, there are none{waited}{more}")
        limit_text = f"the cores of the largest node{' with a GPU' * bool(gpus)}"
        raise InputError(f"{Parameter('cpus', cores)}: expected at most {max(fitting):.0f}, {limit_text}{waited}")
    total = {kind: sum(node.get(kind, 0) for node in live) for kind in ("CPU", "GPU")}
    raise InputError(
        f"{option}: the nodes have {describe_resources(total)}, room for {present} of "
        f"{describe_workers(workers, cores, gpus)}{waited}{more}"
    )


def _user_labels(node: Mapping[str, Any]) -> dict[str, str]:
    """Returns the labels of a node except for those that Ray sets."""
    return {key: value for key, value in node.get("Labels", {}).items() if not key.startswith("ray.io/")}


def wait_for_nodes(
    nodes: ClusterNodes, reports: Reports, request: WorkerRequest, cores: int = 1, gpus: int = 0, count: int = 1
) -> None:
    """Waits until there is room for min(`min_workers`, `count`) workers, and prints a line while it waits.

    Args:
        nodes: The nodes.
        reports: Receives lines and numbers about waiting workers.
        request: What the user requests.
        cores, gpus: The size of a worker.
        count: Number of workers that the job can use.

    Raises:
        InputError: If too few nodes come; see `check_room`.
    """
    needed = min(count, request.min_workers)
    if nodes.count_worker_slots(cores, gpus) >= needed:
        return
    with (
        StartedActors(WaitForNodes, nodes, cores, gpus, count),
        announce_waiting_workers(reports, lambda: nodes, cores, gpus, lambda: count),
    ):
        wait_for_required_room(nodes, cores, gpus, needed, request)


class WaitForNodes:
    """An actor that only occupies the resources of a worker."""


class StartedActors:
    """Actors, which live until `end` is called, or until nothing refers to them.

    All actors are requested at once, so an autoscaler adds the nodes for all of them together. They are actors because
    Ray tasks cannot be cancelled safely: Ray 2.60 aborts the process if the task ends at this moment.

    Used as a context manager, it ends the actors at the end of the block.

    Args:
        kind: The class of the actors; Ray's dashboard shows its name.
        nodes: The nodes on which they may run.
        cores, gpus: What each of them takes.
        count: Number of actors.
    """

    def __init__(self, kind: type, nodes: ClusterNodes, cores: int, gpus: int, count: int) -> None:
        import ray

        actor_class = ray.remote(num_cpus=cores, num_gpus=gpus, label_selector=nodes.selector)(kind)
        self.handles = [actor_class.remote() for _ in range(count)]
        self._started = [actor.__ray_ready__.remote() for actor in self.handles]
        self._count_slots = functools.partial(nodes.count_worker_slots, cores, gpus)

    def end(self) -> None:
        """Kills the actors, also if it is called again; those that are starting first have STARTING_S to start.

        Ray 2.60 sometimes never frees the resources of an actor that is killed while it starts.
        """
        import ray

        try:
            if starting := min(len(self.handles), self._count_slots()):
                ray.wait(self._started, num_returns=starting, timeout=STARTING_S)
        finally:
            while self.handles:
                ray.kill(self.handles.pop())

    def __enter__(self) -> StartedActors:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


@dataclass(frozen=True)
class NodeFailure:
    """The failure of a node: a worker could not open there.

    Attributes:
        node: The id of the node.
        address: Its address.
        reason: The error in one line.
        is_input: Whether the error was an InputError other than a StorageError.
        is_busy_storage: Whether the error was a BusyStorageError, for which the node is not at fault.
    """

    node: str
    address: str
    reason: str
    is_input: bool
    is_busy_storage: bool = False

    def error(self, line: str) -> InputError:
        """Returns the exception that ends a job because of this failure: an InputError or a StorageError."""
        return InputError(line) if self.is_input else StorageError(line)

    def exclude(self, nodes: ClusterNodes, allocation: Allocation) -> ClusterNodes:
        """Returns `nodes` without the failed node.

        Raises:
            BusyStorageError: If the storage, and not the node, has failed.
            InputError: If too many nodes have failed, or if no other node can hold the worker.
        """
        if self.is_busy_storage:
            raise BusyStorageError(self.reason)
        others = replace(nodes, excluded=(*nodes.excluded, self.node))
        failed = len(others.excluded)
        line = f"node {self.address}: {self.reason}"
        if failed > MAX_EXCLUDED:
            raise self.error(f"{line}; workers could not open on {failed} nodes")
        if not others.count_worker_slots(allocation.cores, allocation.gpus) and not may_nodes_be_added():
            is_only = not nodes.excluded and len(nodes.live_resources()) == 1
            raise self.error(self.reason if is_only else f"{line}; no other node is left for the worker")
        return others


def open_worker(
    task: WorkerTask, allocation: Allocation, marker: StoreMarker | None = None
) -> Callable[[Any, Report], Any] | NodeFailure:
    """Opens the worker of a task in a Ray process; returns a NodeFailure after any exception.

    Args:
        task: The task.
        allocation: What the worker gets.
        marker: The file that shows whether the node sees the store; None: nothing is checked.
    """
    import ray

    try:
        if marker is not None:
            marker.check()
        return open_measured(task, allocation)
    except Exception as error:
        is_input = isinstance(error, InputError) and not isinstance(error, StorageError)
        reason = f"{error}" if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return NodeFailure(node, address, reason, is_input, isinstance(error, BusyStorageError))


@contextlib.contextmanager
def announce_waiting_workers(
    reports: Reports, nodes: Callable[[], ClusterNodes], cores: int, gpus: int, num_workers: Callable[[], int]
) -> Iterator[None]:
    """Prints a line every WAIT_S seconds within the block if workers wait for nodes.

    Args:
        reports: Receives the lines, and the number of these workers.
        nodes: Returns the nodes now, without those that were excluded meanwhile.
        cores: CPUs of a worker.
        gpus: GPUs of a worker.
        num_workers: Returns the number of workers that the job could use now.
    """
    previous = 0, 0

    def look() -> None:
        nonlocal previous
        present, count = nodes().count_worker_slots(cores, gpus), num_workers()
        is_short = present < count and (not present or may_nodes_be_added())
        reports.waiting_workers(count - present if is_short else 0)
        if is_short and (not present or (present, count) != previous):
            labels = " ".join(f"{key}={value}" for key, value in nodes().labels.items())
            where = f" on nodes with {labels}" if labels else ""
            verb = "is" if present == 1 else "are"
            reports.say(f"waits for {describe_workers(count, cores, gpus)}{where}: {present} {verb} there")
        previous = present, count

    try:
        with call_repeatedly(look, WAIT_S):
            yield
    finally:
        reports.waiting_workers(0)


@contextlib.contextmanager
def announce_lost_nodes(say: Say) -> Iterator[None]:
    """Prints a line for each node that is lost within the block, unless the autoscaler ended it as idle.

    Args:
        say: Prints a line for the user.
    """
    known = {node["NodeID"] for node in _dead_nodes()}

    def look() -> None:
        for node in _dead_nodes():
            if node["NodeID"] not in known:
                known.add(node["NodeID"])
                if node["DeathReason"] != ENDED_IDLE:
                    add_measures({"lost_nodes": 1})
                    say(f"node {node['NodeManagerAddress']} is lost; its work is made again")

    with call_repeatedly(look, LOST_NODE_CHECK_S):
        yield
    look()


def _dead_nodes() -> list[dict[str, Any]]:
    """Returns the entries of `ray.nodes()` of dead nodes."""
    import ray

    return [node for node in ray.nodes() if not node["Alive"]]


def describe_workers(count: int, cores: int, gpus: int) -> str:
    """Describes workers in words: `4 workers of 8 CPUs and 1 GPU`."""
    return f"{_count_noun(count, 'worker')} of {describe_resources({'CPU': cores, 'GPU': gpus})}"


def describe_resources(resources: Mapping[str, float]) -> str:
    """Describes Ray resources in words: `8 CPUs and 2 GPUs`."""
    gpus = f" and {_count_noun(resources['GPU'], 'GPU')}" if resources.get("GPU") else ""
    return _count_noun(resources.get("CPU", 0), "CPU") + gpus


def _count_noun(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'s' * (number != 1)}"
