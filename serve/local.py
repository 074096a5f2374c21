"""A service of one process: every part stands here, and a call is a call."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

from indexing.store import Store
from retriever.errors import InputError
from serve.engine import Engine
from serve.live import Live
from serve.parts import EncoderPart, Part, PassagesPart, RerankPart, SearchPart, WordsPart
from serve.places import Here, Places
from serve.security import Tokens
from serve.service import Limits, Service

GRACE = 30  # seconds that requests on their way have when it is told to end


class LocalService(Service):
    """A Service whose parts are its own."""

    def __init__(self, store: Store, encoder: EncoderPart, others: dict[str, Part], limits: Limits):
        self.encoder, self.others = encoder, others
        places = Places(encoder=Here(encoder), shards=[Here(others["search"])], passages=Here(others["passages"]),
                        words=Here(others["words"]), reranker=Here(others["reranker"]))  # fmt: skip
        super().__init__(store, Engine(places), prepare=self.open, retire=self.forget, limits=limits)

    def open(self, release_id: str) -> None:
        """Have every part open a release. Raises InputError where one cannot."""
        for part in (self.encoder, *self.others.values()):
            part.prepare(release_id)

    def forget(self, release_id: str) -> None:
        for part in (self.encoder, *self.others.values()):
            part.retire(release_id)

    def about(self, live: Live) -> dict[str, Any]:
        """What `/v1/info` says beside what the release does."""
        return {**self.encoder.describe(live.release.id), "shards": 1}


def open_local(
    store: Store, *, threads: int | None = None, batch: int = 32, bound: int = 256, compile: str = "never",
    device: str | None = None,
) -> LocalService:  # fmt: skip
    """Parts that have opened nothing yet. Belongs to the event loop that it is called in."""
    encoder = EncoderPart(store, threads=threads, device=device, compile=compile)
    others: dict[str, Part] = {
        "search": SearchPart(store, threads=threads),
        "words": WordsPart(store, threads=threads),
        "passages": PassagesPart(store),
        "reranker": RerankPart(store, threads=threads, device=device),
    }
    return LocalService(store, encoder, others, Limits(batch=batch, bound=bound))


async def run_server(
    service: LocalService, tokens: Tokens, host: str, port: int, told: Callable[[str], object]
) -> None:
    """Answer HTTP until SIGTERM or SIGINT; requests that have come are answered first. told: of the address, once it
    listens. Raises InputError where that cannot be had."""
    import uvicorn

    from serve.app import build_app

    app = build_app(service, tokens, about=service.about)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE,
                            server_header=False, proxy_headers=False)  # fmt: skip
    # uvicorn hands the signal that ended it on, once it has ended: to these.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: None)
    with listen(host, port) as listening:
        told(address_of(host, listening.getsockname()[1]))
        await uvicorn.Server(config).serve([listening])


def address_of(host: str, port: int) -> str:
    """Where a server of this host and port is found."""
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def listen(host: str, port: int) -> socket.socket:
    """Raises InputError where the address cannot be had."""
    # The protocol is named, as event loops look at it: without, they leave small packets to wait for one another.
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(f"--host {host} --port {port}: {error}") from error
    return listening
