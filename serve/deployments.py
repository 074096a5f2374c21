"""The service on Ray Serve: the same parts, in one replica or in deployments of their own.

    serve run serve.deployments:build store=data/squad tokens=tokens.json               # co-located
    serve run serve.deployments:build store=data/squad tokens=tokens.json topology=distributed shards=4

Each part's replica opens the live release when it starts, and others when it is told to, or first asked for them.
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
from serve.live import Live
from serve.local import address_of
from serve.parts import EncoderPart, Part, PassagesPart, RerankPart, SearchPart, WordsPart
from serve.places import LostError, Places, Reply
from serve.protocol import MOST_MS
from serve.release import Release, current
from serve.security import Tokens, is_loopback
from serve.service import LOOK, Limits, Service

PREPARE_S = 600.0  # for all replicas to open a release
LINGER_S = MOST_MS / 1000 + 2 * LOOK  # that other ingresses' requests, pinned to the release before, may take
SPARE = 64  # requests that an ingress takes beside those for its queues
TOGETHER = 2  # batches that a replica works on: one computes while the other is read or sent
KINDS: dict[str, Callable[..., Part]] = {
    "encoder": EncoderPart, "search": SearchPart, "words": WordsPart, "passages": PassagesPart, "reranker": RerankPart,
}  # fmt: skip


class Scale(BaseModel):
    """Replicas of a deployment, and what each asks for. most: of an autoscaled one; none: `replicas`, always."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(default=1, ge=1)
    most: int | None = Field(default=None, ge=1)
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    threads: int | None = Field(default=None, ge=1)
    ongoing: int = Field(default=8, ge=1, description="Batches that a replica is given at once.")

    def options(self, target: int | None = None) -> dict[str, Any]:
        """As Ray Serve takes them. target: requests on their way per replica, beyond which another one is started
        (default: half of `ongoing`)."""
        found: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": self.ongoing,
            "max_queued_requests": 16 * self.ongoing,
            "graceful_shutdown_timeout_s": 30,
        }
        if self.most is None:
            return {**found, "num_replicas": self.replicas}
        bounds = {"min_replicas": self.replicas, "max_replicas": max(self.replicas, self.most),
                  "target_ongoing_requests": max(1, target or self.ongoing // 2)}  # fmt: skip
        return {**found, "autoscaling_config": bounds}


class Application(BaseModel):
    """What `serve run` and `serve deploy` are given as arguments.

    tokens: a file that lies on every node; else each node's environment. without_tokens: start though a node finds
    none; only where nobody but this machine reaches the port. shards: of the vectors, when distributed; each is a
    deployment.
    """

    model_config = ConfigDict(extra="forbid")

    store: str
    topology: Literal["colocated", "distributed"] = "colocated"
    tokens: str | None = None
    without_tokens: bool = False
    shards: int = Field(default=1, ge=1)
    batch: int = Field(default=32, ge=1)
    queue: int = Field(default=256, ge=1)
    workers: int = Field(default=4, ge=1, description="Batches on their way at once, when distributed.")
    compile: Literal["auto", "never"] = "never"
    ingress: Scale = Scale()
    encoder: Scale = Scale()
    search: Scale = Scale()
    words: Scale = Scale()
    passages: Scale = Scale(ongoing=64)
    reranker: Scale = Scale()


class PartReplica:
    """A part behind Ray Serve. Batches run in threads, so that a release is opened beside them."""

    def __init__(self, kind: str, store: str, options: Mapping[str, Any]):
        self.store = Store(store)
        self.part = KINDS[kind](self.store, **options)
        self._work = ThreadPoolExecutor(TOGETHER)
        self._admin = ThreadPoolExecutor(1)
        if found := current(self.store):
            self.part.prepare(found[0])

    async def run(self, method: str, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._work, getattr(self.part, method), *arguments)

    async def prepare(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.prepare, release_id)

    async def retire(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.retire, release_id)


class There:
    """A Place: a part in replicas of its own."""

    def __init__(self, handle: Any):
        self.handle = handle

    def call(self, method: str, *arguments: Any) -> Reply:
        return _Sent(self.handle, method, arguments)

    def everywhere(self, method: str, *arguments: Any) -> None:
        """Call a method of every replica, once there is one: parts start beside the ingress, which may be quicker.

        Raises what a replica raised, and LostError where it takes longer than PREPARE_S.
        """
        ends = time.monotonic() + PREPARE_S
        with _as_raised():
            while True:
                try:
                    self.handle.broadcast(method, *arguments).results(timeout_s=max(0.0, ends - time.monotonic()))
                    return
                except DeploymentUnavailableError:
                    if time.monotonic() > ends:
                        raise
                    time.sleep(0.5)
                except TimeoutError as error:
                    raise LostError(f"{method}: not done after {PREPARE_S:g} s") from error


class _Sent:
    """A Reply of Ray Serve's. Where a replica is lost on the way the call, which changes nothing, is sent once more: to
    another replica, or to the next one that starts."""

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
            left = None if ends is None else max(0.0, ends - time.monotonic())
            return self._send().result(timeout_s=left)


@contextlib.contextmanager
def _as_raised() -> Iterator[None]:
    """Raise what a replica raised, without Ray's account of where: that is no answer to give a caller. LostError where
    it did not come to that."""
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
    """A Service whose parts are deployments."""

    def __init__(self, store: Store, parts: Mapping[str, Any], limits: Limits):
        self.shards = [There(parts[name]) for name in sorted(parts) if name.startswith("search-")]
        self.single = {name: There(handle) for name, handle in parts.items() if not name.startswith("search-")}
        places = Places(encoder=self.single["encoder"], shards=self.shards, passages=self.single["passages"],
                        words=self.single.get("words"), reranker=self.single.get("reranker"))  # fmt: skip
        super().__init__(store, Engine(places), prepare=self.open, retire=self.forget, limits=limits,
                         linger=LINGER_S)  # fmt: skip

    def open(self, release_id: str) -> None:
        """Have every replica open a release. Raises InputError where one cannot, or where it needs a part that was not
        deployed."""
        release = Release.load(self.store, release_id)
        for name in sorted(needed(release) - set(self.single)):
            raise InputError(f"release {release_id} needs {name}, which this service was deployed without: deploy it "
                             "again while that release is live")  # fmt: skip
        for place in (*self.shards, *self.single.values()):
            place.everywhere("prepare", release_id)

    def forget(self, release_id: str) -> None:
        for place in (*self.shards, *self.single.values()):
            place.everywhere("retire", release_id)

    def about(self, live: Live) -> dict[str, Any]:
        try:
            known = self.single["encoder"].call("describe", live.release.id).result(timeout_s=10)
        except TimeoutError as error:
            raise LostError("encoder") from error
        return {**known, "shards": len(self.shards)}


async def announce() -> None:
    """Have every ingress look which release is live."""
    await ray_serve.get_deployment_handle("ingress").broadcast("refresh").results_async(timeout_s=PREPARE_S)


@ray_serve.ingress()
class Ingress:
    """HTTP, in front of the parts: its own ones, or deployments."""

    def __init__(self, settings: dict[str, Any], parts: dict[str, Any]):
        self.settings = Application(**settings)
        self.parts = parts
        self.service: Service | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        from serve.app import build_app
        from serve.local import open_local

        settings = self.settings
        store = Store(settings.store)
        if self.parts:
            limits = Limits(batch=settings.batch, bound=settings.queue, workers=settings.workers)
            service: Any = ClusterService(store, self.parts, limits)
        else:
            device = "cuda" if settings.encoder.gpus else None
            service = open_local(store, threads=settings.encoder.threads, batch=settings.batch, bound=settings.queue,
                                 compile=settings.compile, device=device)  # fmt: skip
        tokens = Tokens.read(settings.tokens)
        if not tokens and not settings.without_tokens:
            raise InputError("this node finds no tokens: give `tokens` a file that it sees, or set RIPTIDE_USER_TOKENS "
                             "there; `without_tokens: true` where nobody else reaches the port")  # fmt: skip
        self.service, service.announce = service, announce
        await service.refresh()
        return build_app(service, tokens, about=service.about)

    async def refresh(self) -> None:
        """Serve what is live now."""
        if self.service is not None:
            await self.service.refresh()


def build(given: Application | Mapping[str, Any]) -> Any:
    """The application of a store, whose live release it serves. given: a mapping from `serve run` and `serve deploy`.

    Raises InputError where the store has no live release, pydantic's ValidationError for arguments that there are not.
    """
    args = Application.model_validate(given)
    store = Store(args.store).require()
    found = current(store)
    if found is None:
        raise InputError(f"{store.url} has no live release: make one with jobs/serve_search.py --store {store.url}")
    release = Release.load(store, found[0])
    parts = _parts(args, release) if args.topology == "distributed" else {}
    # What waits and what runs in its three queues: it refuses by itself what is more, and nothing waits before it.
    ongoing = 3 * (args.queue + args.workers * args.batch) + SPARE
    scale = args.ingress.model_copy(update={"ongoing": max(args.ingress.ongoing, ongoing)})
    if not parts:  # the encoder stands in it
        scale = scale.model_copy(update={"gpus": max(scale.gpus, args.encoder.gpus)})
    ingress = ray_serve.deployment(name="ingress", **scale.options(target=max(1, args.queue // 2)))(Ingress)
    return ingress.bind(args.model_dump(), parts)


def _parts(args: Application, release: Release) -> dict[str, Any]:
    """A deployment for each part that the release needs, and for each shard."""

    def bound(name: str, kind: str, scale: Scale, **options: Any) -> Any:
        threads = scale.threads or max(1, int(scale.cpus))
        deployment = ray_serve.deployment(name=name, **scale.options())(PartReplica)
        return deployment.bind(kind, args.store, {**options, "threads": threads})

    device = {"device": "cuda"} if args.encoder.gpus else {}
    found = {
        "encoder": bound("encoder", "encoder", args.encoder, compile=args.compile, **device),
        "passages": bound("passages", "passages", args.passages),
    }
    for number in range(args.shards):
        name = f"search-{number:03d}"
        found[name] = bound(name, "search", args.search, number=number, of=args.shards)
    for name in sorted(needed(release)):
        found[name] = bound(name, name, getattr(args, name))
    return found


def needed(release: Release) -> set[str]:
    """Which of the parts that not every release needs this one does."""
    words = any(task.bm25 for task in release.tasks)
    return {name for name, wanted in {"words": words, "reranker": release.reranker is not None}.items() if wanted}


def run_application(args: Application, host: str, port: int, told: Callable[[str], object]) -> None:
    """On the Ray that this process has joined, until SIGTERM or SIGINT. told: of the address, once it answers.

    On loopback only the head listens, as nobody reaches the other nodes. Raises InputError where this is another node.
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
    ray_serve.start(where, http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    try:
        ray_serve.run(build(args), name="riptide", route_prefix="/")
        told(address_of(host, port))
        ended.wait()
    finally:
        ray_serve.shutdown()


def _on_head() -> bool:
    """Whether this process runs on the head of its cluster."""
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and "node:__internal_head__" in node["Resources"] for node in ray.nodes())
