"""Who may ask what: bearer tokens of users and of administrators, and where a server without any may listen."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retriever.errors import InputError

Role = Literal["user", "admin"]
VARIABLES = {"user": "RIPTIDE_USER_TOKENS", "admin": "RIPTIDE_ADMIN_TOKENS"}
LEAST = 16  # characters of a token


@dataclass(frozen=True)
class Tokens:
    """sha256 digests of the tokens of each role; an administrator's is a user's too. None of any: everybody may all."""

    user: frozenset[bytes] = frozenset()
    admin: frozenset[bytes] = frozenset()

    @classmethod
    def read(cls, file: str | None) -> Tokens:
        """From a JSON file {"user": […], "admin": […]}, or else from RIPTIDE_USER_TOKENS and RIPTIDE_ADMIN_TOKENS,
        comma-separated. Raises InputError, which tells no token."""
        if file is None:
            given: dict[str, list[str]] = {
                role: [token.strip() for token in os.environ.get(name, "").split(",") if token.strip()]
                for role, name in VARIABLES.items()
            }
            origin = " and ".join(VARIABLES.values())
        else:
            origin = file
            try:
                document = json.loads(Path(file).read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise InputError(f"--tokens {file}: no such file") from None
            except (OSError, ValueError):
                raise InputError(f"--tokens {file}: cannot be read as JSON") from None
            lists = (
                isinstance(document, dict)
                and set(document) <= set(VARIABLES)
                and all(
                    isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
                    for tokens in document.values()
                )
            )
            if not lists or not any(document.values()):
                raise InputError(f'--tokens {file}: expected {{"user": ["…"], "admin": ["…"]}}')
            given = document
        if any(len(token) < LEAST or not token.isascii() for tokens in given.values() for token in tokens):
            raise InputError(f"{origin}: expected tokens of {LEAST} ASCII characters at least")
        return cls(**{role: frozenset(map(digest, tokens)) for role, tokens in given.items()})

    def __bool__(self) -> bool:
        return bool(self.user or self.admin)

    def allow(self, header: str | None, role: Role) -> bool:
        """Whether an Authorization header lets its sender act in a role. In constant time."""
        if not self:
            return True
        scheme, _, token = (header or "").partition(" ")
        shown = digest(token.strip()) if scheme.lower() == "bearer" else b""
        admin = _among(shown, self.admin)
        user = _among(shown, self.user)
        return admin or (role == "user" and user)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def check_binding(host: str, tokens: Tokens) -> None:
    """Raises InputError for an address that others reach, where there are no tokens."""
    if not is_loopback(host) and not tokens:
        raise InputError(
            f"--host {host}: others reach it, and there are no tokens: give --tokens FILE, or keep to 127.0.0.1"
        )


@functools.lru_cache(256)
def is_loopback(host: str) -> bool:
    """Of a name or an address, without a port."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _among(shown: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(shown, one)
    return found
