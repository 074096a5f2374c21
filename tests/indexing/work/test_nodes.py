"""What workers get of the nodes of a cluster, how many workers these hold, and what a job says while it waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
import ray.exceptions
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, ResourceRequest
from ray.core.generated.common_pb2 import LABEL_OPERATOR_IN, LABEL_OPERATOR_NOT_IN

from riptide.base.errors import InputError, StorageError
from riptide.base.wording import Parameter
from riptide.indexing.work import nodes
from riptide.indexing.work.nodes import (
    GROWTH_S,
    HEAD,
    ClusterNodes,
    NodeFailure,
    Reports,
    announce_lost_nodes,
    announce_waiting_workers,
    check_room,
    describe_workers,
    parse_labels,
    seconds_to_wait,
    wait_for_required_room,
)
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.worker_tasks import ALL_CORES, ONE_CORE, Allocation, WorkerRequest, WorkerResources
from riptide.telemetry.phases import take_measures

ANY_DEVICE = WorkerResources(cores=None, gpus=None)


def nodes_of(
    monkeypatch: pytest.MonkeyPatch, *resources: dict[str, float], labels: Sequence[Mapping[str, str]] = ()
) -> None:
    """Makes Ray report these nodes, with the ids a, b, … and these labels, and a large one that is lost."""
    import ray

    every: list[dict[str, Any]] = [
        {"Alive": True, "NodeID": "abcdef"[number], "Resources": node, "Labels": own or {}}
        for number, (node, own) in enumerate(itertools.zip_longest(resources, labels))
    ]
    every.append({"Alive": False, "NodeID": "z", "Resources": {"CPU": 64.0}, "Labels": {"kind": "lost"}})
    monkeypatch.setattr(ray, "nodes", lambda: every)


def test_places_are_counted_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 7.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 4.0}, {"memory": 1.0})
    assert [ClusterNodes().count_worker_slots(cores) for cores in (1, 2, 3, 7, 8)] == [13, 6, 3, 1, 0]
    assert [ClusterNodes().count_worker_slots(cores, gpus=1) for cores in (1, 2, 3, 8)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("resources", "all_cores", "any_device"),
    [
        ([{"CPU": 7.0}, {"CPU": 16.0}, {"memory": 1.0}], Allocation(7), Allocation(7)),
        ([{"CPU": 2.0, "GPU": 1.0}, {"CPU": 16.0}], Allocation(16), Allocation(2, "cuda")),
        ([{"CPU": 8.0, "GPU": 1.0}], Allocation(8), Allocation(4, "cuda")),
    ],
)
def test_all_cores_are_those_of_the_smallest_node_of_the_right_kind(
    resources: list[dict[str, float]], all_cores: Allocation, any_device: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(monkeypatch, *resources)
    runner = RayTasks()
    assert (runner.allocate(ALL_CORES), runner.allocate(ANY_DEVICE)) == (all_cores, any_device)


def test_what_a_worker_gets_does_not_change_while_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 8.0})
    runner = RayTasks()
    before = runner.allocate(ALL_CORES), runner.allocate(ANY_DEVICE)
    nodes_of(monkeypatch, {"CPU": 8.0}, {"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0})
    assert (runner.allocate(ALL_CORES), runner.allocate(ANY_DEVICE)) == before
    assert ClusterNodes().cores_of_smallest() == 2


@pytest.mark.parametrize(
    ("resources", "lines"),
    [
        ([{HEAD: 1.0}], ["waits for 4 workers of 8 CPUs: 0 are there"]),
        ([{HEAD: 1.0, "CPU": 2.0}], ["waits for 4 workers of 8 CPUs: 0 are there"]),
        ([{HEAD: 1.0}, {"CPU": 8.0}], ["waits for 4 workers of 8 CPUs: 1 is there"]),
        ([{HEAD: 1.0, "CPU": 8.0}], []),  # a cluster that does not grow has started what it can
        ([{HEAD: 1.0}, {"CPU": 32.0}], []),
    ],
)
def test_a_job_says_what_it_waits_for(
    resources: list[dict[str, float]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes_of(monkeypatch, *resources)
    monkeypatch.setattr(nodes, "WAIT_S", 0.01)
    said: list[Any] = []
    looks: list[int] = []

    def wanted() -> int:
        looks.append(4)
        return 4

    reported: list[int] = []
    with announce_waiting_workers(Reports(said.append, reported.append), ClusterNodes, 8, 0, wanted):
        while len(looks) < 3:
            time.sleep(0.001)
    assert said[:1] == lines
    assert set(reported[:2]) == {4 - ClusterNodes().count_worker_slots(8) if lines else 0}
    assert reported[-1] == 0


def test_a_job_says_which_labels_the_nodes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 8.0})
    monkeypatch.setattr(nodes, "WAIT_S", 0.01)
    said: list[str] = []
    with announce_waiting_workers(Reports(said.append), lambda: ClusterNodes({"node-type": "gpu"}), 7, 1, lambda: 4):
        while not said:
            time.sleep(0.001)
    assert said[0] == "waits for 4 workers of 7 CPUs and 1 GPU on nodes with node-type=gpu: 0 are there"


def test_a_job_says_which_nodes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, but not one that was lost before, nor one that the autoscaler ends because it is idle."""
    import ray

    def node(number: int, reason: int | None) -> dict[str, Any]:
        """Returns the description of a live node (None), or of one that has ended for a reason of Ray's."""
        lost = {"Alive": False, "DeathReason": reason} if reason is not None else {"Alive": True}
        return {"NodeID": f"n{number}", "NodeManagerAddress": f"10.0.0.{number}", **lost}

    monkeypatch.setattr(nodes, "LOST_NODE_CHECK_S", 0.01)
    present = [node(1, None), node(2, None), node(3, None), node(4, 2)]
    looks: list[int] = []
    monkeypatch.setattr(ray, "nodes", lambda: looks.append(len(looks)) or list(present))
    said: list[str] = []
    take_measures()
    with announce_lost_nodes(said.append):
        present[:3] = [node(1, 2), node(2, 4), node(3, None)]
        begun = len(looks)
        while len(looks) < begun + 3:
            time.sleep(0.001)
        assert said == ["node 10.0.0.1 is lost; its work is made again"]
        present[2] = node(3, 1)
    assert said[1:] == ["node 10.0.0.3 is lost; its work is made again"]
    assert take_measures() == {"lost_nodes": 2}


def test_the_line_counts_in_words() -> None:
    assert describe_workers(1, 1, 2) == "1 worker of 1 CPU and 2 GPUs"


KINDS = ({"kind": "cpu", "zone": "a"}, {"kind": "gpu", "zone": "a", "ray.io/node-id": "b"}, {"kind": "cpu"})


def test_only_nodes_with_the_labels_that_are_not_excluded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch, {"CPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}, labels=KINDS)
    counts = [
        (some.count_worker_slots(1), some.cores_of_smallest(), some.num_gpus())
        for some in (
            ClusterNodes(),
            ClusterNodes({"kind": "cpu"}),
            ClusterNodes({"kind": "cpu", "zone": "a"}),
            ClusterNodes({"zone": "a"}, ("a",)),
        )
    ]
    assert counts == [(14, 2, 2), (10, 2, 0), (2, 2, 0), (4, 4, 2)]
    assert ClusterNodes({"zone": "a"}, ("a", "b")).selector == {"zone": "a", "ray.io/node-id": "!in(a,b)"}
    assert ClusterNodes().selector == {}


def test_labels_are_keys_with_values() -> None:
    assert parse_labels(["kind=gpu", "example.com/pool=a-1"]) == {"kind": "gpu", "example.com/pool": "a-1"}
    for text in ("kind", "kind=", "=gpu", "kind=!gpu", "kind=in(a,b)", "a=b=c"):
        with pytest.raises(InputError, match=r"parameter node_label .*: expected KEY=VALUE"):
            parse_labels([text])


@pytest.mark.parametrize(
    ("labels", "cores", "gpus", "workers", "waited_s", "line"),
    [
        (
            {"kind": "tpu"},
            1,
            0,
            1,
            0,
            "parameter node_label kind=tpu: no node has it; the labels of the nodes are kind=cpu, kind=gpu, zone=a",
        ),
        ({}, 9, 0, 1, 0, "parameter cpus 9: expected at most 8, the cores of the largest node"),
        (
            {},
            5,
            1,
            1,
            1800.0,
            "parameter cpus 5: expected at most 4, the cores of the largest node with a GPU, after 1,800 s",
        ),
        (
            {"kind": "cpu"},
            1,
            1,
            1,
            0,
            "parameter gpus 1: expected nodes with GPUs, there are none; parameter wait SECONDS waits for more nodes",
        ),
        (
            {},
            4,
            0,
            4,
            7.0,
            "parameter min_workers 5: the nodes have 14 CPUs and 2 GPUs, room for 3 of 4 workers of 4 CPUs, after 7 s; "
            "parameter wait SECONDS waits for more nodes",
        ),
    ],
)
def test_too_few_nodes_are_refused_with_what_was_requested_and_what_is_there(
    labels: dict[str, str],
    cores: int,
    gpus: int,
    workers: int,
    waited_s: float,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes_of(monkeypatch, {"CPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}, labels=KINDS)
    with pytest.raises(InputError) as raised:
        check_room(ClusterNodes(labels), cores, gpus, workers, waited_s, Parameter("min_workers", 5))
    assert str(raised.value) == line
    check_room(ClusterNodes(labels={"kind": "gpu"}), 2, 1, 2, 0, Parameter("min_workers", 2))


def test_a_cluster_without_nodes_or_labels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_of(monkeypatch)
    with pytest.raises(InputError, match="parameter min_workers 1: the nodes have 0 CPUs, room for 0 of 1 worker of 8"):
        check_room(ClusterNodes(), 8, 0, 1, 0, Parameter("min_workers", 1))
    nodes_of(monkeypatch, {"CPU": 2.0})
    with pytest.raises(InputError, match="no node has it; the nodes have no labels"):
        check_room(ClusterNodes({"kind": "cpu"}), 1, 0, 1, 0, Parameter("min_workers", 1))


def test_nodes_are_waited_for_if_they_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits as long as the user says, by default only if the cluster can grow."""
    nodes_of(monkeypatch, {HEAD: 1.0, "CPU": 2.0})
    assert (seconds_to_wait(None), seconds_to_wait(5)) == (0, 5)
    with pytest.raises(InputError, match="room for 2 of 3 workers of 1 CPU; parameter wait"):
        wait_for_required_room(ClusterNodes(), 1, 0, 3, WorkerRequest(min_workers=3))
    nodes_of(monkeypatch, {HEAD: 1.0})
    assert (seconds_to_wait(None), seconds_to_wait(0)) == (GROWTH_S, 0)
    looks: list[float] = []

    def add_node(seconds: float) -> None:
        looks.append(seconds)
        nodes_of(monkeypatch, {HEAD: 1.0}, {"CPU": float(len(looks))})

    monkeypatch.setattr(nodes.time, "sleep", add_node)
    monkeypatch.setattr(nodes.Autoscaler, "is_infeasible", lambda *_: False)  # there is no autoscaler to ask
    wait_for_required_room(ClusterNodes(), 1, 0, 3, WorkerRequest(min_workers=3))
    assert len(looks) == 3


def test_up_to_three_nodes_are_excluded_while_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(node: str) -> NodeFailure:
        return NodeFailure(node, f"10.0.0.{node}", "the model is damaged", is_input=True)

    nodes_of(monkeypatch, *({"CPU": 2.0} for _ in "abcde"))
    some = ClusterNodes()
    for node in "abc":
        some = failure(node).exclude(some, Allocation(2))
    assert some == ClusterNodes(excluded=("a", "b", "c"))
    with pytest.raises(InputError) as raised:
        failure("d").exclude(some, Allocation(2))
    assert str(raised.value) == "node 10.0.0.d: the model is damaged; workers could not open on 4 nodes"
    nodes_of(monkeypatch, {"CPU": 2.0}, {"CPU": 1.0})
    with pytest.raises(InputError) as raised:
        failure("a").exclude(ClusterNodes(), Allocation(2))
    assert str(raised.value) == "node 10.0.0.a: the model is damaged; no other node is left for the worker"
    nodes_of(monkeypatch, {"CPU": 2.0})
    with pytest.raises(StorageError) as stored:
        NodeFailure("a", "10.0.0.a", "OSError: no space", is_input=False).exclude(ClusterNodes(), Allocation(2))
    assert str(stored.value) == "OSError: no space"
    nodes_of(monkeypatch, {HEAD: 1.0}, {"CPU": 2.0})
    assert failure("b").exclude(ClusterNodes(), Allocation(2)).excluded == ("b",), "an autoscaler may add another one"


def test_a_request_fills_in_sizes_that_are_not_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a requested size no node is needed to decide what a worker gets."""
    nodes_of(monkeypatch, {HEAD: 1.0})
    runner = RayTasks(WorkerRequest(cpus=8, gpus=1))
    assert [runner.allocate(each) for each in (ONE_CORE, ALL_CORES, ANY_DEVICE)] == [
        Allocation(1),
        Allocation(8),
        Allocation(8, "cuda"),
    ]
    assert RayTasks(WorkerRequest(cpus=8)).allocate(ANY_DEVICE) == Allocation(8)


@pytest.mark.parametrize(
    "error", [ray.exceptions.RpcError("deadline exceeded"), ray.exceptions.GetTimeoutError("10 s")]
)
def test_a_cluster_that_does_not_answer_in_time_is_not_infeasible(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(get_cluster_status=mock.Mock(side_effect=error))
    monkeypatch.setattr("ray._raylet.GcsClient", lambda address: client)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    assert not nodes.Autoscaler().is_infeasible(ClusterNodes(), 2, 0)


def answers_of_autoscaler(monkeypatch: pytest.MonkeyPatch, *requests: ResourceRequest) -> list[str]:
    """Makes the head of the cluster report these requests as infeasible; returns the addresses of its clients."""
    reply = GetClusterStatusReply()
    reply.autoscaling_state.infeasible_resource_requests.extend(requests)
    clients = list[str]()

    def connect(address: str) -> SimpleNamespace:
        clients.append(address)
        return SimpleNamespace(get_cluster_status=lambda timeout_s: reply.SerializeToString())

    monkeypatch.setattr("ray._raylet.GcsClient", connect)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    return clients


def test_workers_are_infeasible_with_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job's request of the same size, but with other labels, says nothing; excluded nodes are no labels."""
    labels = [("kind", LABEL_OPERATOR_IN, ["gpu"]), (nodes.NODE_ID, LABEL_OPERATOR_NOT_IN, ["a", "b"])]
    bare, labelled = (ResourceRequestUtil.make({"CPU": 2}), ResourceRequestUtil.make({"CPU": 2}, None, [labels]))
    clients = answers_of_autoscaler(monkeypatch, labelled)
    autoscaler, gpu_nodes = nodes.Autoscaler(), ClusterNodes({"kind": "gpu"}, excluded=("a",))
    assert autoscaler.is_infeasible(gpu_nodes, 2, 0)
    assert not autoscaler.is_infeasible(gpu_nodes, 1, 0)
    assert not autoscaler.is_infeasible(ClusterNodes({"kind": "cpu"}), 2, 0)
    assert not autoscaler.is_infeasible(ClusterNodes(), 2, 0)
    assert len(clients) == 1
    answers_of_autoscaler(monkeypatch, bare)
    assert nodes.Autoscaler().is_infeasible(ClusterNodes(), 2, 0)
    assert not nodes.Autoscaler().is_infeasible(gpu_nodes, 2, 0)


@pytest.mark.parametrize(
    ("labels", "gpus", "expected"),
    [
        ({}, 0, "parameter cpus 2: the autoscaler starts no node for 1 worker of 2 CPUs, as no type of node has"),
        ({}, 1, "parameter cpus 2, parameter gpus 1: the autoscaler starts no node for 1 worker of 2 CPUs and 1 GPU,"),
        (
            {"kind": "gpu"},
            0,
            "parameter cpus 2, parameter node_label kind=gpu: the autoscaler starts no node with kind=gpu for 1 worker",
        ),
    ],
)
def test_a_worker_that_fits_on_no_node_is_refused_with_all_that_it_needs(
    labels: dict[str, str], gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = [[(key, LABEL_OPERATOR_IN, [value]) for key, value in labels.items()]] if labels else None
    request = ResourceRequestUtil.make({"CPU": 2} | ({"GPU": gpus} if gpus else {}), None, selector)
    clients = answers_of_autoscaler(monkeypatch, request)
    nodes_of(monkeypatch, {HEAD: 1.0})
    monkeypatch.setattr(nodes, "INFEASIBLE_S", 0.01)
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    with pytest.raises(InputError) as raised:
        wait_for_required_room(ClusterNodes(labels), 2, gpus, 1, WorkerRequest())
    assert str(raised.value).startswith(expected)
    assert len(clients) == 1
