"""The worst known requests to the server, by name. To add one, add an entry to `REQUESTS`, or to uploads.py."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

MIB = 1 << 20
LARGEST = 24 * MIB  # bytes of a body of JSON
LARGEST_UPLOAD = 256 * MIB
TEXT = 65_536  # characters of the longest text
QUERY = 8_192  # characters of the longest query
BOUNDARY = b"riptide-boundary"


@dataclass(frozen=True)
class Hostile:
    """A request.

    Attributes:
        method: "POST" or "PUT".
        path: The path.
        content_type: The content type.
        body: The body.
    """

    method: str
    path: str
    content_type: str
    body: bytes

    def message(self) -> tuple[bytes, bytes]:
        """Returns the head and the body."""
        head = (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode(), self.body


def _json(path: str, body: bytes) -> Hostile:
    return Hostile("POST", path, "application/json", body)


def _embeddings(text: str, count: int | None = None, model: str = "default") -> Hostile:
    """Returns a request for embeddings of one text `count` times; None: as often as it fits the largest body."""
    encoded = json.dumps(text, ensure_ascii=False).encode()
    count = count or min(256, (LARGEST - 200) // (len(encoded) + 1))
    fields = json.dumps({"model": model, "timeout_ms": 60_000, "input": 0}).encode()
    return _json("/v1/embeddings", fields[:-2] + b"[" + b",".join([encoded] * count) + b"]}")


def _searches(text: str, task: str, **fields: object) -> Hostile:
    """Returns a search of 64 queries."""
    document = {"task": task, "queries": [text] * 64, "timeout_ms": 60_000, **fields}
    return _json("/v1/search", json.dumps(document, ensure_ascii=False).encode())


def _filled(path: str, start: bytes, unit: bytes, end: bytes, size: int = LARGEST) -> Hostile:
    """Returns a request whose body is filled up with one piece of JSON."""
    return _json(path, start + unit * ((size - len(start) - len(end)) // len(unit)) + end)


def upload(weights: bytes, settings: bytes, *, end: bool = True) -> Hostile:
    """Returns an upload of a prompt."""
    parts = b""
    for name, content in (("prompt", weights), ("settings", settings)):
        disposition = b'Content-Disposition: form-data; name="%b"; filename="%b"' % (name.encode(), name.encode())
        parts += b"--" + BOUNDARY + b"\r\n" + disposition + b"\r\n\r\n" + content + b"\r\n"
    body = parts + (b"--" + BOUNDARY + b"--\r\n" if end else b"")
    return Hostile("PUT", "/v1/tasks/hostile", f"multipart/form-data; boundary={BOUNDARY.decode()}", body)


def _safetensors(header: bytes, size: int = 0) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(size)


def _repeated_names(size: int) -> bytes:
    """Returns the header of a safetensors file that names one tensor again and again."""
    one = b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    return b"{" + (one * (size // len(one)))[:-1] + b"}"


def _many_names(size: int) -> bytes:
    """Returns the header of a safetensors file with as many tensors as fit."""
    one = b'"%08d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    return b"{" + b"".join(one % number for number in range(size // 60))[:-1] + b"}"


def _unknown_fields() -> Hostile:
    fields = b",".join(b'"%06x":0' % number for number in range(LARGEST // 12))
    return _json("/v1/search", b"{" + fields + b',"query":"a"}')


def _small_parts() -> Hostile:
    """Returns an upload of many fields with many headers."""
    header = b"X-Header: 1\r\n" * 7
    part = b'--%b\r\nContent-Disposition: form-data; name="a"\r\n%b\r\n1\r\n' % (BOUNDARY, header)
    body = part * 900 + b"--" + BOUNDARY + b"--\r\n"
    return Hostile("PUT", "/v1/tasks/hostile", f"multipart/form-data; boundary={BOUNDARY.decode()}", body)


def _long_index() -> Hostile:
    """Returns an upload whose index has a name of almost 1 MiB."""
    whole = upload(_safetensors(b"{}"), SETTINGS)
    field = b'--%b\r\nContent-Disposition: form-data; name="index"\r\n\r\n%b\r\n' % (BOUNDARY, b"/a" * 500_000)
    return replace(whole, body=field + whole.body)


def _long_header() -> Hostile:
    body = b"--" + BOUNDARY + b"\r\nX-Header: " + b"a" * (64 * MIB)
    return Hostile("PUT", "/v1/tasks/hostile", f"multipart/form-data; boundary={BOUNDARY.decode()}", body)


MARKS = ("a" + "\u0301\u0323" * TEXT)[:TEXT]
WORDS = ("ab cd ef gh " * TEXT)[:TEXT]
SETTINGS = b'{"backbone": {}, "options": {}}'

REQUESTS: Mapping[str, Callable[[], Hostile]] = {
    "marks, 4 texts, topics": lambda: _embeddings(MARKS, 4, "topical"),
    "marks, 24 MiB, topics": lambda: _embeddings(MARKS, model="topical"),
    "marks, 24 MiB": lambda: _embeddings(MARKS),
    "marks, 64 queries, topics": lambda: _searches(MARKS[:QUERY], "topical", mode="exact"),
    "marks, 64 queries, computed": lambda: _searches(MARKS[:QUERY], "computed", mode="exact"),
    "marks, 64 queries, BM25": lambda: _searches(MARKS[:QUERY], "default", mode="bm25"),
    "words, 16 MiB, topics": lambda: _embeddings(WORDS, model="topical"),
    "words, 64 queries, BM25": lambda: _searches(WORDS[:QUERY], "default", mode="bm25"),
    "words, 64 queries, computed": lambda: _searches(WORDS[:QUERY], "computed", mode="exact"),
    "ideographs, 24 MiB": lambda: _embeddings("深" * TEXT),
    "emoji, 24 MiB": lambda: _embeddings("😀" * TEXT),
    "ligatures, 24 MiB, topics": lambda: _embeddings("\ufdfa" * TEXT, model="topical"),
    "64 x 1,000 hits": lambda: _searches("a river", "default", mode="hybrid", k=1_000),
    "escaped text, 24 MiB": lambda: _filled("/v1/embeddings", b'{"input":"', b"a\\n", b'"}'),
    "escaped texts, 24 MiB": lambda: _filled(
        "/v1/embeddings", b'{"input":[', b'"' + b"\\u00e9" * 65_000 + b'",', b'"a"]}'
    ),
    "numbers, 24 MiB": lambda: _filled("/v1/embeddings", b'{"input":[', b"1,", b"1]}"),
    "empty lists, 24 MiB": lambda: _filled("/v1/embeddings", b'{"input":[', b"[[]],", b"[]]}"),
    "empty lists, 127 KiB": lambda: _filled("/v1/embeddings", b'{"input":[', b"[[]],", b"[]]}", 127 << 10),
    "empty lists, 4 KiB": lambda: _filled("/v1/embeddings", b'{"input":[', b"[[]],", b"[]]}", 4 << 10),
    "short texts, 24 MiB": lambda: _filled("/v1/embeddings", b'{"input":[', b'"a",', b'"a"]}'),
    "unknown fields, 24 MiB": _unknown_fields,
    "field name, 24 MiB": lambda: _filled("/v1/search", b'{"query":"a","', b"x", b'":1}'),
    "filter values, 24 MiB": lambda: _filled("/v1/search", b'{"query":"a","filter":{"x":[', b"1,", b"1]}}"),
    "filter name, 24 MiB": lambda: _filled("/v1/search", b'{"query":"a","filter":{"', b"\\n", b'":1}}'),
    "filter text, 24 MiB": lambda: _filled("/v1/search", b'{"query":"a","filter":{"x":"', b"x", b'"}}'),
    "spaces, 24 MiB": lambda: _filled("/v1/search", b'{"query":"a","k":', b" ", b"1}"),
    "documents, 24 MiB": lambda: _filled(
        "/v1/rerank", b'{"query":"a","documents":[', b'"' + b"ab cd " * 4_000 + b'",', b'"a"]}'
    ),
    "release, 24 MiB": lambda: Hostile("PUT", "/v1/release", "application/json", b"[" * LARGEST),
    "release of numbers, 24 MiB": lambda: Hostile(
        "PUT", "/v1/release", "application/json", b"[" + b"1," * (LARGEST // 2 - 2) + b"1]"
    ),
    "upload, 255 MiB": lambda: upload(bytes(LARGEST_UPLOAD - MIB), SETTINGS),
    "upload of near boundaries": lambda: upload(b"\r\n--riptide-boundar" * (MIB // 2), SETTINGS),
    "upload of line ends": lambda: upload(b"\r\n" * (8 * MIB), SETTINGS),
    "upload of small parts": _small_parts,
    "upload of a long header": _long_header,
    "upload of form fields": lambda: Hostile(
        "PUT", "/v1/tasks/hostile", "application/x-www-form-urlencoded", b"a&" * (32 * MIB)
    ),
    "upload as a form with one field": lambda: Hostile(
        "PUT", "/v1/tasks/hostile", "application/x-www-form-urlencoded", b"a=" + b"%41" * MIB
    ),
    "upload, a long index": _long_index,
    "upload, a name repeated": lambda: upload(_safetensors(_repeated_names(int(3.4 * MIB))), SETTINGS),
    "upload, many names": lambda: upload(_safetensors(_many_names(32 * MIB)), SETTINGS),
    "upload, deep settings": lambda: upload(_safetensors(b"{}"), b"[" * MIB),
    "upload, numbers as settings": lambda: upload(_safetensors(b"{}"), b"[" + b"1," * (MIB // 2 - 2) + b"1]"),
    "upload, largest settings": lambda: upload(_safetensors(b"{}"), b"[" + b"1," * (32 * MIB) + b"1]"),
    "upload, a digit repeated": lambda: upload(_safetensors(b"{}"), b'{"backbone": ' + b"1" * (MIB - 100) + b"}"),
}
