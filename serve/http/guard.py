"""The outermost layer of the application: checks the token, the Host header and the body of every request.

A route declares whose token it needs, and the size of its body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.serve.callers import ANONYMOUS, Caller

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Role = Literal["user", "admin"]
AccessRole = Literal["public", Role]
_TOKEN_FILE_ADAPTER = TypeAdapter(dict[Role, list[str | dict[str, Any]]], config=ConfigDict(strict=True))
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_TOKEN_FORM = (
    '{"name": "…", "token": "…", "rate": queries per second, "share": of the queue, up to 1, "quota": queries per day}'
)
_TOKEN_DEFAULTS: dict[str, Any] = {"token": "", "name": "", "rate": None, "share": 1.0, "quota": None}
TOKEN_VARIABLES: dict[Role, str] = {"user": "RIPTIDE_USER_TOKENS", "admin": "RIPTIDE_ADMIN_TOKENS"}
MAX_BODY_BYTES = 24 << 20  # default maximum bytes of a request body: 256 texts of 65,536 ASCII characters fit
MIN_RATE, MAX_RATE = 0.001, 1_000_000  # bounds of the rate of a token, in queries per second
MAX_QUOTA = 10**12  # maximum quota of a token, in queries per day
MIN_SHARE = 0.001  # minimum share of the queues that a token may have
MIN_TOKEN_LENGTH = 16  # minimum number of characters of a token
MAX_RECEIVED_BYTES = 1 << 30  # maximum bytes in memory of the bodies of all requests together
LARGE = 1 << 20  # bytes of body and response from which on the memory of a request is returned to the system
BODY_TIMEOUT_S = 30.0  # maximum seconds between two pieces of a request body
MIN_BODY_BYTES_PER_S = 16 << 10  # minimum bytes per second of a request body after BODY_TIMEOUT_S
FASTAPI_ROUTES = {"/openapi.json"}  # routes that FastAPI adds, which have no @access
CLIENT_DISCONNECTED = 499  # status in metrics of a request whose client has disconnected
# Generates request ids. An id is no secret, and random.Random takes a tenth of the time of the system call of uuid4.
_id_generator = random.Random()


@dataclass(frozen=True)
class Tokens:
    """The SHA-256 digests of each role's tokens. Administrators are also users. Without tokens, everyone is both.

    Attributes:
        user: Those of users.
        admin: Those of administrators.
        owners: The callers to whom the tokens belong, by digest.
    """

    user: frozenset[bytes] = frozenset()
    admin: frozenset[bytes] = frozenset()
    owners: Mapping[bytes, Caller] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, file: str | None) -> Tokens:
        """Reads the tokens of a JSON file {"user": […], "admin": […]}; None: of the environment (TOKEN_VARIABLES).

        A token of a file is a string, or an object with the name and the limits of its owner. Commas separate the
        tokens in a variable. Owners without a name are user-1, admin-2, …

        Raises:
            InputError: If the tokens cannot be used; the message shows no token.
        """
        if file is None:
            roles: dict[Role, list[str | dict[str, Any]]] = {
                role: [*_split(os.environ.get(name, ""))] for role, name in TOKEN_VARIABLES.items()
            }
            origin = " and ".join(TOKEN_VARIABLES.values())
        else:
            origin = f"{Parameter('tokens', file)}"
            try:
                roles = _TOKEN_FILE_ADAPTER.validate_python(json.loads(Path(file).read_text(encoding="utf-8")))
            except FileNotFoundError:
                raise InputError(f"{origin}: no such file") from None
            except ValidationError:
                raise InputError(f'{origin}: expected {{"user": ["…"], "admin": ["…"]}}') from None
            except (OSError, ValueError, RecursionError):
                raise InputError(f"{origin}: cannot be read as JSON") from None
            if not any(roles.values()):
                raise InputError(f'{origin}: expected {{"user": ["…"], "admin": ["…"]}}')
        owners: dict[bytes, Caller] = {}
        digests: dict[Role, set[bytes]] = {role: set() for role in TOKEN_VARIABLES}
        for role, entries in roles.items():
            for number, entry in enumerate(entries, 1):
                token, owner = _read_token(entry, role, number, origin)
                if any(owner.name == other.name for other in owners.values()):
                    raise InputError(f"{origin}: two tokens have the name {owner.name}: expected another name for one")
                digest = token_digest(token)
                if digest in owners:
                    raise InputError(
                        f"{origin}: {owners[digest].name} and {owner.name} have the same token: expected another one "
                        "for one of them; administrators are also users"
                    )
                digests[role].add(digest)
                owners[digest] = owner
        return cls(frozenset(digests["user"]), frozenset(digests["admin"]), owners)

    def __bool__(self) -> bool:
        return bool(self.user or self.admin)

    def owner(self, header: str | None) -> Caller:
        """Returns the owner of the token of an Authorization header; ANONYMOUS if it has no known token."""
        if not self.owners:
            return ANONYMOUS
        return self.owners.get(token_digest((header or "").partition(" ")[2].strip()), ANONYMOUS)

    def allows(self, header: str | None, role: Role) -> bool:
        """Returns whether an Authorization header grants a role, in constant time: it is compared with every token."""
        if not self:
            return True
        scheme, _, token = (header or "").partition(" ")
        shown = token_digest(token.strip()) if scheme.lower() == "bearer" else b""
        is_admin, is_user = (sum(hmac.compare_digest(shown, one) for one in known) for known in (self.admin, self.user))
        return bool(is_admin or (role == "user" and is_user))


def _read_token(entry: str | dict[str, Any], role: Role, number: int, origin: str) -> tuple[str, Caller]:
    """Returns the token of an entry of a list of tokens, and its owner. Raises InputError, which shows no token."""
    fields = {"token": entry, "name": f"{role}-{number}"} if isinstance(entry, str) else entry
    place = f"{origin}: {role} token {number}"
    if "name" not in fields:
        raise InputError(f"{place} has no name, which logs need: expected {_TOKEN_FORM}")
    if unknown := sorted(fields.keys() - _TOKEN_DEFAULTS.keys()):
        field = repr(unknown[0]) if len(unknown[0]) < MIN_TOKEN_LENGTH else f"of {len(unknown[0])} characters"
        raise InputError(f"{place}: unknown field {field}: expected {_TOKEN_FORM}")
    token, name, rate, share, quota = (fields.get(key, default) for key, default in _TOKEN_DEFAULTS.items())
    if not isinstance(token, str) or len(token) < MIN_TOKEN_LENGTH or not token.isascii():
        raise InputError(f"{origin}: expected tokens of at least {MIN_TOKEN_LENGTH} ASCII characters")
    if not isinstance(name, str) or not _OWNER.fullmatch(name):
        raise InputError(f"{place}: expected a name of up to 64 letters, digits, '.', '_', '@' and '-'")
    if rate is not None and not _is_number(rate, MIN_RATE, MAX_RATE):
        raise InputError(
            f"{place}, {name}: rate: found {_describe(rate)}, expected queries per second, a number from {MIN_RATE} to "
            f"{MAX_RATE:,}"
        )
    if not _is_number(share, MIN_SHARE, 1.0):
        raise InputError(f"{place}, {name}: share: found {_describe(share)}, expected a number from {MIN_SHARE} to 1")
    if quota is not None and not (_is_number(quota, 1, MAX_QUOTA) and isinstance(quota, int)):
        raise InputError(
            f"{place}, {name}: quota: found {_describe(quota)}, expected queries per day, a whole number from 1 to "
            f"{MAX_QUOTA:,}"
        )
    return token, Caller(name, rate, share, quota)


def _is_number(value: object, minimum: float, maximum: float) -> bool:
    """Returns whether a value of a JSON document is a number within bounds; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


def _describe(value: object) -> str:
    """Returns the first digits of a number; of any other value, which may be a token, the type."""
    return f"{value!r:.20}" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"


def _split(text: str) -> list[str]:
    """Returns the comma-separated tokens of a text."""
    return [token.strip() for token in text.split(",") if token.strip()]


def token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def token_from_environment() -> str | None:
    """Returns the first token of the environment (TOKEN_VARIABLES), an administrator's if possible, or None."""
    names = [TOKEN_VARIABLES["admin"], TOKEN_VARIABLES["user"]]
    tokens = [token for name in names for token in _split(os.environ.get(name, ""))]
    return next(iter(tokens), None)


def check_binding(host: str, tokens: Tokens) -> None:
    """Raises InputError if other machines can reach the host and there are no tokens."""
    if not is_loopback(host) and not tokens:
        raise InputError(
            f"{Parameter('host', host)}: other machines reach it, and there are no tokens: set {Parameter('tokens')}, "
            "or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Returns whether a host (a name or an address, without a port) is this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True)
class Access:
    """The conditions that a request to a route must meet.

    Attributes:
        role: Whose token it needs; "public": none.
        max_bytes: Maximum bytes of its body.
    """

    role: AccessRole
    max_bytes: int = MAX_BODY_BYTES


UNKNOWN = Access("user")  # access to a path without a route, or with a method that its route lacks


def access(role: AccessRole, *, max_bytes: int = MAX_BODY_BYTES) -> Callable[[Endpoint], Endpoint]:
    """Decorator, below that of a route, which declares the access to the route. Arguments: those of `Access`."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["access"] = Access(role, max_bytes)
        return endpoint

    return declare


class AccessTable:
    """Looks up the access that a request needs by method and path.

    Args:
        routes: All routes of the application (starlette.routing.Route).

    Raises:
        TypeError: If a route does not declare its access.
    """

    def __init__(self, routes: Iterable[Any]):
        self._routes: list[tuple[Any, Access]] = []
        for route in routes:
            route_access = Access("public") if route.path in FASTAPI_ROUTES else route.endpoint.__dict__.get("access")
            if route_access is None:
                raise TypeError(f"{route.path}: the route does not declare who may call it: @access(ROLE)")
            self._routes.append((route, route_access))
        # Access by method and path of each route. A request for a route without parameters needs no matching.
        self._by_path: dict[tuple[str, str], Access] = {
            (method, route.path): route_access for route, route_access in self._routes for method in route.methods or ()
        }

    def find(self, method: str, path: str) -> Access:
        """Returns the access of the route for a method and a path; UNKNOWN if there is no such route.

        A path that is no usual one is matched as Starlette does, which accepts a newline at the end of a path.
        """
        if (declared := self._by_path.get((method, path))) is not None:
            return declared
        for route, declared in self._routes:
            if method in (route.methods or ()) and route.path_regex.match(path):
                return declared
        return UNKNOWN

    def items(self) -> Iterable[tuple[tuple[str, str], Access]]:
        """Returns ((method, path of the route), access) for all routes."""
        return self._by_path.items()


class Refusal(NamedTuple):
    """The status and the message of an error that replaces the response to a request."""

    status: int
    message: str


class Guard:
    """The outermost ASGI application: checks tokens, hosts and sizes. The body of a refused request is not read.

    Without tokens only the names of this machine are accepted as Host. This keeps out web pages whose host name
    resolves to this machine (DNS rebinding).

    Args:
        app: The inner application.
        table: The access that each route declares.
        tokens: Tokens of users and administrators.
        on_response: Called with the route, the status and the seconds of every request.
        on_large: Called at the end of a request whose body and response have at least LARGE bytes.
    """

    def __init__(
        self,
        app: Any,
        table: AccessTable,
        *,
        tokens: Tokens,
        on_response: Callable[[str, int, float], object],
        on_large: Callable[[], object] = lambda: None,
    ):
        self.app, self.table, self.tokens = app, table, tokens
        self.on_response, self.on_large = on_response, on_large
        self.received = 0  # bytes in memory of all bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        access = self.table.find(scope["method"], scope["path"].removeprefix(scope.get("root_path", "")))
        headers = dict(scope["headers"])
        refusal = _repeated_header(scope["headers"]) if len(headers) < len(scope["headers"]) else None
        refusal = refusal or self._refusal(access, headers)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        exchange = _Exchange(self, receive, send, access.max_bytes, refusal)
        state = scope.setdefault("state", {})
        state["request_id"], state["caller"] = exchange.id, self.tokens.owner(authorization)
        try:
            if exchange.refusal is None:
                await self.app(scope, exchange.receive, exchange.send)
            if exchange.refusal is not None:
                await exchange.refuse(exchange.refusal)
        except BaseException:
            exchange.status = 500
            raise
        finally:
            self.received -= exchange.received
            route = getattr(scope.get("route"), "path", "other")
            self.on_response(route, exchange.status, time.perf_counter() - exchange.start)
            if exchange.received + exchange.sent >= LARGE:
                self.on_large()

    def _refusal(self, access: Access, headers: dict[bytes, bytes]) -> Refusal | None:
        """Returns the reason to refuse a request before its body is read, or None."""
        host = _without_port(headers.get(b"host", b"").decode("latin-1"))
        if not self.tokens and not is_loopback(host):
            return Refusal(403, f"host {host[:100]!r}: without tokens only requests from this machine are answered")
        if access.role != "public":
            header = headers.get(b"authorization", b"").decode("latin-1")
            if not self.tokens.allows(header, access.role):
                known = self.tokens.allows(header, "user")
                return (
                    Refusal(403, "an administrator's token is needed")
                    if known
                    else Refusal(401, "no token, or an unknown one")
                )
        # Python's int() refuses thousands of digits, also if they are zeros.
        length, most = headers.get(b"content-length", b"").lstrip(b"0"), b"%d" % access.max_bytes
        is_too_large = length.isdigit() and (len(length), length) > (len(most), most)
        return _too_large_refusal(access.max_bytes) if is_too_large else None


class _Exchange:
    """A request and its response: limits the body, and adds the request id to the response.

    Args:
        guard: The guard, which counts the bytes of all bodies.
        receive: Receives messages from the server.
        send: Sends messages to the server.
        max_bytes: Maximum bytes of the body.
        refusal: The reason to refuse the request; None: it is accepted so far.
    """

    def __init__(self, guard: Guard, receive: Any, send: Any, max_bytes: int, refusal: Refusal | None):
        self._guard, self._receive, self._send, self._max_bytes, self.refusal = guard, receive, send, max_bytes, refusal
        self.start = time.perf_counter()
        self.id = f"{_id_generator.getrandbits(128):032x}"
        self.status = CLIENT_DISCONNECTED
        self.received = 0  # bytes of the body received so far
        self.sent = 0  # bytes of the response sent so far
        self._is_complete = False  # whether the whole body has been received

    async def receive(self) -> Any:
        """Receives a message for the application. If the body exceeds a limit, returns a disconnection instead."""
        # Without this limit, a slow client could occupy a connection and the memory of its body for any time.
        remaining_s = self.start + BODY_TIMEOUT_S + self.received / MIN_BODY_BYTES_PER_S - time.perf_counter()
        try:
            async with asyncio.timeout(None if self._is_complete else min(BODY_TIMEOUT_S, max(0.0, remaining_s))):
                message = await self._receive()
        except TimeoutError:
            text = f"expected the body's next bytes within {BODY_TIMEOUT_S:g} s, at {MIN_BODY_BYTES_PER_S:,} bytes/s"
            self.refusal = Refusal(408, text)
            return {"type": "http.disconnect"}
        self._is_complete = not message.get("more_body", False)
        size = len(message.get("body", b""))
        self.received += size
        self._guard.received += size
        if self.received > self._max_bytes:
            self.refusal = _too_large_refusal(self._max_bytes)
        elif self._guard.received > MAX_RECEIVED_BYTES:
            self.refusal = Refusal(503, "too many large requests at once; try again in a moment")
        return message if self.refusal is None else {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Sends a message of the application, unless the request has been refused."""
        if self.refusal is None:
            await self._forward(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Sends an error instead of the application's response."""
        kind = {408: "timeout_error", 503: "overloaded_error"}.get(refusal.status, "invalid_request_error")
        body = orjson.dumps({"error": {"message": refusal.message, "type": kind, "request_id": self.id}})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status == 503:
            headers.append((b"retry-after", b"1"))
        # The rest of the body is not read, so the connection cannot be used again.
        if refusal.status in (408, 413, 503):
            headers.append((b"connection", b"close"))
        await self._forward({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._forward({"type": "http.response.body", "body": body})

    async def _forward(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
        self.sent += len(message.get("body", b""))
        await self._send(message)


def _repeated_header(headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
    """Refuses a repeated Host or Authorization header: a proxy and the server might each read a different one."""
    counts = Counter(name for name, _ in headers)
    repeated = next((name for name in (b"host", b"authorization") if counts[name] > 1), None)
    return None if repeated is None else Refusal(400, f"expected one {repeated.decode().capitalize()} header")


def _too_large_refusal(max_bytes: int) -> Refusal:
    return Refusal(413, f"expected up to {max_bytes} bytes")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host
