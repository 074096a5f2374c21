"""Limits of HTTP connections and request heads, and the number of connections that a process can hold."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter

DEFAULT_CONNECTIONS = 1_024
# File descriptors for the index, Lucene, the store and the runtime, beyond those that are open at the start.
RESERVED_FILES = 256
# Seconds for the request head of a connection over the limit. A connection within the limit that has waited so long may
# be closed to make room for the request.
SURPLUS_HEAD_S = 2.0
HEALTH_PATHS = (b"/healthz", b"/readyz")  # paths that are answered even on connections over the limit


@dataclass(frozen=True, kw_only=True)
class HttpLimits(OptionGroup):
    """Limits that apply to every client. A server on Ray Serve does not use them, as Ray's HTTP proxy has its own."""

    GROUP: ClassVar = "limits on clients"

    max_connections: int | None = option(None, minimum=1)
    """Maximum connections served at once; default: 1,024, or as many as `ulimit -n` allows. As many more get 2 seconds
    to send a request, and only /healthz and /readyz are answered on them; other requests get 503."""
    max_header_bytes: int = option(32_768, minimum=1_024)
    """Maximum bytes of the headers (and trailers) of one request; more get 431."""
    max_headers: int = option(100, minimum=16)
    """Maximum number of headers (and trailers) of one request; more get 431."""
    max_url_bytes: int = option(8_192, minimum=256)
    """Maximum bytes of a request's URL; longer ones get 414."""
    head_timeout_s: float = option(10.0, minimum=0.1)
    """Maximum seconds for the head of a request, from the connection or from its first byte; 408 after that."""
    idle_timeout_s: float = option(75.0, minimum=1)
    """Seconds that a connection stays open between requests; set it above the idle timeout of a load balancer."""
    write_timeout_s: float = option(30.0, minimum=1)
    """Seconds after which a connection is closed if its client has read less than 16 KiB/s of its response."""


def allowed_connections(max_connections: int | None) -> int:
    """Returns the maximum number of connections to serve, and raises the soft limit of open files if necessary.

    The limit counts two files per connection, as the same number of connections is accepted over the limit.

    Args:
        max_connections: Connections that the user requests; None: the default, or fewer if open files are limited.

    Raises:
        InputError: If the process may not open enough files for `max_connections` connections.
    """
    reserved = RESERVED_FILES + _open_files()
    connections = max_connections or DEFAULT_CONNECTIONS
    needed = reserved + 2 * connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return connections
    room = (soft - reserved) // 2
    if max_connections is not None or room < 1:
        raise InputError(
            f"{Parameter('max_connections', connections)}: {needed:,} open files are needed, the process may open "
            f"{soft:,}: raise the limit (ulimit -n) or allow fewer connections"
        )
    return room


def _open_files() -> int:
    """Returns the number of files that this process has open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
