"""The service on Ray Serve: the same parts, all in one replica or each in its own deployment.

    serve run serve.deployments:build store=data/squad tokens=tokens.json               # co-located
    serve run serve.deployments:build store=data/squad tokens=tokens.json topology=distributed shards=4

Each replica of a part opens the live release when it starts, and other releases when the service has them opened or
sends the first request for them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
import ray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve as ray_serve
from ray.serve.config import ProxyLocation

from indexing.hit_sources.registry import find_online, online_searches
from indexing.store import Store
from retriever.errors import InputError
from serve.calls.protocols import (
    Clients,
    Encoded,
    EncodeRequest,
    LostError,
    Passage,
    PassagesRequest,
    ScoreRequest,
    SourceHits,
    SourceRequest,
)
from serve.calls.remote import (
    PREPARE_S,
    RemoteEncoder,
    RemotePart,
    RemotePassages,
    RemoteReranker,
    RemoteSearcher,
)
from serve.engine import Engine
from serve.health.failures import UndeployedPartError
from serve.health.states import ENCODER, PASSAGES, RERANKER, searching_parts
from serve.health.warm_up import WarmUpLimits
from serve.live import Live
from serve.local import address_of
from serve.parts import EncoderPart, Part, PassagesPart, RerankPart, SourcePart
from serve.protocol import MOST_MS
from serve.release import Release, current
from serve.security import Tokens, is_loopback
from serve.service import LOOK, Limits, Service, favour_event_loop

LINGER_S = MOST_MS / 1000 + 2 * LOOK  # seconds for which other ingresses may have requests of the previous release
SPARE = 64  # requests that an ingress accepts in addition to those for its queues
TOGETHER = 2  # batches that a replica works on at once: one computes while the other is read or sent
KEEP_ALIVE_S = 75  # seconds that Ray's proxy keeps an idle connection open
REQUEST_S = PREPARE_S + 600  # seconds of the longest request, which opens and warms a release
DEPLOYMENTS = {ENCODER: "encoder", PASSAGES: "passages", RERANKER: "reranker"}  # of the parts without sources
Request = TypeVar("Request")
Result = TypeVar("Result")


class Scale(BaseModel):
    """Number of replicas of a deployment, and the resources of each.

    Attributes:
        replicas: Number of replicas; the minimum if `most` is set.
        most: Maximum number of replicas of an autoscaled deployment; None: always `replicas`.
        cpus: CPUs per replica.
        gpus: GPUs per replica, or the share of one GPU; 0: models run on the CPU.
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
        sources: Scale of other parts that search sources, by the name of the deployment.
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
    sources: dict[str, Scale] = Field(default={}, description="Scales of other parts that search sources, by name.")

    @field_validator("sources")
    @classmethod
    def _known(cls, sources: dict[str, Scale]) -> dict[str, Scale]:
        """Raises ValueError for a name that is no deployment, or that has a separate argument."""
        names = {online.deployment for online in online_searches()} - {"search", "words"}
        if unknown := sorted(sources.keys() - names):
            expected = ", ".join(sorted(names)) or "no names"
            raise ValueError(
                f"{', '.join(unknown)}: expected {expected}; dense search and BM25 have the arguments search and words"
            )
        return sources

    def scale_of(self, deployment: str) -> Scale:
        """Returns the scale of a part that searches sources."""
        named = {"search": self.search, "words": self.words}
        return named.get(deployment) or self.sources.get(deployment, Scale())


def reserved_device() -> str:
    """Returns "cuda" if the replica that runs this has reserved a GPU or a share of one, else "cpu".

    Which GPUs torch sees says nothing about that: Ray hides none from a replica without GPUs.
    """
    return "cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else "cpu"


class PartReplica:
    """A replica of one part on Ray Serve. Batches run in threads, so that a release can be opened meanwhile.

    Args:
        part: The part.
    """

    def __init__(self, part: Part):
        self.part = part
        self._work = ThreadPoolExecutor(TOGETHER)
        self._admin = ThreadPoolExecutor(1)
        if live := current(part.store):
            part.prepare(live[0])

    async def prepare(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.prepare, release_id)

    async def read(self, release_id: str, budget: int | None, seconds: float) -> int:
        return await asyncio.to_thread(self.part.read, release_id, budget, seconds)

    async def check(self, release_id: str) -> None:
        await asyncio.to_thread(self.part.check, release_id)

    async def retire(self, release_id: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._admin, self.part.retire, release_id)

    async def _answer(self, method: Callable[[Request], Result], request: Request) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._work, method, request)


class EncoderReplica(PartReplica):
    """A replica of the encoder."""

    def __init__(self, store: str, options: Mapping[str, Any]):
        self.encoder = EncoderPart(Store(store), device=reserved_device(), **options)
        super().__init__(self.encoder)

    async def encode(self, request: EncodeRequest) -> Encoded:
        return await self._answer(self.encoder.encode, request)

    async def describe(self, release: str) -> dict[str, Any]:
        return await self._answer(self.encoder.describe, release)


class SourceReplica(PartReplica):
    """A replica of a shard that searches sources. name: of the part."""

    def __init__(self, store: str, name: str, options: Mapping[str, Any]):
        self.searcher = SourcePart(Store(store), find_online(name), device=reserved_device(), **options)
        super().__init__(self.searcher)

    async def search(self, request: SourceRequest) -> SourceHits:
        return await self._answer(self.searcher.search, request)


class PassagesReplica(PartReplica):
    """A replica of the passages."""

    def __init__(self, store: str, options: Mapping[str, Any]):
        self.passages = PassagesPart(Store(store), **options)
        super().__init__(self.passages)

    async def fetch(self, request: PassagesRequest) -> list[Passage]:
        return await self._answer(self.passages.fetch, request)


class RerankerReplica(PartReplica):
    """A replica of the re-ranker."""

    def __init__(self, store: str, options: Mapping[str, Any]):
        self.reranker = RerankPart(Store(store), device=reserved_device(), **options)
        super().__init__(self.reranker)

    async def score(self, request: ScoreRequest) -> np.ndarray:
        return await self._answer(self.reranker.score, request)


class ClusterService(Service):
    """A Service whose parts run in Ray Serve deployments. handles: by name of the deployment."""

    def __init__(self, store: Store, handles: Mapping[str, Any], limits: Limits, warm_up: WarmUpLimits | None = None):
        searchers = {
            online.name: shards for online in online_searches() if (shards := _handles_of(online.deployment, handles))
        }
        self.encoder = RemoteEncoder(handles["encoder"]) if "encoder" in handles else None
        self.num_shards = max(map(len, searchers.values()), default=0)
        clients = Clients(
            self.encoder,
            {name: [RemoteSearcher(handle) for handle in shards] for name, shards in searchers.items()},
            RemotePassages(handles["passages"]),
            RemoteReranker(handles["reranker"]) if "reranker" in handles else None,
        )
        single = {part: [handles[name]] for part, name in DEPLOYMENTS.items() if name in handles}
        parts = {name: RemotePart(shards) for name, shards in {**searchers, **single}.items()}
        super().__init__(store, Engine(clients), parts, limits=limits, linger=LINGER_S, is_local=False, warm_up=warm_up)

    def open(self, release_id: str) -> None:
        """Opens a release in every replica.

        Raises:
            InputError: If a replica cannot open it.
            UndeployedPartError: If the release needs a part that was not deployed.
        """
        release = Release.load(self.store, release_id)
        for part, name in sorted(needed(release).items(), key=lambda item: item[1]):
            if part not in self.parts:
                raise UndeployedPartError(f"release {release_id} needs {name}, which this service was deployed without:"
                                          " deploy it again while that release is live")  # fmt: skip
        super().open(release_id)

    def about(self, live: Live) -> dict[str, Any]:
        """Returns further fields of `/v1/info`. Raises LostError if the encoder does not answer."""
        if live.release.encoder is None or self.encoder is None:
            return {"shards": self.num_shards}
        try:
            known = self.encoder.describe(live.release.id).result(timeout_s=10)
        except TimeoutError as error:
            raise LostError("encoder") from error
        return {**known, "shards": self.num_shards}


def _handles_of(deployment: str, handles: Mapping[str, Any]) -> list[Any]:
    """Returns the handles of a part that searches sources, in the order of its shards."""
    names = [name for name in sorted(handles) if re.fullmatch(re.escape(deployment) + r"(-\d{3,})?", name)]
    return [handles[name] for name in names]


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
        from serve.ray_metrics import RayExporter

        settings = self.settings
        store = Store(settings.store)
        warm_up = WarmUpLimits(total_s=settings.warm_up_s)
        if self.parts:
            limits = Limits(batch=settings.batch, bound=settings.queue, workers=settings.workers)
            service: Any = ClusterService(store, self.parts, limits, warm_up)
        else:
            service = open_local(
                store,
                device=reserved_device(),
                threads=settings.encoder.threads,
                batch=settings.batch,
                bound=settings.queue,
                compile=settings.compile,
                warm_up=warm_up,
            )
        tokens = Tokens.read(settings.tokens)
        if not tokens and not settings.without_tokens:
            raise InputError("this node finds no tokens: give `tokens` a file that it sees, or set RIPTIDE_USER_TOKENS "
                             "there; `without_tokens: true` where nobody else reaches the port")  # fmt: skip
        self.service, service.announce = service, announce
        await service.refresh()
        favour_event_loop()
        return build_app(service, tokens, about=service.about, exporter=RayExporter())

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
    if not parts:  # the ingress contains all models
        models = (args.encoder, args.reranker, *args.sources.values())
        scale = scale.model_copy(update={"gpus": max(scale.gpus, *(model.gpus for model in models))})
    ingress = ray_serve.deployment(name="ingress", **scale.options(target=max(1, args.queue // 2)))(Ingress)
    return ingress.bind(args.model_dump(), parts)


def _parts(args: Application, release: Release) -> dict[str, Any]:
    """Returns a deployment for each part that the release needs, and for each shard."""

    def bound(name: str, replica: type[PartReplica], scale: Scale, *arguments: Any, **options: Any) -> Any:
        threads = scale.threads or max(1, int(scale.cpus))
        deployment = ray_serve.deployment(name=name, **scale.options())(replica)
        return deployment.bind(args.store, *arguments, {**options, "threads": threads})

    deployments = {"passages": bound("passages", PassagesReplica, args.passages)}
    if release.encoder is not None:
        deployments["encoder"] = bound("encoder", EncoderReplica, args.encoder, compile=args.compile)
    for part in searching_parts(release):
        online = find_online(part)
        for number in range(args.shards if online.is_sharded else 1):
            name = f"{online.deployment}-{number:03d}" if online.is_sharded else online.deployment
            shard = {"number": number, "of": args.shards} if online.is_sharded else {}
            deployments[name] = bound(name, SourceReplica, args.scale_of(online.deployment), part, **shard)
    if release.reranker is not None:
        deployments["reranker"] = bound("reranker", RerankerReplica, args.reranker)
    return deployments


def needed(release: Release) -> dict[str, str]:
    """Returns the deployments that a release needs besides those that every release needs, by part."""
    parts = {part: find_online(part).deployment for part in searching_parts(release)}
    parts |= {ENCODER: "encoder"} if release.encoder is not None else {}
    return parts | ({RERANKER: "reranker"} if release.reranker is not None else {})


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
