"""A separate process with an S3 server (moto) that counts requests and bytes, and that can begin with a local store.

    python -m benchmarks.common.counting_s3 [FOLDER [BUCKET]]

prints its URL. With a folder, its files are the first objects of the bucket; the folder itself never changes. GET
/_counts returns the requests by kind and the bytes that objects sent since the last such request.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, unescape

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


TAGGED_BYTES = 64 << 10  # size of a file at most whose object may be replaced by compare-and-swap
FIRST_WRITTEN = "2026-11-29T00:00:00.000Z"  # the time of the last write of the files of the folder


class CountingServer:
    """The WSGI application of moto with counts of its requests.

    It answers plain listings itself from sorted keys, since moto sorts all keys of a bucket for each page. It also
    sends files of the folder, since moto takes kilobytes and milliseconds for a file: moto receives a file at the first
    request that may change its object.

    Args:
        app: The application.
        backend: Its objects.
        folder: The folder whose files are the objects at first; None: there are none.
        bucket: The bucket with these objects, which is made.
    """

    def __init__(self, app: Any, backend: Any, folder: Path | None, bucket: str):
        self.app, self.backend, self.counts = app, backend, Counter[str]()
        self.bucket, self.folder = bucket, folder
        self.sizes: dict[str, int] = {}  # of the files that moto has not received
        self.sorted: dict[str, list[str]] = {}
        self.lock = threading.Lock()
        if folder is not None:
            backend.create_bucket(bucket, "us-east-1")
            for directory, _, files in os.walk(folder):
                for name in files:
                    path = Path(directory, name)
                    self.sizes[path.relative_to(folder).as_posix()] = path.stat().st_size

    def send_file(self, size: int, file: Path, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Answers a request for an object, or for a range of it, that moto has not received."""
        tag = hashlib.md5(file.read_bytes()).hexdigest() if size <= TAGGED_BYTES else "0"  # that of moto
        headers = [("Last-Modified", formatdate(file.stat().st_mtime, usegmt=True)), ("ETag", f'"{tag}"')]
        start, end, status = 0, size, "200 OK"
        if bounds := re.fullmatch(r"bytes=(\d+)-(\d*)", environ.get("HTTP_RANGE", "")):
            start, end, status = int(bounds[1]), min(size, int(bounds[2] or size) + 1), "206 Partial Content"
            headers.append(("Content-Range", f"bytes {start}-{end - 1}/{size}"))
        start_response(status, [*headers, ("Content-Length", str(end - start))])
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        self.counts["bytes"] += end - start
        with open(file, "rb") as stream:
            stream.seek(start)
            return [stream.read(end - start)]

    def receive(self, key: str) -> None:
        """Gives moto the file of an object."""
        assert self.folder is not None
        with self.lock:
            if key in self.sizes:
                self.backend.put_object(self.bucket, key, (self.folder / key).read_bytes())
                del self.sizes[key]

    def list_page(self, bucket: str, query: dict[str, str]) -> bytes:
        """Returns a page of ListObjectsV2."""
        with self.lock:
            return self._list_page(bucket, query)

    def _list_page(self, bucket: str, query: dict[str, str]) -> bytes:
        keys, sizes = self.backend.buckets[bucket].keys, self.sizes if bucket == self.bucket else {}
        names = self.sorted.get(bucket, [])
        if len(names) != len(keys) + len(sizes):
            names = self.sorted[bucket] = sorted({*keys, *sizes})
        prefix, size = query.get("prefix", ""), int(query.get("max-keys", 1000))
        after = query.get("continuation-token") or query.get("start-after", "")
        start = max(bisect.bisect_left(names, prefix), bisect.bisect_right(names, after))
        page = list(itertools.takewhile(lambda name: name.startswith(prefix), names[start : start + size + 1]))
        described = (
            (name, sizes[name], FIRST_WRITTEN)
            if name in sizes
            else (name, keys[name].size, keys[name].last_modified_ISO8601)
            for name in page[:size]
        )
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{length}</Size><LastModified>{written}</LastModified>"
            "<ETag>&quot;0&quot;</ETag><StorageClass>STANDARD</StorageClass></Contents>"
            for name, length, written in described
        )
        is_cut = len(page) > size
        token = f"<NextContinuationToken>{escape(page[size - 1])}</NextContinuationToken>" if is_cut else ""
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page[:size])}</KeyCount>"
            f"<MaxKeys>{size}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{entries}"
            "</ListBucketResult>"
        ).encode()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/_counts":
            body, self.counts = json.dumps(self.counts).encode(), Counter()
            start_response("200 OK", [("Content-Type", "application/json")])
            return [body]
        method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
        kind = "LIST" if method == "GET" and ("list-type" in query or "prefix" in query) else method
        self.counts[kind] += 1
        options = dict(urllib.parse.parse_qsl(query))
        if kind == "LIST" and options.get("list-type") == "2" and "delimiter" not in options:
            body = self.list_page(environ["PATH_INFO"].strip("/"), options)
            start_response("200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        size = self.sizes.get(key) if bucket == self.bucket else None
        if size is not None and self.folder is not None:
            if method in ("GET", "HEAD"):
                return self.send_file(size, self.folder / key, environ, start_response)
            self.receive(key)
        if method == "POST" and query.startswith("delete"):
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            with self.lock:
                for deleted in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                    self.sizes.pop(unescape(deleted), None)

        def started(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if kind == "GET" and status.startswith("2"):
                self.counts["bytes"] += int({name.lower(): value for name, value in headers}["content-length"])
            return start_response(status, headers, *more)

        return self.app(environ, started)


@contextlib.contextmanager
def counting_s3(folder: Path | None = None, bucket: str = "store") -> Iterator[str]:
    """Runs the server within the block; the AWS variables name it. Yields its URL."""
    command = [sys.executable, "-u", "-m", "benchmarks.common.counting_s3", *([str(folder), bucket] if folder else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    before = {name: os.environ.get(name) for name in (*VARIABLES, "AWS_ENDPOINT_URL")}
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise RuntimeError("moto's server did not start")
        os.environ.update(VARIABLES, AWS_ENDPOINT_URL=address.group())
        while True:
            with contextlib.suppress(OSError):
                take_counts()
                break
            time.sleep(0.05)
        yield address.group()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        process.kill()
        process.wait()


def take_counts() -> dict[str, int]:
    """Returns the counts since the last call: requests by kind (GET, HEAD, LIST, PUT, …), and bytes of objects."""
    with urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/_counts") as answer:
        counts: dict[str, int] = json.load(answer)
        return counts


def main() -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    folder, bucket = (Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else (None, "")
    backend = s3_backends["123456789012"]["aws"]
    app = CountingServer(DomainDispatcherApplication(create_backend_app), backend, folder, bucket)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
