"""Compares the speed of two checkouts of riptide on this machine, in alternating rounds of one run.

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py --before ../before --store S --before-store T --queries squad --rounds 9

It compares encoding, exact search of 1,000 queries in 200,000 vectors of 384 dimensions, and imports of --import-rows
rows in several formats, as jobs including their start. With a store it also compares the job `search --mode bm25`
including its start, training steps of `tune_prompts` (with --negatives), the job `mine_negatives` including its start
(with --sources), and serving, in each of the --modes. --only NAME … runs a part of
this. A release that one checkout has written may have fields that the other does not know, so give each one a copy of
the store if they serve (--before-store); with --embeddings, each makes a release of these.

Both checkouts run with the packages of this virtual environment. Each side is one process for all rounds, except for
jobs, which are started in each round. A round gives both sides the same work one after the other, and the order
alternates between rounds. The ratio of a round is the speed of this checkout divided by that of the other one; the
median over the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv as pc
import pyarrow.parquet as pq
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.server import stopping
from benchmarks.encode import read_passages
from benchmarks.import_corpus import HEADERS, write_rows
from benchmarks.serving import load, start

COMPARISONS = ("encoding", "exact", "import", "bm25", "training", "mining", "serving")
ENCODE = """
import json, sys, time
from riptide import Encoder
encoder = Encoder(sys.argv[1], threads=int(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    encoder.encode(texts, side="passage")
    print(time.perf_counter() - start, flush=True)
"""
EXACT = """
import sys, time
import numpy as np
from riptide import exact_search
random = np.random.default_rng(0)
vectors = random.standard_normal((200_000, 384), dtype=np.float32)
vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
queries = random.standard_normal((1_000, 384), dtype=np.float32)
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    exact_search(queries, [(0, vectors)], 100, threads=int(sys.argv[1]))
    print(time.perf_counter() - start, flush=True)
"""


def start_side(checkout: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program in a checkout and waits until it is ready.

    Args:
        checkout: Folder of the checkout.
        program: ENCODE or EXACT. It reads lines of work, and prints the seconds that each took.
        arguments: Arguments of the program.

    Returns:
        The process.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"the process of {checkout} did not start")
    return process


def seconds_of(process: subprocess.Popen[str], work: list[str]) -> float:
    """Returns the seconds that a process of `start_side` takes for the work: texts to encode, or nothing."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def alternating_order(rounds: int) -> list[tuple[str, str]]:
    """Returns the order of the two sides for each round."""
    return [("before", "now") if number % 2 else ("now", "before") for number in range(rounds)]


def compare_sides(before: Path, work: list[list[str]], program: str, *arguments: str) -> list[float]:
    """Compares a program in both checkouts.

    Args:
        before: Folder of the other checkout.
        work: Work for the warm-up, then for each round.
        program: ENCODE or EXACT.
        arguments: Arguments of the program.

    Returns:
        The ratio of speeds, now to before, of each round.
    """
    checkouts = {"now": ROOT, "before": before}
    sides = {name: start_side(checkout, program, *arguments) for name, checkout in checkouts.items()}
    try:
        for process in sides.values():
            seconds_of(process, work[0])
        ratios = []
        for order, item in zip(alternating_order(len(work) - 1), work[1:], strict=True):
            seconds = {name: seconds_of(sides[name], item) for name in order}
            ratios.append(seconds["before"] / seconds["now"])
        return ratios
    finally:
        for process in sides.values():
            process.kill()
            process.wait()


def compare_encoding(options: argparse.Namespace) -> list[float]:
    """Returns the ratio of passages per second, now to before, of each round."""
    titles_and_texts = read_passages(options.data, options.passages, options.rounds + 1)
    rounds = [[f"{title} {text}".strip() for title, text in zip(*part, strict=True)] for part in titles_and_texts]
    return compare_sides(options.before, rounds, ENCODE, options.model, str(options.threads))


def compare_exact(options: argparse.Namespace) -> list[float]:
    """Returns the ratio of queries per second, now to before, of each round."""
    return compare_sides(options.before, [[]] * (options.rounds + 1), EXACT, str(options.threads))


def job_seconds(checkout: Path, job: str, *arguments: str) -> float:
    """Returns the seconds that a job of a checkout takes, start included."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, f"jobs/{job}.py", *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


def compare_import(options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns, by format, the ratio of rows per second of imports, now to before, of each round; start included."""
    checkouts = {"now": ROOT, "before": options.before}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="riptide-import-") as name:
        folder = Path(name)
        sources = {}
        for format in ("beir", "jsonl", "csv"):
            (folder / format).mkdir()
            sources[format] = folder / format / ("corpus.csv" if format in HEADERS else "corpus.jsonl")
            write_rows(sources[format], options.import_rows, format)
        (folder / "parquet").mkdir()
        sources["parquet"] = folder / "parquet" / "corpus.parquet"
        pq.write_table(pc.read_csv(sources["csv"]), sources["parquet"])
        for order in alternating_order(options.rounds):
            for format, source in sources.items():
                seconds = {}
                for side in order:
                    arguments = ["--store", str(folder / "store"), "--source", str(source), "--part-size", "50000"]
                    seconds[side] = job_seconds(checkouts[side], "import_corpus", *arguments)
                    shutil.rmtree(folder / "store")
                ratios.setdefault(format, []).append(seconds["before"] / seconds["now"])
    return ratios


def compare_jobs(options: argparse.Namespace, seconds_of: Callable[[Path, str, str], float]) -> list[float]:
    """Returns the ratio of the speeds of a job, now to before, of each round.

    Args:
        options: The options of the benchmark.
        seconds_of: Returns the seconds of the job: (checkout, store, a name that no artifact has).
    """
    sides = {"now": (ROOT, options.store), "before": (options.before, options.before_store)}
    ratios = []
    for number, order in enumerate(alternating_order(options.rounds)):
        name = f"two-checkouts-{os.getpid()}-{number}"  # both sides may share a store, and nothing is made twice
        seconds = {side: seconds_of(*sides[side], f"{name}-{side}") for side in order}
        ratios.append(seconds["before"] / seconds["now"])
    return ratios


def compare_bm25(options: argparse.Namespace) -> list[float]:
    """Returns the ratio of speeds, now to before, of the search job, start included."""

    def run_seconds(checkout: Path, store: str, name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--store", store, "--mode", "bm25", "--split", options.split, "--name", name]
            arguments += ["--queries", options.queries] if options.queries else []
            return job_seconds(checkout, "search", *arguments, "--run", f"{folder}/run.trec")

    return compare_jobs(options, run_seconds)


def compare_training(options: argparse.Namespace) -> list[float]:
    """Returns the ratio of training steps per second, now to before; the time of a short job is subtracted."""

    def run_seconds(checkout: Path, store: str, name: str) -> float:
        arguments = ["--store", store, "--backbone", options.model, "--negatives", options.negatives]
        arguments += ["--queries", options.queries] if options.queries else []
        arguments += ["--batch", "16", "--checkpoint-every", "1000", "--dtype", "float32"]
        short, long = (
            job_seconds(checkout, "tune_prompts", *arguments, "--task", f"{name}-{steps}", "--steps", str(steps))
            for steps in (6, 30)
        )
        return long - short

    return compare_jobs(options, run_seconds)


def compare_mining(options: argparse.Namespace) -> list[float]:
    """Returns the ratio of speeds, now to before, of the job that mines negatives for `train`, start included."""

    def run_seconds(checkout: Path, store: str, name: str) -> float:
        arguments = ["--store", store, "--split", "train", "--sources", *options.sources, "--depth", "100"]
        arguments += ["--denoised-negatives", "0", "--candidates", name, "--name", name]
        arguments += ["--queries", options.queries] if options.queries else []
        return job_seconds(checkout, "mine_negatives", *arguments)

    return compare_jobs(options, run_seconds)


def compare_serving(options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns, by mode and number of clients, the ratio of queries per second, now to before, of each round."""
    from riptide.indexing.queries.queries import Queries
    from riptide.indexing.store.store import Store

    texts = Queries.open(Store(options.store), options.queries).split(options.split).texts[:4000]
    release = ["--renew", "--tasks", "default", "--embeddings", options.embeddings] if options.embeddings else []
    sides: dict[str, tuple[subprocess.Popen[str], int]] = {}
    with stopping(sides):
        for name, checkout, store in (("now", ROOT, options.store), ("before", options.before, options.before_store)):
            settings = argparse.Namespace(store=store, batch=32, compile="never")
            sides[name] = start("riptide", settings, root=checkout, arguments=release)
        for _, port in sides.values():
            for mode in options.modes:
                uvloop.run(load(port, 8, 3, texts, mode=mode))
        ratios: dict[str, list[float]] = {}
        for order in alternating_order(options.rounds):
            for mode in options.modes:
                for clients in options.clients:
                    rate = {
                        name: uvloop.run(load(sides[name][1], clients, options.seconds, texts, mode=mode))
                        for name in order
                    }
                    ratio = rate["now"]["qps"] / rate["before"]["qps"]
                    ratios.setdefault(f"{mode}, {clients} clients", []).append(ratio)
        return ratios


def main() -> None:
    """Reads the options, runs the rounds, prints the median ratios and writes all of them."""
    parser = Parser(__doc__)
    parser.add("--before", None, "folder of the checkout to compare with", type=Path, required=True)
    parser.add("--store", None, "a store with an index and a BM25 index (default: none; less is compared)")
    parser.add("--before-store", None, "store of the other checkout (default: that of --store)")
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--split", "test", "split whose queries are searched")
    parser.add("--negatives", None, "negatives of both stores to train on; without it training is not compared")
    parser.add("--sources", None, "sources to mine from, bm25 exact:NAME (default: none)", nargs="+")
    parser.add("--only", None, "what to compare (default: all)", choices=COMPARISONS, nargs="+")
    parser.add("--modes", ["dense"], "modes of the searches that are served")
    parser.add("--embeddings", None, "embeddings to serve (default: those of the store's release, or the only ones)")
    parser.add("--clients", [1, 8, 32], "numbers of concurrent clients")
    parser.add("--seconds", 5.0, "seconds of load per side, number of clients and round")
    parser.add("--rounds", 9, "number of rounds")
    parser.add("--data", ROOT / "examples/squad/corpus.jsonl.gz", "BEIR corpus to encode")
    parser.add("--passages", 150, "passages per round of encoding")
    parser.add("--import-rows", 400_000, "rows of each import")
    parser.add("--model", MINILM, "encoder and backbone")
    parser.add("--threads", os.cpu_count(), "CPU threads of encoding and exact search (default: all cores)")
    parser.add("--json", "results/two_checkouts.json", "output file")
    options = parser.parse_args()
    options.before = options.before.resolve()
    comparisons: dict[str, Callable[[argparse.Namespace], list[float]]] = {
        "encoding": compare_encoding,
        "exact": compare_exact,
    }
    if options.store:
        options.before_store = str(Path(options.before_store or options.store).resolve())
        options.store = str(Path(options.store).resolve())
        comparisons["bm25"] = compare_bm25
        if options.negatives:
            comparisons["training"] = compare_training
        if options.sources:
            comparisons["mining"] = compare_mining
    families = {"import": compare_import, **({"serving": compare_serving} if options.store else {})}  # several ratios
    wanted = options.only or [*comparisons, *families]
    if missing := {*wanted} - {*comparisons, *families}:
        parser.error(f"--only {' '.join(sorted(missing))}: expected --store, and --negatives or --sources, too")
    ratios_by_name: dict[str, list[float]] = {}
    for name in wanted:
        if name in families:
            ratios_by_name |= {f"{name}, {what}": ratios for what, ratios in families[name](options).items()}
        else:
            ratios_by_name[name] = comparisons[name](options)
        write_json(options.json, {"cpu": cpu_name(), **ratios_by_name})
    for name, ratios in ratios_by_name.items():
        print(f"{name:28} {statistics.median(ratios):.3f}  ({', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})")
    print(f"CPU: {cpu_name()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
