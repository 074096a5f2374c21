"""Several Ray nodes on this machine, each `ray start` in a process tree of its own; jobs run against them or alone.

Nodes listen on loopback, have ports and a temporary folder of their own, ask for a token, and end by their process ids.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PATIENCE = 240.0  # seconds that a wait may take before the test fails: a bound for what hangs, no measure of speed
LONG = os.environ.get("RIPTIDE_TESTS") == "all"  # `make test-all`: every kind of kill, many times

HEAD = "127.0.0.2"  # Ray takes 127.0.0.1 for "find out my address", and listens on that one

# Ray prints this for every pool of actors that may restart. It does not apply: Ray Data keeps the object.
RAY_NOTE = "has constructor arguments in the object store and max_restarts > 0"

# A node that is gone is missed after some 5 seconds instead of 15.
QUICK_TO_MISS = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000"}


@dataclass
class Node:
    """One `ray start --block`: the process that it is, below which are its raylet, agents and workers."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str

    def tree(self) -> list[psutil.Process]:
        """Its processes, the first ancestors first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def workers(self, title: str) -> list[psutil.Process]:
        """Its worker processes whose title holds `title`: what they run now."""
        return [process for process in self.tree() if title in title_of(process)]

    def kill(self) -> None:
        """kill -9 to every process of it, the raylet among the first."""
        kill_all(self.tree())
        self.process.wait()


@dataclass
class LocalCluster:
    """A head and workers of one core each; `environment` is what a client needs to reach and enter it."""

    folder: Path
    address: str
    dashboard: str
    token: str
    nodes: list[Node] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    _addresses: list[str] = field(default_factory=lambda: [f"127.0.0.{number}" for number in range(2, 255)])

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def workers(self) -> list[Node]:
        return self.nodes[1:]

    def processes(self) -> list[psutil.Process]:
        """Those of all nodes."""
        return [process for node in self.nodes for process in node.tree()]

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_ADDRESS": self.address, **self.authentication}

    @property
    def authentication(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def add(
        self,
        *,
        hide: Path | None = None,
        cores: int = 1,
        gpus: int = 0,
        labels: Mapping[str, str] | None = None,
        autoscaler: Path | None = None,
        starts: int = 4,
        **variables: str,
    ) -> Node:
        """Starts one more node and waits until the cluster has it. The first one is the head.

        Args:
            hide: A folder that is empty for this node.
            cores: CPUs of the node.
            gpus: GPUs that the node pretends to have.
            labels: Labels of the node.
            autoscaler: Configuration of the autoscaler that the head runs.
            starts: Starts at most: Ray gives up a node that did not join within 30 s, as on busy cores.
            variables: Environment variables of the node.
        """
        node_address = self._addresses.pop(0)
        if self.nodes:
            command = node_command(node_address, cores, gpus, labels, address=self.address)
        else:
            command = node_command(node_address, cores, gpus, labels)
            gcs, dashboard = self.address.rpartition(":")[2], self.dashboard.rpartition(":")[2]
            command += [
                "--head",
                f"--port={gcs}",
                f"--dashboard-host={HEAD}",
                f"--dashboard-port={dashboard}",
                f"--ray-client-server-port={port(HEAD)}",
                f"--temp-dir={self.folder}",
            ]
            command += [f"--autoscaling-config={autoscaler}"] if autoscaler else []
        if hide:
            hidden = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", hidden, str(hide), *command]
        log = self.folder / f"node-{secrets.token_hex(4)}.log"
        environment = clean_environment({**self.authentication, **QUICK_TO_MISS, **self.variables, **variables})
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        node = Node(process, log, node_address)
        self.nodes.append(node)
        try:
            wait_for(lambda: node_address in self.alive(), "a node to join", process)
        except AssertionError as error:
            if starts > 1 and "timed out during startup" in log.read_text():
                self.count_lost(node)
                if not self.nodes:
                    self._addresses.insert(0, node_address)  # clients know the address of the head
                return self.add(
                    hide=hide,
                    cores=cores,
                    gpus=gpus,
                    labels=labels,
                    autoscaler=autoscaler,
                    starts=starts - 1,
                    **variables,
                )
            raise AssertionError(f"{error}\n{log.read_text()}") from None
        return node

    def ask(self, path: str) -> dict[str, Any]:
        """What the dashboard's API says."""
        asked = urllib.request.Request(self.dashboard + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def alive(self) -> set[str]:
        """Addresses of the nodes that the cluster takes for alive; none where it does not answer yet."""
        try:
            found = self.ask("/api/v0/nodes?limit=1000")["data"]["result"]["result"]
        except (OSError, ValueError):
            return set()
        return {node["node_ip"] for node in found if node["state"] == "ALIVE"}

    def count_lost(self, node: Node) -> None:
        """kill -9 a whole node."""
        node.kill()
        self.nodes.remove(node)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def node_command(
    own_address: str,
    cores: float,
    gpus: float = 0,
    labels: Mapping[str, str] | None = None,
    *,
    address: str = "",
    temporary: Path | None = None,
) -> list[str]:
    """Returns the `ray start` of a node.

    Args:
        own_address: The address of the node, on loopback.
        cores: CPUs of the node.
        gpus: GPUs that the node pretends to have.
        labels: Labels of the node.
        address: The address of the cluster that it joins; empty for a head.
        temporary: The temporary folder of the node; None: that of the head.
    """
    command = [
        *RAY,
        "start",
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cores:.0f}",
        f"--num-gpus={gpus:.0f}",
        "--object-store-memory=100000000",
        f"--node-ip-address={own_address}",
        f"--dashboard-agent-listen-port={port(own_address)}",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]
    command += [f"--address={address}"] if address else []
    command += ["--labels", ",".join(f"{key}={value}" for key, value in labels.items())] if labels else []
    return command + ([f"--temp-dir={temporary}"] if temporary else [])


@contextlib.contextmanager
def local_cluster(workers: int | None = 2, **variables: str) -> Iterator[LocalCluster]:
    """A head and so many workers, which end with the block.

    Args:
        workers: Number of workers; None: the block adds the head too.
        variables: Environment variables of every node.
    """
    # Not below pytest's folders: a socket's path holds 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="riptide-ray-", dir="/tmp"))
    address, dashboard = f"{HEAD}:{port(HEAD)}", f"http://{HEAD}:{port(HEAD)}"
    cluster = LocalCluster(folder, address, dashboard, secrets.token_hex(32), variables=variables)
    try:
        for _ in range(0 if workers is None else 1 + workers):
            cluster.add()
        yield cluster
    finally:
        cluster.stop()


def port(address: str) -> int:
    """A port of an address that nobody listens on now: another one each time, and none that Linux gives away by itself
    meanwhile (from 32,768 on)."""
    while True:
        number = _PORTS.pop()
        try:
            with socket.create_server((address, number)):
                return number
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


_PORTS = secrets.SystemRandom().sample(range(20_000, 32_000), 12_000)


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This environment without Ray's variables, so that no other cluster or token plays a part, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "PYTHONPATH": "", **variables}


@dataclass
class Job:
    """A job as a person starts it, in a process of its own."""

    process: subprocess.Popen[str]
    command: list[str]

    def end(self, patience: float = PATIENCE) -> str:
        """Wait for its end, which must be exit status 0 with no word of Ray's; returns what it printed on stdout."""
        out, err = self.process.communicate(timeout=patience)
        said = f"{self.command}: {self.process.returncode}\n{out}\n{err}"
        assert self.process.returncode == 0, said
        assert not re.search(r"raylet|\.cc:\d+|ray::|WARN", out + without_progress(err)), said
        return out

    def refused(self, patience: float = PATIENCE) -> str:
        """Wait for its end, which must be exit status 1 with one line on stderr (progress aside); returns that line."""
        out, err = self.process.communicate(timeout=patience)
        said = f"{self.command}: {self.process.returncode}\n{out}\n{err}"
        assert self.process.returncode == 1, said
        lines = without_progress(err).splitlines()
        assert len(lines) == 1, said
        assert lines[0].startswith("error: "), said
        return lines[0]


def without_progress(err: str) -> str:
    """Returns what a job printed on stderr, without what depends on the machine.

    That is progress, where it runs, the shares of its time, Ray's note on pools of actors, and the warning of machines
    without a compiler.
    """
    lines = [line for line in err.splitlines(keepends=True) if RAY_NOTE not in line]
    notes = r"(?!error)[\w ,]+: [\d,]+ |runs on |spent |exact search runs in torch, "
    return "".join(line for line in lines if not re.match(notes, line))


def start(name: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Job:
    """`python jobs/NAME.py ARGUMENTS`, started; without an `environment` that names a cluster it runs alone."""
    command = [sys.executable, str(REPOSITORY / "jobs" / f"{name}.py"), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=clean_environment(environment or {}),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return Job(process, command)


def run(name: str, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """`python jobs/NAME.py ARGUMENTS`, which must end well; what it printed on stdout."""
    return start(name, *arguments, environment=environment).end()


def submit(
    cluster: LocalCluster,
    working_dir: Path,
    name: str,
    *arguments: object,
    token: bool = True,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """`ray job submit --working-dir DIR -- python -m riptide NAME ARGUMENTS` to its end: exit status, all it printed.

    Asked again while the cluster, which has just started, says that no agent is there.
    """
    runtime = ["--runtime-env-json", json.dumps({"env_vars": dict(variables)})] if variables else []
    command = [
        *RAY,
        "job",
        "submit",
        "--address",
        cluster.dashboard,
        "--working-dir",
        str(working_dir),
        *runtime,
        "--",
        sys.executable,
        "-m",
        "riptide",
        name,
        *map(str, arguments),
    ]
    environment = clean_environment(cluster.authentication if token else {"RAY_AUTH_MODE": "disabled"})
    until = time.monotonic() + PATIENCE
    while True:
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE
        )
        if "No available agent" not in done.stdout or time.monotonic() > until:
            return done.returncode, done.stdout
        time.sleep(1)


def wait_for(
    there: Callable[[], object], what: str, process: subprocess.Popen | None = None, patience: float = PATIENCE
) -> None:
    """Ask until it is there. Fails when the process that should bring it about has ended, or patience has.

    Asking takes a third of a core at most: what is waited for needs it.
    """
    until = time.monotonic() + patience
    while True:
        spent = time.process_time()
        if there():
            return
        ended = process is not None and process.poll() is not None
        if ended and not there():
            assert process is not None
            errors = process.stderr.read()[-1000:] if process.stderr else ""
            raise AssertionError(f"waited for {what}: the process ended with {process.returncode}: {errors}")
        assert time.monotonic() < until, f"waited {patience:.0f} s for {what}"
        time.sleep(max(0.002, min(1.0, 2 * (time.process_time() - spent))))


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def wait_for_its_end(tree: list[int]) -> None:
    """Of what a killed job had started: its private Ray goes down by itself. Two agents take a minute to notice that
    they are alone, and are ended here."""

    def left() -> list[int]:
        found = []
        for pid in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                title = title_of(psutil.Process(pid))
                if title and not title.startswith(AGENTS):
                    found.append(pid)
        return found

    wait_for(lambda: not left(), "its Ray to end")
    for pid in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            if title_of(psutil.Process(pid)).startswith(AGENTS):
                psutil.Process(pid).kill()


def title_of(process: psutil.Process) -> str:
    """A process's title (Ray's workers say there what they run), "" where it has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def still_there(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run, zombies that nobody has waited for left out."""
    return [process for process in processes if process.is_running() and title_of(process)]
