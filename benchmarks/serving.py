"""Compares our server under load with FastAPI + sentence-transformers + FAISS, default and tuned, on one machine.

    python benchmarks/serving.py --store S --queries squad --seconds 10 --json results/serving.json

Each server is a separate process on loopback. All get the same queries and return the 10 best passages with their texts
from the same vectors. The clients run closed loops on persistent connections, and the servers alternate in rounds. The
peers are those of `common/peer_server.py`: with default settings; tuned, with the faster exact dtype of this CPU; and
tuned with OpenVINO's int8 (needs --peers). riptide-int8 serves --int8-store, the same passages encoded with --dtype
int8. With another --mode than dense, only servers of riptide can be compared.

The sizes of batches are those that the server's metrics report.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import itertools
import json
import math
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
import torch
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.files import write_json
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.server import start_server, stopping
from riptide import Store
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.retriever.forward.numerics import choose_dtype
from riptide.retriever.model.model_folder import find_model_folder

PEERS = ("peer", "peer-tuned", "peer-openvino")
RAY_SERVERS = ("riptide-replica", "riptide-replica-ray-proxy", "riptide-row-ranges")
SERVERS = (*PEERS, "riptide", "riptide-int8", *RAY_SERVERS)
METRICS_S = 6  # seconds after which Ray has exported what replicas have counted
RAY_METRICS = {"RAY_enable_metrics_collection": "1", "RAY_metrics_report_interval_ms": "1000"}


def write_passages(store: Store, folder: Path) -> str:
    """Writes the vectors and the passages of a store for `peer_server.py`; returns the folder of the encoder."""
    corpus = store.corpus()
    embeddings = Embeddings.open(store, None, corpus)
    vectors = [piece for _, piece in embeddings.read_range(0, embeddings.num_rows)]
    np.save(folder / "vectors.npy", np.concatenate(vectors).astype(np.float32))
    passages = corpus.passages(np.arange(corpus.num_rows))
    texts = [{"id": one.id, "title": one.title, "text": one.text} for one in passages]
    (folder / "passages.json").write_text(json.dumps(texts), encoding="utf-8")
    return str(find_model_folder(embeddings.encoder_name))


def start(
    name: str, options: argparse.Namespace, root: Path = ROOT, arguments: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], int]:
    """Starts a server, waits until it answers, and returns its process and port.

    Args:
        name: One of SERVERS.
        options: The options of the benchmark.
        root: The checkout whose server is started.
        arguments: Further arguments of a riptide server.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if name.startswith("riptide"):
        forms = {"riptide-row-ranges": ("--row-ranges", "4")}
        form = forms.get(name, ("--replicas", "1") if name in RAY_SERVERS else ())
        store = options.int8_store if name == "riptide-int8" else options.store
        command = [str(root / "jobs/serve_search.py"), "--store", store, "--port", str(port)]
        command += ["--batch", str(options.batch), "--compile", options.compile, *form]
        command += arguments
    else:
        folder = Path(tempfile.mkdtemp(prefix="riptide-peer-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        exact = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
        form = {"peer": "default", "peer-tuned": exact, "peer-openvino": "openvino"}[name]
        model = write_passages(Store(options.store), folder)
        command = [str(ROOT / "benchmarks/common/peer_server.py"), form, model, str(folder), str(port)]
    ray_folder = tempfile.mkdtemp(prefix="riptide-ray-", dir="/tmp")  # the path of a socket has at most 107 bytes
    atexit.register(shutil.rmtree, ray_folder, ignore_errors=True)
    environment = {"RAY_TMPDIR": ray_folder, **RAY_METRICS}
    if name.endswith("ray-proxy"):  # instead of HAProxy
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    python = options.peers if name == "peer-openvino" else sys.executable
    process, _ = start_server(root, command, environment, python)
    for _ in range(600):
        try:
            uvloop.run(load(port, 1, 0.0, ["what is a rip current?"]))
            time.sleep(4)  # HAProxy reloads, and closes connections, when it learns of replicas
            return process, port
        except OSError:
            time.sleep(0.2)
    process.terminate()
    raise SystemExit(f"{name} does not answer")


def request(text: str, **fields: Any) -> bytes:
    """Returns a search request. fields: further fields of its body."""
    body = json.dumps({"query": text, "k": 10, **fields}).encode()
    head = (
        f"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


class LoadClient(asyncio.Protocol):
    """A client that sends the next request as soon as it has a response.

    It shares the cores with the server that it measures, so it does little work: it reads only the status and the
    length of a response.

    Attributes:
        latencies: Seconds of each response.
        done: Done when the client has closed its connection; has the exception if it failed.

    Args:
        requests: The requests, shared by all clients.
        seconds: Time after which no request is sent.
    """

    def __init__(self, requests: Iterator[bytes], seconds: float):
        self.requests, self.seconds = requests, seconds
        self.latencies: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.head, self.remaining_bytes = b"", 0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.started_at = transport, time.perf_counter()
        self.send_request()

    def send_request(self) -> None:
        """Sends the next request and notes the time."""
        self.sent_at = time.perf_counter()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        if not self.remaining_bytes:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            if self.head[9:12] != b"200":
                self.transport.abort()
                self.done.set_exception(ConnectionError(f"expected status 200, got {self.head[:200]!r}"))
                return
            [length] = re.findall(rb"(?i)content-length: (\d+)", self.head[:end])
            self.remaining_bytes, data, self.head = int(length), self.head[end + 4 :], b""
        self.remaining_bytes -= len(data)
        if not self.remaining_bytes:
            now = time.perf_counter()
            self.latencies.append(now - self.sent_at)
            if now - self.started_at < self.seconds:
                self.send_request()
            else:
                self.transport.close()
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Returns the CPU time of a server and of all processes that it started and that still run."""
    parent, total = psutil.Process(process.pid), 0.0
    for member in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def batch_counts(name: str, process: subprocess.Popen[str], port: int) -> np.ndarray | None:
    """Returns the batches of searches that a server has formed, and the queries in them; None for a peer."""
    if name in ("riptide", "riptide-int8"):
        address = port
    elif name in RAY_SERVERS:
        time.sleep(METRICS_S)
        folder = Path(psutil.Process(process.pid).environ()["RAY_TMPDIR"], "ray/session_latest")
        [address] = (int(file.read_text()) for file in folder.glob("metrics_export_port_*"))
    else:
        return None
    with urlopen(f"http://127.0.0.1:{address}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    names = ("riptide_search_batches", "riptide_search_batched_items")
    return np.array([sum(one.value for one in samples if one.name.removeprefix("ray_") == name) for name in names])


def measure_load(
    process: subprocess.Popen[str], port: int, clients: int, seconds: float, bodies: Sequence[bytes]
) -> dict[str, float]:
    """Returns the figures of `load_requests`, and "cpu_ms": the CPU time of the server's processes per query."""
    before = cpu_seconds(process)
    figures: dict[str, float] = uvloop.run(load_requests(port, clients, seconds, bodies))
    return figures | {"cpu_ms": 1000 * (cpu_seconds(process) - before) / (figures["qps"] * seconds)}


async def load(port: int, clients: int, seconds: float, texts: list[str], **fields: Any) -> dict[str, Any]:
    """Runs closed-loop clients against a server.

    Args:
        port: Port of the server.
        clients: Number of clients, each with a separate connection.
        seconds: Duration.
        texts: Texts of the queries, which are repeated as needed.
        fields: Further fields of all requests.

    Returns:
        "qps", and the latencies "p50_ms", "p95_ms" and "p99_ms".
    """
    return await load_requests(port, clients, seconds, [request(text, **fields) for text in texts])


async def load_requests(port: int, clients: int, seconds: float, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Runs closed-loop clients that send requests in turn; the other arguments and the result as of `load`."""
    requests = itertools.cycle(bodies)
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    connections = [
        await loop.create_connection(lambda: LoadClient(requests, seconds), "127.0.0.1", port) for _ in range(clients)
    ]
    await asyncio.gather(*(client.done for _, client in connections))
    duration_s = time.perf_counter() - started
    latencies = [latency for _, client in connections for latency in client.latencies]
    p50, p95, p99 = (1000 * float(q) for q in np.percentile(latencies, [50, 95, 99]))
    return {"qps": len(latencies) / duration_s, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with a corpus, embeddings and queries", required=True)
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--servers", ["peer", "peer-tuned", "riptide"], "servers to compare", choices=SERVERS)
    parser.add("--clients", [1, 8, 32], "numbers of concurrent clients")
    parser.add("--seconds", 10.0, "seconds of load per server, number of clients and round")
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--batch", 32, "maximum queries per batch of riptide")
    parser.add("--mode", "dense", "mode of the searches", choices=["dense", "bm25", "hybrid"])
    parser.add("--compile", "never", "whether riptide compiles its encoder", choices=["auto", "never"])
    parser.add("--json", "results/serving.json", "output file")
    parser.add("--peers", None, "Python of the environment of sentence-transformers' int8 form, for peer-openvino")
    parser.add("--int8-store", None, "store with int8 embeddings of the same passages, for riptide-int8")
    options = parser.parse_args()
    for name, needed in (("peer-openvino", "peers"), ("riptide-int8", "int8_store")):
        if name in options.servers and not getattr(options, needed):
            parser.error(f"--servers {name}: expected --{needed.replace('_', '-')}")
    peers = [name for name in options.servers if name in PEERS]
    if options.mode != "dense" and peers:
        parser.error(
            f"--mode {options.mode}: leave {' and '.join(peers)} out of --servers, as peers only search vectors"
        )
    fields = {} if options.mode == "dense" else {"mode": options.mode}  # riptide's default is dense
    texts = Store(options.store).queries(options.queries).split("test").texts
    chosen = np.random.default_rng(0).choice(len(texts), min(4_000, len(texts)), replace=False)
    bodies = [request(texts[number], **fields) for number in chosen]
    running: dict[str, tuple[subprocess.Popen[str], int]] = {}
    results: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in options.servers}
    with stopping(running):
        for name in options.servers:
            running[name] = start(name, options)
            uvloop.run(load_requests(running[name][1], 8, 3, bodies))
        for _ in range(options.rounds):
            for clients in options.clients:
                for name, (process, port) in running.items():
                    batches = batch_counts(name, process, port)
                    figures = measure_load(process, port, clients, options.seconds, bodies)
                    if batches is not None:
                        formed, items = batch_counts(name, process, port) - batches
                        figures["batch"] = items / formed
                    results[name].setdefault(clients, []).append(figures)
    print("server              clients  queries/s   p50 ms   p95 ms   p99 ms   CPU ms    batch")
    for name, by_clients in results.items():
        for clients, rounds in by_clients.items():
            keys = ("qps", "p50_ms", "p95_ms", "p99_ms", "cpu_ms", "batch")
            medians = [statistics.median(figures.get(key, math.nan) for figures in rounds) for key in keys]
            print(f"{name:19} {clients:7} {medians[0]:10.1f} " + " ".join(f"{value:8.1f}" for value in medians[1:]))
    write_json(options.json, {"options": vars(options), "servers": results})


if __name__ == "__main__":
    main()
