"""Measures a server while clients upload the prompts that cost the most within the limits of an upload.

    python jobs/store.py export prompts/legal --to legal --store S
    python jobs/serve_search.py --store S
    python benchmarks/hostile_uploads.py --url http://127.0.0.1:8000 --prompt legal

Each upload is a copy of a valid prompt with one costly part. For each kind, the clients send it in a closed loop while
/healthz is requested; the statuses, the slowest /healthz and the slowest upload are printed. Other benchmarks can use
`hostile_uploads` and `request_body`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

Files = tuple[bytes, bytes]  # prompt.safetensors and prompt.json

BOUNDARY = "riptide"
HEADER = 512 << 10  # maximum bytes of a header (serve/registry.py)
SETTINGS = 1 << 20  # maximum bytes of prompt.json (serve/registry.py)
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def hostile_uploads(folder: Path) -> dict[str, Callable[[], Files]]:
    """Returns functions that make the costliest known uploads, by name.

    Args:
        folder: The folder of a valid prompt. Uploads with changed weights have its settings with the right sha256, so
            that the header is read.
    """
    weights, settings = (folder / "prompt.safetensors").read_bytes(), (folder / "prompt.json").read_bytes()

    def with_header(header: str, data: bytes = b"") -> Files:
        content = header.encode()
        changed = len(content).to_bytes(8, "little") + content + data
        return changed, json.dumps({**json.loads(settings), "sha256": hashlib.sha256(changed).hexdigest()}).encode()

    def with_field(text: str) -> Files:
        """The valid weights, and settings in which the field `backbone` is replaced by a JSON text."""
        others = {name: value for name, value in json.loads(settings).items() if name != "backbone"}
        return weights, f'{json.dumps(others)[:-1]}, "backbone": {text}}}'.encode()

    def with_zeros(size: int) -> Files:
        entry = f'{{"dtype":"F32","shape":[1,2,1,{size // 8},1],"data_offsets":[0,{size}]}}'
        return with_header(f'{{"query":{entry}}}', bytes(size))

    room = SETTINGS - len(settings) - 100
    return {
        "the valid prompt": lambda: (weights, settings),
        "one tensor name": lambda: with_header("{" + ",".join([f'"a":{EMPTY}'] * (HEADER // 60)) + "}"),
        "names in pairs": lambda: with_header(
            "{" + ",".join(f'"{n // 2:x}":{EMPTY}' for n in range(HEADER // 60)) + "}"
        ),
        "as many tensors as allowed": lambda: with_header(
            "{" + ",".join(f'"{n:x}":{EMPTY}' for n in range(HEADER // 60)) + "}"
        ),
        "a long tensor name": lambda: with_header(f'{{"{"a" * (HEADER - 100)}":{EMPTY}}}'),
        "a shape of many sizes": lambda: with_header(
            f'{{"a":{{"dtype":"U8","shape":[{"1," * (HEADER // 2 - 100)}1],"data_offsets":[0,1]}}}}', b"0"
        ),
        "metadata of many texts": lambda: with_header(
            '{"__metadata__":{' + ",".join(f'"{n:x}":""' for n in range(HEADER // 12)) + "}}"
        ),
        "a header of lists": lambda: with_header('{"a":[' + "[]," * (HEADER // 3 - 100) + "[]]}"),
        "settings of integers": lambda: with_field("[" + "1," * (room // 2) + "1]"),
        "settings of lists": lambda: with_field("[" + "[]," * (room // 3) + "[]]"),
        "settings of long integers": lambda: with_field("[" + ",".join(["9" * 308] * (room // 310)) + "]"),
        "settings of names": lambda: with_field("{" + ",".join(f'"{n:x}":1' for n in range(room // 11)) + "}"),
        "settings of words": lambda: with_field("[" + ",".join(f'"{n:x}"' for n in range(room // 9)) + "]"),
        "settings of one text": lambda: with_field('"' + "\\n" * (room // 2) + '"'),
        "a prompt of 128 MiB": lambda: with_zeros(128 << 20),
    }


def request_body(files: Files) -> bytes:
    """Returns the multipart body of a PUT request; its content type is `multipart/form-data; boundary=riptide`."""
    parts = b""
    for field, name, content in zip(("prompt", "settings"), ("prompt.safetensors", "prompt.json"), files, strict=True):
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'
        parts += head.encode() + content + b"\r\n"
    return parts + f"--{BOUNDARY}--\r\n".encode()


def send(url: str, body: bytes, token: str | None, timeout_s: float) -> int:
    """Sends an upload, reads the response and returns its status."""
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}/v1/tasks/hostile", body, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            error.read()
        return error.code


def slowest_health(url: str, seconds: float) -> float:
    """Requests /healthz for some seconds, and returns the seconds of the slowest response."""
    slowest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as response:
            response.read()
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.02)
    return slowest


def measure(url: str, body: bytes, options: argparse.Namespace) -> tuple[Counter[str], float, float]:
    """Returns the statuses of uploads, the slowest /healthz and the slowest upload, in seconds."""
    statuses: Counter[str] = Counter()
    slowest, done = 0.0, threading.Event()

    def upload() -> None:
        nonlocal slowest
        while not done.is_set():
            started = time.perf_counter()
            try:
                statuses[str(send(url, body, options.token, options.timeout))] += 1
            except OSError as error:
                statuses[type(error).__name__] += 1
            slowest = max(slowest, time.perf_counter() - started)

    threads = [threading.Thread(target=upload) for _ in range(options.clients)]
    for thread in threads:
        thread.start()
    with ProcessPoolExecutor(1) as prober:  # a process of its own, since the clients share one GIL
        health = prober.submit(slowest_health, url, options.seconds).result()
    done.set()
    for thread in threads:
        thread.join()
    return statuses, health, slowest


def main() -> None:
    """Sends each kind of upload, and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="Address of the server.")
    parser.add_argument("--prompt", required=True, type=Path, help="Folder of a prompt that the server accepts.")
    parser.add_argument("--token", help="An administrator's token, if the server has tokens.")
    parser.add_argument("--clients", type=int, default=32, help="Clients that upload at once (default: %(default)s).")
    parser.add_argument("--seconds", type=float, default=5, help="Duration for each kind (default: %(default)s).")
    parser.add_argument("--timeout", type=float, default=300, help="Seconds for a response (default: %(default)s).")
    parser.add_argument("--only", nargs="*", help="Names of the kinds to send; default: all.")
    options = parser.parse_args()
    url = options.url.rstrip("/")
    for name, make in hostile_uploads(options.prompt).items():
        if options.only and name not in options.only:
            continue
        body = request_body(make())
        statuses, health, slowest = measure(url, body, options)
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        print(
            f"{name} ({len(body) / 2**20:.1f} MiB): slowest /healthz {1000 * health:.0f} ms, slowest upload "
            f"{slowest:.1f} s; {counts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
