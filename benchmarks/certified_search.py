"""Certified search: how often its intervals cover the recall, and what it costs a server.

    python benchmarks/certified_search.py --json results/certified.json
    python benchmarks/certified_search.py --store S --queries squad --json results/certified.json

Coverage: clustered vectors are searched by inverted lists and exactly, in windows of queries whose distribution drifts,
without a filter and with filters that match 50, 5, 0.5 and 0.1 % of the vectors. Filtered searches read as many lists
as others here, so that recall falls; riptide scores up to 100,000 matching vectors of a shard. The true recall of a
window is that of all of its queries; the interval sees a random sample. Intervals of Student's t, and of
Clopper-Pearson with the sum of the recalls in place of the hits, are compared.

Serving, with --store: two servers, without and with --certify, get the same queries in alternating rounds, from
closed-loop clients, and then from one client that sends a query at regular times. With --recall and --raise, the second
server also gets --certify-recall and --certify-raise, and queries until no setting is raised for a while; the recall of
both is then measured by exact searches of other queries.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import scipy.stats

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.server import stopping
from benchmarks.common.tables import markdown_table
from benchmarks.serving import LoadClient, cpu_seconds, load_requests, measure_load, request, start
from riptide import Store
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.dense.certified_recall import mean_interval, recall_of_hits
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_search import search_shard
from riptide.indexing.exact import exact_search, rescore_candidates

Ends = tuple[float, float]
SHARES = (None, 0.5, 0.05, 0.005, 0.001)  # of the vectors, that filters match
SAMPLES = (10, 30, 100)  # sampled queries of a window
VECTORS, DIM, CENTRES, FACTORY, NPROBE, DEPTH, K = 30_000, 32, 300, "IVF128,SQ8", 4, 100, 10


def student_interval(values: np.ndarray) -> Ends:
    """Returns the 95 % interval of Student's t."""
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return values.mean() - half, values.mean() + half


def binomial_interval(values: np.ndarray) -> Ends:
    """Returns the 95 % interval of Clopper and Pearson, with the sum of the values as the number of successes."""
    count, total = len(values), values.sum()
    lower = scipy.stats.beta.ppf(0.025, total, count - total + 1) if total > 0 else 0.0
    return lower, scipy.stats.beta.ppf(0.975, total + 1, count - total) if total < count else 1.0


METHODS: dict[str, Callable[[np.ndarray], Ends]] = {
    "riptide": lambda values: mean_interval(values)[1:],
    "Clopper-Pearson": binomial_interval,
    "Student's t": student_interval,
}


def drifting_recalls(windows: int, queries: int) -> dict[float | None, np.ndarray]:
    """Returns recall@10 of all queries, by the share that the filter matches: float64 [windows, queries].

    Queries of the first windows are near vectors; from window to window more of them lie between clusters.
    """
    random = np.random.default_rng(0)
    centres = random.standard_normal((CENTRES, DIM))
    vectors = centres[random.integers(0, CENTRES, VECTORS)] + 0.6 * random.standard_normal((VECTORS, DIM))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    index = fill_shard(train_quantizer(vectors.astype(np.float32), FACTORY, seed=0, threads=1), [vectors], 0, threads=1)
    recalls = dict[float | None, np.ndarray]()
    for share in SHARES:
        drift = np.repeat(np.linspace(0, 1, windows), queries)[:, None]
        near = centres[random.integers(0, CENTRES // 3, len(drift))] + 0.6 * random.standard_normal((len(drift), DIM))
        between = near + drift * centres[random.integers(0, CENTRES, len(drift))]
        texts = np.where(random.random((len(drift), 1)) < 0.2 + 0.6 * drift, between, near).astype(np.float32)
        matching = None if share is None else np.sort(random.choice(VECTORS, round(share * VECTORS), replace=False))
        allowed = None if matching is None else RowSet(matching, 0, VECTORS)
        candidates = search_shard(index, texts, DEPTH, effort=NPROBE, allowed_rows=allowed, threads=1)
        hits = rescore_candidates(texts, candidates, [(0, vectors)], K, threads=1)
        deleted = None if matching is None else np.setdiff1d(np.arange(VECTORS), matching)
        exact = exact_search(texts, [(0, vectors)], K, deleted=deleted, threads=1)
        recalls[share] = recall_of_hits(hits, exact).reshape(windows, queries)
    return recalls


def measure_coverage(recalls: dict[float | None, np.ndarray]) -> list[dict[str, Any]]:
    """Returns a row for each filter and size of the sample: coverage and mean width of the intervals by method."""
    random = np.random.default_rng(1)
    rows = []
    for (share, windows), size in itertools.product(recalls.items(), SAMPLES):
        covered = dict.fromkeys(METHODS, 0)
        widths = dict.fromkeys(METHODS, 0.0)
        for window in windows:
            sample = random.choice(window, size, replace=False)
            for method, interval in METHODS.items():
                lower, upper = interval(sample)
                covered[method] += bool(lower <= window.mean() <= upper)
                widths[method] += (upper - lower) / len(windows)
        rows.append(
            {
                "filter": "none" if share is None else f"{share:.1%}",
                "recall": f"{windows[0].mean():.3f} to {windows[-1].mean():.3f}",
                "sample": size,
                **{name: f"{covered[name] / len(windows):.3f}, {widths[name]:.3f}" for name in METHODS},
            }
        )
    return rows


async def pace(port: int, bodies: Sequence[bytes], rate: float, seconds: float) -> list[float]:
    """Sends queries at regular times over one connection each, and returns the latencies in seconds."""
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    clients = list[LoadClient]()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
        requests = itertools.repeat(bodies[number % len(bodies)])
        _, client = await loop.create_connection(lambda requests=requests: LoadClient(requests, 0.0), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return [latency for client in clients for latency in client.latencies]


def certified(port: int) -> dict[str, Any]:
    """Returns what a server has certified: its estimates, the number of sampled queries by outcome, and CPU seconds."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    with urlopen(f"http://127.0.0.1:{port}/v1/info") as answer:
        estimates = json.load(answer)["certified"]
    outcomes = {
        name.partition('outcome="')[2].partition('"')[0]: int(float(value))
        for name, _, value in lines
        if name.startswith("riptide_sampled_queries")
    }
    cpu_s = sum(float(value) for name, _, value in lines if name.startswith("riptide_certification_cpu_seconds"))
    return {"estimates": estimates, "outcomes": outcomes, "cpu_s": cpu_s}


def search_ids(port: int, texts: Sequence[str], mode: str) -> list[set[str]]:
    """Returns the ids of the hits of queries."""
    ids = list[set[str]]()
    for first in range(0, len(texts), 32):
        body = json.dumps({"queries": texts[first : first + 32], "k": K, "mode": mode}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{port}/v1/search", body, headers)) as answer:
            ids += [{hit["id"] for hit in result["hits"]} for result in json.load(answer)["results"]]
    return ids


def raise_settings(port: int, bodies: Sequence[bytes], rate: float, quiet_s: float) -> list[dict[str, Any]]:
    """Sends queries at regular times until no setting has been raised for `quiet_s`; returns the estimates by time."""
    history, raised, started, raised_at = list[dict[str, Any]](), None, time.perf_counter(), time.perf_counter()
    while time.perf_counter() < raised_at + quiet_s:
        asyncio.run(pace(port, bodies, rate, 5.0))
        with urlopen(f"http://127.0.0.1:{port}/v1/info") as answer:
            info = json.load(answer)
        seconds = time.perf_counter() - started
        history.append({"seconds": seconds, "raised": info["raised_settings"], "estimates": info["certified"]})
        if info["raised_settings"] != raised:
            raised, raised_at = info["raised_settings"], time.perf_counter()
            print(json.dumps(history[-1]), flush=True)
    return history


def measure_serving(options: Any) -> dict[str, Any]:
    """Returns the figures of a server without and one with --certify."""
    texts = np.random.default_rng(0).permutation(Store(options.store).queries(options.queries).split("test").texts)
    bodies = [request(text) for text in texts[:4_000].tolist()]
    raises = ("--certify-recall", str(options.recall), "--certify-raise", str(options.raise_)) if options.raise_ else ()
    forms = {"off": (), "on": ("--certify", str(options.share), *raises)}
    figures: dict[str, Any] = {name: {"closed": {}, "p50_ms": [], "p99_ms": [], "cpu_ms": []} for name in forms}
    running: dict[str, Any] = {}
    with stopping(running):
        for name, arguments in forms.items():
            running[name] = start("riptide", options, arguments=arguments)
            asyncio.run(load_requests(running[name][1], 8, 2, bodies))
        if raises:
            figures["on"]["history"] = raise_settings(running["on"][1], bodies, options.rate, options.paced_seconds)
            others = texts[4_000 : 4_000 + options.recall_queries].tolist()
            for name, (_, port) in running.items():
                pairs = zip(search_ids(port, others, "dense"), search_ids(port, others, "exact"), strict=True)
                figures[name]["recall"] = statistics.mean(len(found & exact) / len(exact) for found, exact in pairs)
        for round_number in range(options.rounds):
            order = sorted(running, reverse=bool(round_number % 2))
            for clients, name in itertools.product(options.clients, order):
                load = measure_load(*running[name], clients, options.seconds, bodies)
                figures[name]["closed"].setdefault(clients, []).append(load)
        for round_number in range(options.rounds):
            for name in sorted(running, reverse=bool(round_number % 2)):
                process, port = running[name]
                before, cpu_s, started = certified(port), cpu_seconds(process), time.perf_counter()
                latencies = asyncio.run(pace(port, bodies, options.rate, options.paced_seconds))
                seconds, used_s = time.perf_counter() - started, cpu_seconds(process) - cpu_s
                p50, p99 = (1000 * float(each) for each in np.percentile(latencies, [50, 99]))
                for key, value in (("p50_ms", p50), ("p99_ms", p99), ("cpu_ms", 1000 * used_s / len(latencies))):
                    figures[name][key].append(value)
                after = certified(port)
                shares = figures[name].setdefault("certification_share", [])
                shares.append((after["cpu_s"] - before["cpu_s"]) / seconds)
                figures[name].setdefault("server_share", []).append(used_s / seconds)
        figures["certified"] = certified(running["on"][1])
    for clients in options.clients:
        pairs = list(zip(figures["on"]["closed"][clients], figures["off"]["closed"][clients], strict=True))
        figures.setdefault("ratio", {})[clients] = {
            key: statistics.median(one[key] / other[key] for one, other in pairs) for key in ("qps", "cpu_ms")
        }
    return figures


def main() -> None:
    """Reads the options, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--windows", 200, "windows of the measurement of coverage; 0: none")
    parser.add("--window-queries", 200, "queries of a window")
    parser.add("--store", None, "store with inverted lists, for the measurement of serving; default: none")
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--share", 0.1, "share of the searches that are certified")
    parser.add("--recall", 0.95, "with --raise: recall below which a setting is raised")
    parser.add("--raise", 0, "maximum nprobe or ef_search; 0: no setting is raised", dest="raise_")
    parser.add("--recall-queries", 1_000, "with --raise: queries by which the recall of both servers is measured")
    parser.add("--clients", [1, 8], "numbers of closed-loop clients")
    parser.add("--seconds", 8.0, "seconds of load per server, number of clients and round")
    parser.add("--rate", 10.0, "queries per second of the paced load")
    parser.add("--paced-seconds", 30.0, "seconds of paced load per server and round")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--batch", 32, "maximum queries per batch")
    parser.add("--compile", "never", "whether the encoder is compiled", choices=["auto", "never"])
    parser.add("--json", "results/certified.json", "output file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"cpu": cpu_name(), "options": vars(options)}
    if options.windows:
        figures["coverage"] = rows = measure_coverage(drifting_recalls(options.windows, options.window_queries))
        print(markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows]))
    if options.store:
        figures["serving"] = measure_serving(options)
        print(json.dumps(figures["serving"], indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
