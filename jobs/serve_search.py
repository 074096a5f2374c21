"""Serve a store: search, vectors and re-ranking over HTTP, many tasks from one backbone, and a page to try them.

    python jobs/serve_search.py --store data/squad
    python jobs/serve_search.py --store data/squad --rerank models/reranker --tokens tokens.json --host 0.0.0.0

What is served is a release: serving/current.json of the store names it. It is made of what the store holds where there
is none yet, or where --renew asks for that; tasks that are put over HTTP are kept in it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common, run, say

import uvloop

from indexing.store import Store
from retriever.errors import InputError
from serve.release import Opened, Release, current, discard, make_current, plan
from serve.security import Tokens, check_binding


@dataclass(frozen=True, kw_only=True)
class ServeSearch(Common):
    host: str = "127.0.0.1"
    """Where to listen; others than this machine reach it only with --tokens."""
    port: int = 8000
    """0: any that is free."""
    tokens: str | None = None
    """A JSON file {"user": […], "admin": […]}; else RIPTIDE_USER_TOKENS and RIPTIDE_ADMIN_TOKENS, comma-separated."""
    embeddings: str | None = None
    """These names may be left out where the store has one only."""
    index: str | None = None
    bm25: str | None = None
    tasks: list[str] | None = None
    """Prompts to serve, and `default` for the bare backbone; default: all that fit."""
    rerank: str | None = None
    """A cross-encoder: a Hugging Face name, a folder, or models/NAME of the store."""
    renew: bool = False
    """Make a new release of what the store holds now."""
    threads: int | None = None
    """Of the encoder and of each search; default: every core."""
    batch: int = 32
    """Questions that run together, at most."""
    queue: int = 256
    """Questions that wait, at most; more are answered with 429."""
    compile: Literal["auto", "never"] = "never"
    """auto: compile the encoder where that pays (not BERT and its kin on a processor); takes half a minute to start."""
    topology: Literal["local", "colocated", "distributed"] = "local"
    """local: one process, without Ray. On Ray Serve: all parts in one replica, or each in its own."""
    shards: int | None = None
    """Deployments that the vectors are spread over, when distributed; default: 1."""


def main(options: ServeSearch) -> None:
    store = Store(options.store).require()
    tokens = Tokens.read(options.tokens)
    check_binding(options.host, tokens)
    for name in ("batch", "queue", "threads", "shards"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name} {value}: expected at least 1")
    if options.shards is not None and options.topology != "distributed":
        raise InputError(f"--shards {options.shards}: goes with --topology distributed")
    if options.port == 0 and options.topology != "local":
        raise InputError("--port 0: Ray Serve listens where it is told; give a port")
    if options.limit is not None:
        raise InputError("--limit: a service has no rows to leave out")
    found = current(store)
    release, made = choose(store, options, found[0] if found else None)
    say(f"release   {release.id}{' (new)' if made else ''} of {store.url}")
    say(f"backbone  {release.encoder}")
    for task in release.tasks:
        place = f"index/{task.index}" if task.index else f"embeddings/{task.embeddings}"
        say(f"task      {task.name}: {place}{f', bm25/{task.bm25}' if task.bm25 else ''}")
    if options.plan:
        return
    tag = found[1] if found else None
    if options.topology == "local":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(store, options, tokens, release if made else None, tag))
    else:
        if made:
            Opened(store, release)
            begin(store, release, tag)
        serve_on_ray(store, options, tokens)


def choose(store: Store, options: ServeSearch, live: str | None) -> tuple[Release, bool]:
    """The live release, or a new one of what the store holds and the options name; and whether it is new."""
    before = Release.load(store, live) if live else None
    named = any(value is not None for value in (options.embeddings, options.index, options.bm25, options.tasks))
    if before is not None and not options.renew:
        if named or options.rerank:
            raise InputError(f"{store.url} has a live release, {live}: leave out what is to be in one, or add "
                             "--renew")  # fmt: skip
        return before, False
    release, left = plan(store, embeddings=options.embeddings, index=options.index, bm25=options.bm25,
                         tasks=options.tasks, reranker=options.rerank, before=before)  # fmt: skip
    for why in left.values():
        say(f"left out  {why}")
    return release, release.id != live


def begin(store: Store, release: Release, tag: str | None) -> None:
    """Make a release the live one. Raises InputError where another one has become that."""
    if not make_current(store, release, tag):
        raise InputError(f"{store.url}: another release has just become live; run the command again")


async def serve(store: Store, options: ServeSearch, tokens: Tokens, new: Release | None, tag: str | None) -> None:
    """All parts in this process, until it is told to end. new: a release that becomes live once they have opened it."""
    from serve.local import open_local, run_server

    service = open_local(store, threads=options.threads, batch=options.batch, bound=options.queue,
                         compile=options.compile)  # fmt: skip
    if new is not None:
        new.save(store)
        try:
            service.open(new.id)
            begin(store, new, tag)
        except BaseException:
            discard(store, new.id)
            raise
    await service.refresh()
    await run_server(service, tokens, options.host, options.port, told)


def serve_on_ray(store: Store, options: ServeSearch, tokens: Tokens) -> None:
    """On the Ray that is there, or on one that ends with this process."""
    from jobs.session import connect

    # Between deployments gRPC takes a fifth less time than calls of actors. Read where Ray Serve is imported.
    os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
    os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str((1 << 31) - 1))  # of 4 MiB else
    connect(store)
    from serve.deployments import Application, Scale, run_application

    scale = Scale(threads=options.threads, cpus=0)  # one machine: the threads share its cores
    application = Application(
        store=store.url, topology="colocated" if options.topology == "colocated" else "distributed",
        tokens=options.tokens, without_tokens=not tokens, shards=options.shards or 1, batch=options.batch,
        queue=options.queue, compile=options.compile, encoder=scale, search=scale,
        ingress=scale, words=scale, reranker=scale, passages=scale,
    )  # fmt: skip
    run_application(application, options.host, options.port, told)


def told(address: str) -> None:
    say(f"serving   {address} (Ctrl-C ends it)")


if __name__ == "__main__":
    run(main, ServeSearch)
