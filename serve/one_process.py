"""A service in one process, and its HTTP server."""

from __future__ import annotations

import gc
import math
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from riptide.indexing.store.store import Store
from riptide.serve.http.address import address_of, open_socket
from riptide.serve.http.connection_limits import HttpLimits, allowed_connections
from riptide.serve.http.guard import Tokens
from riptide.serve.parts.leaf import Leaf, ask_local_leaves
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service
from riptide.serve.service.service_options import ServiceOptions
from riptide.telemetry.logs import is_json

SWITCH_S = 0.001  # switch interval of threads: seconds after which a thread releases the GIL
GRACE = 30  # seconds that running requests have to finish when the server ends


def favour_event_loop() -> None:
    """Reduces delays of the event loop by other threads; to call when libraries and the first release are loaded.

    The garbage collector ignores all objects that exist now (gc.freeze); a full collection would stop all threads for
    0.25 s. A thread releases the GIL after 1 ms instead of 5 ms, unless a call into C takes longer: beside four busy
    threads the 99th percentile of a small response falls from 210 to 54 ms.
    """
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def open_local(store: Store, options: ServiceOptions, *, device: str, examples: Sequence[str] = ()) -> Service:
    """Opens a service in this process, without a release. It belongs to the running event loop.

    Args:
        store: Where releases and artifacts are.
        options: The options of the service.
        device: Device of models, "cpu" or "cuda".
        examples: Queries that the page offers to try.
    """
    leaf = Leaf(store, threads=options.threads)
    return Service(store, options, partial(ask_local_leaves, [leaf]), leaf.parts, device=device, examples=examples)


async def run_server(
    service: Service,
    tokens: Tokens,
    host: str,
    port: int,
    on_ready: Callable[[str], object],
    limits: HttpLimits | None = None,
) -> None:
    """Answers HTTP until SIGTERM or SIGINT, then finishes running requests and returns.

    Args:
        service: The service. `/healthz` and `/readyz` are answered before its first release is live.
        tokens: Tokens of users and administrators.
        host: Address to listen on.
        port: Port to listen on; 0: any free one.
        on_ready: Called with the server's address when the first release is live.
        limits: Limits of connections and of the heads of requests.

    Raises:
        InputError: If the address cannot be used, or if the limit of open files is too low.
    """
    import uvicorn

    from riptide.serve.app import build_app
    from riptide.serve.http.connections import Connections, bounded_protocol

    limits = limits or HttpLimits()
    connections = Connections(limits, allowed_connections(limits.max_connections))
    app = build_app(ReleaseChanges(service), tokens, connections=connections)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(connections),
        ws="none",
        log_level="error",
        access_log=False,
        log_config=None if is_json() else uvicorn.config.LOGGING_CONFIG,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s) + 1,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        proxy_headers=False,
    )
    # After its shutdown, uvicorn raises once more the signal that ended it; these handlers ignore that signal.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: None)
    with open_socket(host, port) as listening:
        address = address_of(host, listening.getsockname()[1])

        def begin() -> None:
            favour_event_loop()
            on_ready(address)

        service.on_live = begin
        await uvicorn.Server(config).serve([listening])
