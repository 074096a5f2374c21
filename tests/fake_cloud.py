"""A cloud on this machine: Ray's autoscaler starts nodes that take a settable time to boot, and ends idle ones.

    with growing_cluster({"worker": NodeType(cpus=2, max_nodes=4)}, boot_s=20) as cloud:
        submit(cloud.cluster, REPOSITORY, "encode_corpus", …)
        cloud.launches()

The head has no CPUs, as in the cluster files of the project. The autoscaler (version 2, which `ray up` uses) runs on it
and imports this module for its node provider, `SlowCloud`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from local_cluster import (
    PATIENCE,
    LocalCluster,
    kill_all,
    local_cluster,
    node_command,
    wait_for,
)
from ray._private.ray_constants import LABELS_ENVIRONMENT_VARIABLE
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

STARTS = 4  # of a node at most: Ray gives up a node that did not join within 30 s, as on busy cores
IDLE_S = 6.0  # seconds after which the autoscaler ends an idle node
NODE_NUMBER = "FAKE_CLOUD_NODE"  # environment variable of all processes of a node: its number, from 1


def address_of(number: int) -> str:
    """Returns the address of a node."""
    return f"127.0.0.{20 + number}"


@dataclass(frozen=True)
class NodeType:
    """A kind of node that the cloud has.

    Attributes:
        cpus: CPUs of a node.
        max_nodes: The largest number of such nodes.
        gpus: GPUs that a node pretends to have.
        labels: Labels of a node.
    """

    cpus: int
    max_nodes: int
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns the entry of the autoscaler's configuration."""
        resources = {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}
        return {
            "resources": resources,
            "labels": dict(self.labels),
            "node_config": {},
            "min_workers": 0,
            "max_workers": self.max_nodes,
        }


@dataclass(frozen=True)
class Event:
    """The launch or the end of a node.

    Attributes:
        what: "launch", "start" (its Ray starts, after the boot) or "end".
        node: Number of the node, from 1.
        node_type: Name of its type.
        time_s: Seconds since the epoch.
    """

    what: str
    node: int
    node_type: str
    time_s: float


class SlowCloud(FakeMultiNodeProvider):
    """Node provider of the autoscaler. Each node boots for `boot_s` seconds and then runs `ray start`.

    A node has a temporary folder of its own: nodes that share one unpack the working directory of a submission over
    each other.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._boot_s = float(provider_config["boot_s"])
        self._folder = Path(provider_config["folder"])
        self._modules = str(provider_config["modules"])

    def _create_node_with_resources_and_labels(
        self,
        node_config: object,
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        with self.lock:
            node_id = self._next_hex_node_id()
            node = {
                "tags": {
                    TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                    TAG_RAY_NODE_NAME: node_id,
                    TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
                    **tags,
                },
                "number": self._next_node_id,
                "process": None,
            }
            self._nodes[node_id] = node
        self._log("launch", node)
        threading.Thread(target=self._boot, args=(node_id, node, resources, labels), daemon=True).start()

    def _boot(
        self, node_id: str, node: dict[str, Any], resources: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """Starts the Ray of a node after the boot time, again if it gave up, unless the node was ended meanwhile."""
        time.sleep(self._boot_s)
        number = node["number"]
        folder, log = self._folder / f"n{number}", self._folder / f"node-{number}.log"
        cores, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        command = node_command(address_of(number), cores, gpus, address=self._gcs_address, temporary=folder)
        environment = {
            **os.environ,
            "PYTHONPATH": self._modules,
            NODE_NUMBER: str(number),
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id,
            "RAY_CLOUD_INSTANCE_ID": node_id,
            "RAY_NODE_TYPE_NAME": node["tags"][TAG_RAY_USER_NODE_TYPE],
            LABELS_ENVIRONMENT_VARIABLE: json.dumps(dict(labels)),
        }
        for start in range(STARTS):
            with self.lock, open(log, "wb") as output:
                if node_id not in self._nodes:
                    return
                folder.mkdir(exist_ok=True)
                node["process"] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                if start == 0:
                    self._log("start", node)
            node["process"].wait()
            if b"timed out during startup" not in log.read_bytes():
                return
            shutil.rmtree(folder, ignore_errors=True)

    def _terminate_node(self, node: dict[str, Any]) -> None:
        self._log("end", node)
        if node["process"] is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(node["process"].pid)
                kill_all([root, *root.children(recursive=True)])
            node["process"].wait()

    def _log(self, what: str, node: Mapping[str, Any]) -> None:
        """Appends an event to the log."""
        event = Event(what, node["number"], node["tags"][TAG_RAY_USER_NODE_TYPE], time.time())
        with open(self._folder / "events.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(event)) + "\n")


@dataclass(frozen=True)
class Cloud:
    """A cluster whose autoscaler adds nodes.

    Attributes:
        cluster: The head, by which jobs are submitted.
        folder: Where the node provider logs its events.
    """

    cluster: LocalCluster
    folder: Path

    def events(self) -> list[Event]:
        """Returns what the provider has logged, in order."""
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Event(**json.loads(line)) for line in lines]

    def launches(self) -> list[Event]:
        """Returns the launches of nodes, in order."""
        return [event for event in self.events() if event.what == "launch"]

    def boots(self, first: int = 0) -> list[int]:
        """Returns for each node with a number above `first` the boots that end, one after the other, when it is there.

        That is 1 for nodes that were launched before any of these nodes had booted, 2 for those that were launched
        after one of the former had, and so on. They are in the order of the launches.
        """
        boots: dict[int, int] = {}
        done = 0
        for event in self.events():
            if event.what == "launch" and event.node > first:
                boots[event.node] = done + 1
            elif event.what == "start" and event.node in boots:
                done = max(done, boots[event.node])
        return list(boots.values())

    def prepared_jobs(self, first: int, count: int) -> list[set[str]]:
        """Returns for each of `count` nodes, from number `first` + 1 on, the submissions for which Ray prepared it."""
        nodes = range(first + 1, first + count + 1)
        logs = [self.folder / f"n{node}" / "session_latest" / "logs" / "runtime_env_agent.log" for node in nodes]
        return [
            set(re.findall(r'Creating runtime env: .*"RIPTIDE_SUBMISSION": "(\w+)"', log.read_text())) for log in logs
        ]

    def describe(self, first: int = 0) -> str:
        """Returns a line for each event of the nodes with a number above `first`, with its seconds."""
        events = [event for event in self.events() if event.node > first]
        return "\n".join(f"{event.time_s - events[0].time_s:6.1f} s  {event.what} {event.node}" for event in events)

    def kill(self, number: int) -> None:
        """kill -9 to all processes of a node; the autoscaler finds out later."""
        own = f"--node-ip-address={address_of(number)}"
        [root] = [process for process in self.cluster.processes() if {"start", own} <= set(process.cmdline())]
        kill_all([root, *root.children(recursive=True)])

    def present(self) -> int:
        """Returns the number of nodes that were launched and have not ended."""
        return len(self.launches()) - sum(event.what == "end" for event in self.events())

    def wait_until_empty(self, patience: float = PATIENCE) -> None:
        """Waits until the autoscaler has ended all nodes, as they are idle."""
        wait_for(lambda: self.present() == 0, "all nodes to end", patience=patience)


@contextlib.contextmanager
def growing_cluster(
    types: Mapping[str, NodeType], boot_s: float, *, modules: Path | None = None, **variables: str
) -> Iterator[Cloud]:
    """A head without CPUs, and an autoscaler that adds nodes of these types. All of them end with the block.

    Args:
        types: The types of nodes, by name.
        boot_s: Seconds that a node boots.
        modules: A folder on the PYTHONPATH of all nodes.
        variables: Environment variables of all nodes.
    """
    with local_cluster(workers=None, **variables) as cluster:
        folder = cluster.folder
        config = {
            "cluster_name": "riptide-test",
            "max_workers": sum(one.max_nodes for one in types.values()),
            "idle_timeout_minutes": IDLE_S / 60,
            "upscaling_speed": 100,
            "provider": {
                "type": "external",
                "module": "fake_cloud.SlowCloud",
                "gcs_address": cluster.address,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "foreground_node_launch": True,
                "worker_liveness_check": False,
                "boot_s": boot_s,
                "folder": str(folder),
                "modules": str(modules or ""),
            },
            "auth": {"ssh_user": "none"},
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": NodeType(cpus=0, max_nodes=0).document(),
                **{name: one.document() for name, one in types.items()},
            },
            "file_mounts": {},
            "cluster_synced_files": [],
            **{f"{part}_commands": [] for part in ("initialization", "setup", "head_setup", "worker_setup")},
            **{f"{part}_start_ray_commands": [] for part in ("head", "worker")},
        }
        file = folder / "autoscaler.json"  # YAML includes JSON
        file.write_text(json.dumps(config))
        cluster.add(
            cores=0,
            autoscaler=file,
            RAY_FAKE_CLUSTER="1",
            RAY_enable_autoscaler_v2="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=FAKE_HEAD_NODE_ID,
            RAY_CLOUD_INSTANCE_ID=FAKE_HEAD_NODE_ID,
            RAY_NODE_TYPE_NAME="ray.head.default",
            PYTHONPATH=os.pathsep.join(map(str, filter(None, [Path(__file__).parent, modules]))),
        )
        yield Cloud(cluster, folder)
