"""The service on Ray Serve: the same parts, all in one replica or each in its own deployment.

    serve run serve.deployments:build store=data/squad tokens=tokens.json               # co-located
    serve run serve.deployments:build store=data/squad tokens=tokens.json topology=distributed shards=4

Each replica of a part opens the live release when it starts, and other releases when the service has them opened or
sends the first request for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import ray
from grpc import RpcError
from pydantic import BaseModel, ConfigDict, Field
from ray import serve as ray_serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from indexing.store import Store
from retriever.errors import InputError
from serve.batching import OverloadedError
from serve.engine import Engine
from serve.health.failures import UndeployedPartError
from serve.health.states import BM25, DENSE, ENCODER, PASSAGES, RERANKER
from serve.health.warm_up import WarmUpLimits
from serve.live import Live
from serve.local import address_of
from serve.parts import EncoderPart, Part, PassagesPart, RerankPart, SearchPart, WordsPart
from serve.places import LostError, Places, Reply
from serve.protocol import MOST_MS
from serve.release import Release, current
from serve.security import Tokens, is_loopback
from serve.service import LOOK, Limits, Service

PREPARE_S = 600.0  # seconds for all replicas to open a release
LINGER_S = MOST_MS / 1000 + 2 * LOOK  # seconds for which other ingresses may have requests of the previous release
SPARE = 64  # requests that an ingress accepts in addition to those for its queues
TOGETHER = 2  # batches that a replica works on at once: one computes while the other is read or sent
KEEP_ALIVE_S = 75  # seconds that Ray's proxy keeps an idle connection open
REQUEST_S = PREPARE_S + 600  # seconds of the longest request, which opens and warms a release
# Deployments of one replica set each, by part; each shard of dense search has a separate deployment.
DEPLOYMENTS = {ENCODER: "encoder", BM25: "words", PASSAGES: "passages", RERANKER: "reranker"}
KINDS: dict[str, Callable[..., Part]] = {
    "encoder": EncoderPart, "search": SearchPart, "words": WordsPart, "passages": PassagesPart, "reranker": RerankPart,
}  # fmt: skip


class Scale(BaseModel):
    """Number of replicas of a deployment, and the resources of each.

    Attributes:
        replicas: Number of replicas; the minimum if `most` is set.
        most: Maximum number of replicas of an autoscaled deployment; None: always `replicas`.
        cpus: CPUs per replica.
        gpus: GPUs per replica.
        threads: Threads per replica; None: one for each CPU.
        ongoing: Batches that a replica gets at once.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(default=1, ge=1)
    most: int | None = Field(default=None, ge=1)
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    threads: int | None = Field(default=None, ge=1)
    ongoing: int = Field(default=8, ge=1, description="Batches that a replica gets at once.")

    def options(self, target: int | None = None) -> dict[str, Any]:
        """Returns the options of a Ray Serve deployment.

        Args:
            target: Running requests per replica, beyond which another replica starts; None: half of `ongoing`.
        """
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": self.ongoing,
            "max_queued_requests": 16 * self.ongoing,
            "graceful_shutdown_timeout_s": 30,
        }
        if self.most is None:
            return {**options, "num_replicas": self.replicas}
        bounds = {"min_replicas": self.replicas, "max_replicas": max(self.replicas, self.most),
                  "target_ongoing_requests": max(1, target or self.ongoing // 2)}  # fmt: skip
        return {**options, "autoscaling_config": bounds}


class Application(BaseModel):
    """Arguments of the application for `serve run` and `serve deploy`.

    Attributes:
        store: URL or folder of the store.
        topology: All parts in one replica, or each in its own deployment.
        tokens: A file that exists on every node; None: the variables of each node's environment.
        without_tokens: Whether to start on a node without tokens; only if no other machine reaches the port.
        shards: Shards of the vectors, if distributed; each is a deployment.
        batch: Queries per batch at most.
        queue: Queries that may wait.
        workers: Batches that run concurrently, if distributed.
        compile: "auto" compiles the encoder if that helps.
        warm_up_s: Seconds at most before a release is live; 0: no warm-up.
        ingress: Scale of the deployment that answers HTTP.
        encoder: Scale of the encoder.
        search: Scale of each shard of dense search.
        words: Scale of BM25.
        passages: Scale of the passages.
        reranker: Scale of the re-ranker.
    """

    model_config = ConfigDict(extra="forbid")

    store: str
    topology: Literal["colocated", "distributed"] = "colocated"
    tokens: str | None = None
    without_tokens: bool = False
    shards: int = Field(default=1, ge=1)
    batch: int = Field(default=32, ge=1)
    queue: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=1, description="Batches that run concurrently, if distributed.")
    compile: Literal["auto", "never"] = "never"
    warm_up_s: float = Field(default=300, ge=0, description="Seconds at most before a release is live; 0: no warm-up.")
    ingress: Scale = Scale()
    encoder: Scale = Scale()
    search: Scale = Scale()
    words: Scale = Scale()
    passages: Scale = Scale(ongoing=64)
    reranker: Scale = Scale()


class PartReplica:
    """A replica of one part on Ray Serve. Batches run in threads, so that a release can be opened meanwhile.

    Args:
        kind: Kind of the part, a key of KINDS.
        store: URL or folder of the store.
        options: Further arguments of the part.
    """

    def __init__(self, kind: str, store: str, options: Mapping[str, Any]):
        self.store = Store(store)
        self.part = KINDS[kind](self.store, **options)
        self._work = ThreadPoolExecutor(TOGETHER)
        self._admin = ThreadPoolExecutor(1)
        if live := current(self.store):
            self.part.prepare(live[0])

    async def run(self, method: str, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._work, getattr(self.part, method), *arguments)

    async def prepare(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.prepare, release_id)

    async def read(self, release_id: str, budget: int | None, seconds: float) -> int:
        return await asyncio.to_thread(self.part.read, release_id, budget, seconds)

    async def check(self, release_id: str) -> None:
        await asyncio.to_thread(self.part.check, release_id)

    async def retire(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.retire, release_id)


class There:
    """A Place whose part runs in the replicas of a deployment."""

    def __init__(self, handle: Any):
        self.handle = handle

    def call(self, method: str, *arguments: Any) -> Reply:
        return _Sent(self.handle, method, arguments)

    def everywhere(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Calls a method of every replica; waits for the first replica if none has started.

        Args:
            method: Name of the method.
            *arguments: Arguments of the method.
            timeout_s: Seconds to wait; None: PREPARE_S.

        Returns:
            The result of each replica.

        Raises:
            LostError: If the calls take longer. Exceptions of a replica are raised as they are.
        """
        allowed = PREPARE_S if timeout_s is None else timeout_s
        ends = time.monotonic() + allowed
        with _as_raised():
            while True:
                try:
                    remaining_s = max(0.0, ends - time.monotonic())
                    return list(self.handle.broadcast(method, *arguments).results(timeout_s=remaining_s) or [])
                except DeploymentUnavailableError:
                    if time.monotonic() > ends:
                        raise
                    time.sleep(0.5)
                except TimeoutError as error:
                    raise LostError(f"{method}: not done after {allowed:g} s") from error


class _Sent:
    """A Reply from Ray Serve.

    If the replica is lost during the call, the call is sent once more, to another replica or to the next one that
    starts. Calls change nothing, so they can be repeated.
    """

    def __init__(self, handle: Any, method: str, arguments: tuple[Any, ...]):
        self._send = partial(handle.run.remote, method, *arguments)
        self._response: Any = None
        with contextlib.suppress(LostError), _as_raised():
            self._response = self._send()

    def result(self, timeout_s: float | None = None) -> Any:
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        if self._response is not None:
            with contextlib.suppress(LostError), _as_raised():
                return self._response.result(timeout_s=timeout_s)
        with _as_raised():
            remaining_s = None if ends is None else max(0.0, ends - time.monotonic())
            return self._send().result(timeout_s=remaining_s)


@contextlib.contextmanager
def _as_raised() -> Iterator[None]:
    """Raises the exception of a replica without Ray's traceback, which is not meant for clients.

    Raises LostError if the call failed outside of the part.
    """
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except TimeoutError:
        raise
    except BackPressureError as error:
        raise OverloadedError(1) from error
    except (RayError, RayServeException, RpcError) as error:
        raise LostError(type(error).__name__) from error


class ClusterService(Service):
    """A Service whose parts run in Ray Serve deployments. parts: handles by name of the deployment."""

    def __init__(self, store: Store, parts: Mapping[str, Any], limits: Limits, warm_up: WarmUpLimits | None = None):
        self.shards = [There(parts[name]) for name in sorted(parts) if name.startswith("search-")]
        self.single = {name: There(handle) for name, handle in parts.items() if not name.startswith("search-")}
        places = Places(encoder=self.single["encoder"], shards=self.shards, passages=self.single["passages"],
                        words=self.single.get("words"), reranker=self.single.get("reranker"))  # fmt: skip
        single = {part: [self.single[name]] for part, name in DEPLOYMENTS.items() if name in self.single}
        self._deployed = {DENSE: self.shards, **single}
        self.part_names = tuple(self._deployed)
        super().__init__(store, Engine(places), limits=limits, linger=LINGER_S, is_local=False, warm_up=warm_up)

    def everywhere(self, part: str, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        return [
            result
            for place in self._deployed[part]
            for result in place.everywhere(method, *arguments, timeout_s=timeout_s)
        ]

    def open(self, release_id: str) -> None:
        """Opens a release in every replica.

        Raises:
            InputError: If a replica cannot open it.
            UndeployedPartError: If the release needs a part that was not deployed.
        """
        release = Release.load(self.store, release_id)
        for name in sorted(needed(release) - set(self.single)):
            raise UndeployedPartError(f"release {release_id} needs {name}, which this service was deployed without: "
                                      "deploy it again while that release is live")  # fmt: skip
        super().open(release_id)

    def about(self, live: Live) -> dict[str, Any]:
        try:
            known = self.single["encoder"].call("describe", live.release.id).result(timeout_s=10)
        except TimeoutError as error:
            raise LostError("encoder") from error
        return {**known, "shards": len(self.shards)}


async def announce() -> None:
    """Has every ingress serve the release that is live now."""
    await ray_serve.get_deployment_handle("ingress").broadcast("refresh").results_async(timeout_s=PREPARE_S)


@ray_serve.ingress()
class Ingress:
    """Answers HTTP with the parts of its own process, or with those of deployments.

    Args:
        settings: Fields of Application.
        parts: Handles of the deployments; empty: all parts run in this process.
    """

    def __init__(self, settings: dict[str, Any], parts: dict[str, Any]):
        self.settings = Application(**settings)
        self.parts = parts
        self.service: Service | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        from serve.app import build_app
        from serve.local import open_local

        settings = self.settings
        store = Store(settings.store)
        warm_up = WarmUpLimits(total_s=settings.warm_up_s)
        if self.parts:
            limits = Limits(batch=settings.batch, bound=settings.queue, workers=settings.workers)
            service: Any = ClusterService(store, self.parts, limits, warm_up)
        else:
            device = "cuda" if settings.encoder.gpus else None
            service = open_local(store, threads=settings.encoder.threads, batch=settings.batch, bound=settings.queue,
                                 compile=settings.compile, device=device, warm_up=warm_up)  # fmt: skip
        tokens = Tokens.read(settings.tokens)
        if not tokens and not settings.without_tokens:
            raise InputError("this node finds no tokens: give `tokens` a file that it sees, or set RIPTIDE_USER_TOKENS "
                             "there; `without_tokens: true` where nobody else reaches the port")  # fmt: skip
        self.service, service.announce = service, announce
        await service.refresh()
        return build_app(service, tokens, about=service.about)

    async def refresh(self) -> None:
        """Serves the release that is live now."""
        if self.service is not None:
            await self.service.refresh()


def build(given: Application | Mapping[str, Any]) -> Any:
    """Returns the Ray Serve application that serves the live release of a store.

    Args:
        given: The arguments; `serve run` and `serve deploy` pass a mapping.

    Raises:
        InputError: If the store has no live release.
        ValidationError: Of pydantic, if an argument is unknown or its value is not valid.
    """
    args = Application.model_validate(given)
    store = Store(args.store).require()
    live = current(store)
    if live is None:
        raise InputError(f"{store.url} has no live release: make one with jobs/serve_search.py --store {store.url}")
    release = Release.load(store, live[0])
    parts = _parts(args, release) if args.topology == "distributed" else {}
    # All queries that wait or run in the three queues of an ingress. The ingress itself refuses more, so that no
    # request waits in Ray Serve before it.
    ongoing = 3 * (args.queue + args.workers * args.batch) + SPARE
    scale = args.ingress.model_copy(update={"ongoing": max(args.ingress.ongoing, ongoing)})
    if not parts:  # the ingress contains the encoder
        scale = scale.model_copy(update={"gpus": max(scale.gpus, args.encoder.gpus)})
    ingress = ray_serve.deployment(name="ingress", **scale.options(target=max(1, args.queue // 2)))(Ingress)
    return ingress.bind(args.model_dump(), parts)


def _parts(args: Application, release: Release) -> dict[str, Any]:
    """Returns a deployment for each part that the release needs, and for each shard."""

    def bound(name: str, kind: str, scale: Scale, **options: Any) -> Any:
        threads = scale.threads or max(1, int(scale.cpus))
        deployment = ray_serve.deployment(name=name, **scale.options())(PartReplica)
        return deployment.bind(kind, args.store, {**options, "threads": threads})

    device = {"device": "cuda"} if args.encoder.gpus else {}
    deployments = {
        "encoder": bound("encoder", "encoder", args.encoder, compile=args.compile, **device),
        "passages": bound("passages", "passages", args.passages),
    }
    for number in range(args.shards):
        name = f"search-{number:03d}"
        deployments[name] = bound(name, "search", args.search, number=number, of=args.shards)
    for name in sorted(needed(release)):
        deployments[name] = bound(name, name, getattr(args, name))
    return deployments


def needed(release: Release) -> set[str]:
    """Returns which of the optional parts (words, reranker) a release needs."""
    has_bm25 = any(task.bm25 for task in release.tasks)
    return {name for name, needs in {"words": has_bm25, "reranker": release.reranker is not None}.items() if needs}


def run_application(
    args: Application, host: str, port: int, announce: Callable[[str], object], keep_alive_s: int = KEEP_ALIVE_S
) -> None:
    """Serve on the Ray cluster that this process has joined, until SIGTERM or SIGINT.

    With a loopback address only the head listens, as such an address does not reach other nodes.

    Args:
        args: The application.
        host: Address to listen on.
        port: Port to listen on.
        announce: Called with the address when the server answers.
        keep_alive_s: Seconds that an idle connection stays open.

    Raises:
        InputError: If the address is a loopback address and this node is not the head.
    """
    loopback = is_loopback(host)
    if loopback and not _on_head():
        raise InputError(f"--host {host}: on a loopback address the cluster's head answers, and this is another node: "
                         "run the job on the head, or give an address that others reach, with tokens")  # fmt: skip
    ended = threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: ended.set())
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    where = ProxyLocation.HeadOnly if loopback else ProxyLocation.EveryNode
    ray_serve.start(where, http_options=http_options(host, port, keep_alive_s), logging_config={"log_level": "WARNING"})
    try:
        ray_serve.run(build(args), name="riptide", route_prefix="/")
        announce(address_of(host, port))
        ended.wait()
    finally:
        ray_serve.shutdown()


def http_options(host: str, port: int, keep_alive_s: int) -> dict[str, Any]:
    """Returns the options of Ray Serve's HTTP proxy, which has no bounds on heads or connections."""
    return {"host": host, "port": port, "keep_alive_timeout_s": keep_alive_s, "request_timeout_s": REQUEST_S}


def _on_head() -> bool:
    """Whether this process runs on the head of its cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == node_id and "node:__internal_head__" in node["Resources"] for node in ray.nodes())
