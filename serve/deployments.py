"""The service on Ray Serve: replicas that each serve a whole release, or a front with leaves for ranges of rows.

    serve run riptide.serve.deployments:build store=data/squad tokens=tokens.json replicas=2
    serve run riptide.serve.deployments:build store=data/squad tokens=tokens.json row_ranges=4

Each replica of a leaf opens the live release when it starts, and other releases when the front has them opened or sends
the first request for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from ray import serve as ray_serve
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.hit_sources.registry import online_searches
from riptide.indexing.store.store import Store
from riptide.serve.http.address import address_of, open_socket
from riptide.serve.http.guard import Tokens, is_loopback
from riptide.serve.one_process import favour_event_loop, open_local
from riptide.serve.parts.part_states import PASSAGES
from riptide.serve.protocol import MAX_MS
from riptide.serve.release.artifacts import ReleaseArtifacts, check_row_ranges
from riptide.serve.release.live import live_release_id
from riptide.serve.release.release import Release
from riptide.serve.remote import PREPARE_S, LeafReplica, RemotePart, send_to_leaves, unwrap_replica_errors
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.example_queries import read_examples
from riptide.serve.service.service import LOOK_S, Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import LostError
from riptide.telemetry.logs import start_json

APPLICATION = "riptide"  # default name of the Ray Serve application
LINGER_S = MAX_MS / 1000 + 2 * LOOK_S  # seconds for which other fronts may still send requests for the previous release
SPARE = 64  # requests that a replica accepts beyond the capacity of its queues
LEAF_ONGOING = 64  # maximum number of concurrent calls to a replica of a leaf
KEEP_ALIVE_S = 75  # seconds for which Ray's proxy keeps an idle connection open
REQUEST_S = PREPARE_S + 600  # timeout of a request: the longest one opens and warms a release


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Application(ServiceOptions):
    """The arguments of the application for `serve run` and `serve deploy`."""

    store: str
    """URL or folder of the store."""
    row_ranges: NonNegativeInt = 0
    """Leaves among which the rows are divided; 0: none, each replica serves the whole release."""
    tokens: str | None = None
    """A file on every node; None: each node's environment."""
    without_tokens: bool = False
    """Start without tokens, if no other machine reaches the port."""
    workers: PositiveInt = 1
    """Batches that a front runs at the same time, with row ranges; more may help if the leaves are on other nodes."""
    replicas: PositiveInt = 1
    """Replicas that answer HTTP; the minimum if `most` is set."""
    most: PositiveInt | None = None
    """Maximum replicas, by load; None: always `replicas`."""
    cpus: NonNegativeFloat = 1
    """CPUs per replica, which are also its threads unless `threads` is set."""
    gpus: NonNegativeFloat = 0
    """GPUs per replica, or the share of one; 0: models run on the CPU."""
    leaf_replicas: PositiveInt = 1
    """Replicas of each leaf."""
    leaf_cpus: NonNegativeFloat = 1
    """CPUs per replica of a leaf, which are also its threads unless `threads` is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.most < self.replicas:
            raise InputError(f"most {self.most}: expected at least replicas, {self.replicas}, or leave it out")


def open_front(
    store: Store, leaves: Sequence[Any], args: Application, device: str, examples: Sequence[str] = ()
) -> Service:
    """Opens the service of a front, whose leaves run in Ray Serve deployments.

    Args:
        store: Where releases and artifacts are.
        leaves: The handles of the leaves.
        args: The application.
        device: Device of the models, "cpu" or "cuda".
        examples: Queries that the page offers to try.
    """
    names = [*(online.name for online in online_searches()), PASSAGES]
    return Service(
        store,
        args,
        partial(send_to_leaves, leaves),
        {name: RemotePart(name, leaves) for name in names},
        device=device,
        num_leaves=len(leaves),
        workers=args.workers,
        linger=LINGER_S,
        is_local=False,
        examples=examples,
    )


async def refresh_ingresses() -> None:
    """Makes every ingress serve the live release. A replica that replaces a lost one opens it when it starts.

    Raises:
        LostError: If an ingress does not serve it after PREPARE_S; it continues to open it.
        StoreError: If an ingress cannot open it; it tries again every LOOK_S seconds.
    """
    results: list[Any] = []
    try:
        with contextlib.suppress(LostError), unwrap_replica_errors():
            response = ray_serve.get_deployment_handle("ingress").broadcast("refresh")
            results = await response.results_async(timeout_s=PREPARE_S, return_exceptions=True)
    except TimeoutError as error:
        raise LostError(f"a replica does not serve the new release after {PREPARE_S:g} s") from error
    for result in results:
        if isinstance(result, Exception):
            with contextlib.suppress(LostError), unwrap_replica_errors():
                raise result


@ray_serve.ingress()
class Ingress:
    """The replica that answers HTTP: it serves the whole release, or is a front of leaves.

    Args:
        args: The application.
        leaves: Handles of the leaves; empty: this process serves the whole release.
        examples: Queries that the page offers to try. `build` reads them, as a replica may see no such file.
    """

    def __init__(self, args: Application, leaves: list[Any], examples: Sequence[str]):
        self.args, self.leaves, self.examples = args, leaves, examples
        self.changes: ReleaseChanges | None = None
        start_json()

    async def __serve_build_asgi_app__(self) -> Any:
        from riptide.serve.app import build_app
        from riptide.serve.ray_metrics import RayExporter

        args, store, device = self.args, Store(self.args.store), reserved_device()
        args = replace(args, threads=_num_threads(args, args.cpus))
        if self.leaves:
            service = open_front(store, self.leaves, args, device, self.examples)
        else:
            service = open_local(store, args, device=device, examples=self.examples)
        tokens = Tokens.read(args.tokens)
        if not tokens and not args.without_tokens:
            raise InputError(
                "this node finds no tokens: give `tokens` a file that it sees, or set RIPTIDE_USER_TOKENS "
                "there; set `without_tokens: true` only if no other machine reaches the port"
            )
        self.changes = ReleaseChanges(service, refresh_ingresses)
        await self.changes.refresh()
        favour_event_loop()
        return build_app(self.changes, tokens, exporter=RayExporter(store.url))

    async def refresh(self) -> None:
        """Switches to the release that is live now."""
        if self.changes is not None:
            await self.changes.refresh()


def reserved_device() -> str:
    """Returns "cuda" if this replica has reserved a GPU or a fraction of one, otherwise "cpu".

    Which GPUs torch sees says nothing about that: Ray hides none from a replica without GPUs.
    """
    return "cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else "cpu"


def _num_threads(args: Application, cpus: float) -> int:
    return args.threads or max(1, int(cpus))


def build(arguments: Application | Mapping[str, Any]) -> Any:
    """Builds the Ray Serve application that serves the live release of a store.

    Args:
        arguments: The arguments; `serve run` and `serve deploy` pass a mapping.

    Raises:
        InputError: If the store has no live release, or if the examples cannot be read here.
        ValidationError: Of pydantic, if an argument is unknown or its value is not valid.
    """
    args = arguments if isinstance(arguments, Application) else Application(**arguments)
    store = Store(args.store).require_not_empty()
    live = live_release_id(store)
    if live is None:
        raise InputError(f"{store.url} has no live release: make one with {Command('serve-search', store=store.url)}")
    check_row_ranges(ReleaseArtifacts(store, Release.load(store, live[0])), args.row_ranges)
    leaves = [_leaf_deployment(args, number) for number in range(args.row_ranges)]
    # More requests than the four queues of a replica hold. The replica refuses what its queues cannot take, so no
    # request waits in Ray Serve.
    ongoing = 4 * (args.queue + args.workers * args.batch) + SPARE
    options = _deployment_options(args.cpus, args.gpus, ongoing)
    if args.most is None:
        options["num_replicas"] = args.replicas
    else:
        bounds = {"min_replicas": args.replicas, "max_replicas": args.most}
        options["autoscaling_config"] = {**bounds, "target_ongoing_requests": args.batch}
    return ray_serve.deployment(name="ingress", **options)(Ingress).bind(
        args, leaves, read_examples(store, args.examples)
    )


def _leaf_deployment(args: Application, number: int) -> Any:
    """Returns the deployment of a leaf. number: the number of its range of rows."""
    options = {**_deployment_options(args.leaf_cpus, 0, LEAF_ONGOING), "num_replicas": args.leaf_replicas}
    deployment = ray_serve.deployment(name=f"leaf-{number:03d}", **options)(LeafReplica)
    return deployment.bind(args.store, number, args.row_ranges, _num_threads(args, args.leaf_cpus))


def _deployment_options(cpus: float, gpus: float, max_ongoing: int) -> dict[str, Any]:
    """Returns the options of a Ray Serve deployment. max_ongoing: the maximum of concurrent requests per replica."""
    return {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "max_ongoing_requests": max_ongoing,
        "max_queued_requests": 16 * max_ongoing,
        "graceful_shutdown_timeout_s": 30,
        "max_surge_percent": 25,  # at least one new replica starts before an old one stops
    }


def run_application(
    args: Application,
    host: str,
    port: int,
    on_ready: Callable[[str], object],
    *,
    name: str = APPLICATION,
    route_prefix: str = "/",
    keep_alive_s: int = KEEP_ALIVE_S,
) -> None:
    """Runs the application on the Ray cluster of this process until SIGTERM or SIGINT, then deletes it.

    Other applications of Ray Serve stay as they are. Ray Serve is shut down only if this function has started it and
    no other application runs. With a loopback address only the head listens, as such an address does not reach others.

    Args:
        args: The application.
        host: Address to listen on.
        port: Port to listen on.
        on_ready: Called with the address when the server answers.
        name: Name of the application in Ray Serve.
        route_prefix: Path below which the application answers.
        keep_alive_s: Seconds that an idle connection stays open.

    Raises:
        InputError: If the address is a loopback address and this node is not the head or HAProxy would have to reach
            other nodes, if the address is taken, if Ray Serve listens on another address, if another application has
            the name or the route, or if no replica can start.
    """
    loopback = is_loopback(host)
    if loopback and not _on_head():
        raise InputError(
            f"{Parameter('host', host)}: on a loopback address the cluster's head answers, and this is another node: "
            "run the job on the head, or give an address that others reach, with tokens"
        )
    if loopback and _haproxy_serves_several_nodes():
        raise InputError(
            f"{Parameter('host', host)}: HAProxy, which the nodes of this cluster run, does not reach replicas of "
            "other nodes from a loopback address: give an address that they reach, with tokens"
        )
    was_running = _check_running_serve(host, port, name)
    if loopback and not was_running:
        open_socket(host, port).close()  # fails here for a taken address: Ray Serve's proxy would fail with a traceback
    ended = threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: ended.set())
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    where = ProxyLocation.HeadOnly if loopback else ProxyLocation.EveryNode
    ray_serve.start(where, http_options=http_options(host, port, keep_alive_s), logging_config={"log_level": "WARNING"})
    is_deployed = False
    try:
        application = build(args)
        try:
            is_deployed = True
            ray_serve.run(application, name=name, route_prefix=route_prefix)
        except RayServeException as error:
            is_deployed = False
            lines = str(error).splitlines()
            reason = next((line for line in lines if "Prefix" in line), lines[-1])
            raise InputError(
                f"{Parameter('route_prefix', route_prefix)}: {reason.partition('Exception: ')[2] or reason}"
            ) from error
        except RuntimeError as error:
            raise InputError(f"a replica does not start on its node: {_failure_reason(name) or error}") from error
        on_ready(address_of(host, port).rstrip("/") + route_prefix)
        ended.wait()
    finally:
        if was_running or ray_serve.status().applications.keys() - {name}:
            if is_deployed:
                ray_serve.delete(name)
        else:
            ray_serve.shutdown()


def _check_running_serve(host: str, port: int, name: str) -> bool:
    """Returns whether Ray Serve already runs on the cluster. Raises InputError if it does not fit the arguments.

    Raises:
        InputError: If it listens on another address, or if it has an application of this name.
    """
    client = _get_global_client(raise_if_no_controller_running=False)  # Ray has no public function for the address
    if client is None:
        return False
    running = client.http_config
    if (running.host, running.port) != (host, port):
        raise InputError(
            f"{Parameter('port', port)}, {Parameter('host', host)}: Ray Serve runs on this cluster and listens on "
            f"{running.host}:{running.port}, which only its end changes: give {Parameter('port', running.port)} and "
            f"{Parameter('host', running.host)}, or serve on another cluster"
        )
    if name in ray_serve.status().applications:
        raise InputError(
            f"{Parameter('application', name)}: Ray Serve runs an application of this name, which would be replaced: "
            "give another name, or end the other one first"
        )
    return True


def _failure_reason(name: str) -> str:
    """Returns the reason why a deployment of an application fails: the last line of a replica's exception, if any."""
    status = ray_serve.status().applications.get(name)
    messages = [deployment.message for deployment in status.deployments.values()] if status else []
    lines = [line.strip() for message in messages for line in message.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else ""


def http_options(host: str, port: int, keep_alive_s: int) -> dict[str, Any]:
    """Returns the HTTP options of Ray Serve, for HAProxy and for Ray's own proxy."""
    return {"host": host, "port": port, "keep_alive_timeout_s": keep_alive_s, "request_timeout_s": REQUEST_S}


def _on_head() -> bool:
    """Returns whether this process runs on the head node of its cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == node_id and "node:__internal_head__" in node["Resources"] for node in ray.nodes())


def _haproxy_serves_several_nodes() -> bool:
    """Returns whether the cluster has several nodes and this one was started with the variable that enables HAProxy."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    variable = ray.remote(num_cpus=0)(os.getenv).options(scheduling_strategy=node)
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    return several and ray.get(variable.remote("RAY_SERVE_ENABLE_HA_PROXY")) == "1"
