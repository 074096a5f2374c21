"""The address of a server: its URL and its listening socket."""

from __future__ import annotations

import errno
import socket

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


def address_of(host: str, port: int) -> str:
    """Returns the URL of a server with this host and port."""
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def open_socket(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises InputError if the address cannot be used."""
    # Event loops set TCP_NODELAY, against Nagle's algorithm, only on sockets with an explicit protocol.
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        listening.close()
        advice = "; give another port, or 0 for a free one" if error.args[0] == errno.EADDRINUSE else ""
        raise InputError(f"{Parameter('host', host)}, {Parameter('port', port)}: {error}{advice}") from error
    return listening
