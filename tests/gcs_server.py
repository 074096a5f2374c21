"""A small server of Google Cloud Storage's XML API, in memory.

The emulators of the package registries write through the JSON API, which obstore does not use. This server follows the
XML API's reference for what a store needs: conditions by x-goog-if-generation-match (0: only if there is no object;
otherwise 412 PreconditionFailed), a new generation for each write, 404 with NoSuchKey or NoSuchBucket, list-type=2 in
pages, ranges, and multipart uploads that appear as one object when they are completed.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 7  # objects of a page of a list; the service returns up to 1,000


@dataclass
class _Object:
    data: bytes
    generation: int
    written: float = field(default_factory=time.time)


class GcsServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        buckets: The objects of each bucket, by name.
        busy_every: Each request whose number is a multiple of it gets 503; 0: none.
        faults: Number of requests that got 503.
        ignores_conditions: Whether writes with a condition are carried out without it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.generation, self.lock = 1_700_000_000_000_000, threading.Lock()
        self.busy_every = self.requests = self.faults = 0
        self.ignores_conditions = False

    @property
    def service_account(self) -> str:
        """The key of a service account that sends clients here and needs no token."""
        address = f"http://127.0.0.1:{self.server_port}"
        fields = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return json.dumps({"gcs_base_url": address, "disable_oauth": True, **fields})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    server: GcsServer
    ERRORS: ClassVar = {
        "NoSuchKey": (404, "The specified key does not exist."),
        "NoSuchBucket": (404, "The specified bucket does not exist."),
        "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold."),
        "ServiceUnavailable": (503, "Please try again."),
    }

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        bucket, _, name = unquote(address.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self.server.requests += 1
            if self.server.busy_every and self.server.requests % self.server.busy_every == 0:
                self.server.faults += 1
                return self.refuse("ServiceUnavailable")
            objects = self.server.buckets.get(bucket)
            if objects is None:
                return self.refuse("NoSuchBucket")
            if "uploads" in query:
                upload = f"upload-{len(self.server.uploads)}"
                self.server.uploads[upload] = {}
                tags = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
                return self.answer(f"<InitiateMultipartUploadResult>{tags}</InitiateMultipartUploadResult>".encode())
            if "uploadId" in query and self.command == "PUT":
                self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return self.answer(b"", ETag='"part"')
            if "uploadId" in query:
                parts = self.server.uploads.pop(query["uploadId"])
                written = self.write(objects, name, b"".join(parts[number] for number in sorted(parts)))
                tags = f'<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><ETag>"{written.generation}"</ETag>'
                content = f"<CompleteMultipartUploadResult>{tags}</CompleteMultipartUploadResult>".encode()
                return self.answer(content, **{"x-goog-generation": str(written.generation)})
            if not name:
                return self.answer_list(objects, query)
            return self.answer_object(objects, name, body)

    def answer_object(self, objects: dict[str, _Object], name: str, body: bytes) -> None:
        """Writes, deletes or returns an object."""
        current = objects.get(name)
        expected = self.headers.get("x-goog-if-generation-match")
        if self.command == "PUT":
            generation = 0 if current is None else current.generation
            if expected is not None and int(expected) != generation and not self.server.ignores_conditions:
                return self.refuse("PreconditionFailed")
            written = self.write(objects, name, body)
            return self.answer(b"", ETag=f'"{written.generation}"', **{"x-goog-generation": str(written.generation)})
        if current is None:
            return self.refuse("NoSuchKey")
        if self.command == "DELETE":
            del objects[name]
            return self.answer(b"", 204)
        headers = {
            "ETag": f'"{current.generation}"',
            "Last-Modified": formatdate(current.written, usegmt=True),
            "x-goog-generation": str(current.generation),
        }
        if bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, end = int(bounds[1]), min(int(bounds[2]), len(current.data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(current.data)}"
            return self.answer(current.data[start : end + 1], 206, **headers)
        return self.answer(current.data, **headers)

    def answer_list(self, objects: dict[str, _Object], query: dict[str, str]) -> None:
        """Returns a page of the objects with a prefix; the token of the next one is the last name."""
        after = max(query.get("continuation-token", ""), query.get("start-after", ""))
        names = sorted(name for name in objects if name.startswith(query.get("prefix", "")) and name > after)
        page = names[: min(PAGE, int(query.get("max-keys", PAGE)))]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name].data)}</Size>"
            f'<ETag>"{objects[name].generation}"</ETag>'
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(objects[name].written))}.000Z"
            "</LastModified></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(names) else ""
        self.answer(f"<ListBucketResult>{more}{entries}</ListBucketResult>".encode())

    def write(self, objects: dict[str, _Object], name: str, data: bytes) -> _Object:
        """Replaces an object by a new generation."""
        self.server.generation += 1
        objects[name] = _Object(data, self.server.generation)
        return objects[name]

    def refuse(self, code: str) -> None:
        status, message = self.ERRORS[code]
        self.answer(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(), status)

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Runs a server during the block."""
    with GcsServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
