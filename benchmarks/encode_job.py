"""Compares the speed of the encoding job with that of the bare encoder on the same parts, in passages/s.

    python benchmarks/encode_job.py --source examples/squad --part-size 200 --rounds 5

A plain loop over the corpus' parts with an Encoder (compose, tokenise, forward; no reading ahead, nothing written), and
jobs/encode_corpus.py. In each round both are up at once and take turns of seconds: while one runs, all processes of
the other, Ray's among them, are stopped. What other work takes of a shared machine then falls on both alike, and
seconds are counted that were a side's own. Start-up is reported separately. Other options go to the job: with
--ray it runs on a private Ray, otherwise in its process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TURN = 4.0  # seconds


def bare(store: str, limit: int) -> None:
    """Encode the store's parts again and again until stopped; says when it was ready, and when each was done."""
    from indexing.corpus import Corpus, open_table
    from indexing.store import Store
    from retriever.encoder import Encoder

    encoder = Encoder(MODEL, threads=len(os.sched_getaffinity(0)))
    ready = time.time()
    rows = 0
    while True:
        left = limit
        for part in Corpus.open(Store(store)).parts:
            table = open_table(part).slice(0, left)
            texts = encoder.compose(table["title"].to_pylist(), table["text"].to_pylist())
            encoder.forward(encoder.tokenize(texts, side="passage"))
            left -= len(texts)
            rows += len(texts)
            print(json.dumps({"rows": rows, "ready": ready, "last": time.time()}), flush=True)
            if not left:
                break


def job(store: str, name: str, limit: int, more: list[str]) -> None:
    """Does what jobs/encode_corpus.py does; says when an encoder was ready, and when each part was committed."""
    from jobs import cli
    from jobs.encode_corpus import EncodeCorpus, open_encoders, spec_of

    from indexing.encoding import EncodeCorpus as EncodeWork
    from indexing.encoding import PartDone, numerics_of
    from indexing.store import Store
    from indexing.work.tasks import Resources
    from indexing.work.work import Unit, run_work

    rows = 0

    def observe(unit: Unit, done: PartDone | dict[str, Any]) -> None:
        nonlocal rows
        done = done if isinstance(done, PartDone) else PartDone(**done)
        rows += done.rows
        print(json.dumps({"rows": rows, "ready": done.ready, "last": time.time()}), flush=True)

    def main(options: EncodeCorpus) -> None:
        corpus_store = Store(options.store)
        spec = spec_of(corpus_store, options.encoder, options.task, options.encoder_options())
        model_type = spec.describe("passage")["model_type"]
        runner, resources = open_encoders(corpus_store, options, spec, model_type)
        numerics = numerics_of(runner, spec.options, model_type, Resources(resources.cores, resources.gpus))
        work = EncodeWork(corpus_store, spec, name, resources=resources, numerics=numerics, limit=limit)
        run_work(corpus_store, work, runner, observe=observe)

    sys.argv[1:] = ["--store", store, "--encoder", MODEL, "--name", name, *more]
    cli.run(main, EncodeCorpus)


class Side:
    """A process with all that it starts, that can be stopped for a while; `turns` are the times when it ran."""

    def __init__(self, *command: str):
        self.out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = psutil.Popen([sys.executable, *command], cwd=ROOT, stdout=self.out, stderr=subprocess.DEVNULL)
        self.turns: list[tuple[float, float]] = []

    def signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.process, *self.process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def turn(self, seconds: float) -> bool:
        """Run for so long; whether it is still there."""
        self.signal(signal.SIGCONT)
        begun = time.time()
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(seconds)
        self.turns.append((begun, time.time()))
        self.signal(signal.SIGSTOP)
        return self.process.poll() is None

    def seconds(self, start: float, end: float) -> float:
        """How much of a span of time was its own."""
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in self.turns)

    def lines(self) -> list[dict[str, Any]]:
        self.out.seek(0)
        return [json.loads(line) for line in self.out.read().splitlines() if line.startswith("{")]

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.out.close()


def take_turns(alone: Side, through: Side) -> dict[str, float]:
    """Both sides' passages/s of their own seconds, until the job has ended."""
    alone.signal(signal.SIGSTOP)
    through.signal(signal.SIGSTOP)
    while through.turn(TURN):
        assert alone.turn(TURN), "the bare encoder ended"
    if through.process.returncode:
        raise SystemExit(f"the job ended with {through.process.returncode}: try its options with jobs/encode_corpus.py")
    done = through.lines()
    first, last = done[0]["last"], done[-1]["last"]
    parts = [part for part in alone.lines() if first <= part["last"] <= last]
    if len(parts) < 3:
        raise SystemExit(
            f"{len(parts)} parts of the bare encoder while the job ran: give more --passages, or a smaller --part-size"
        )
    # Both from the end of a part to the end of another: the first ones are slower.
    rows, seconds = parts[-1]["rows"] - parts[0]["rows"], alone.seconds(parts[0]["last"], parts[-1]["last"])
    return {
        "bare": rows / seconds,
        "job": (done[-1]["rows"] - done[0]["rows"]) / through.seconds(first, last),
        "bare_startup": alone.seconds(alone.turns[0][0], parts[0]["ready"]),
        "job_startup": through.seconds(through.turns[0][0], done[0]["ready"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="examples/squad")
    parser.add_argument("--passages", type=int, default=12_000)
    parser.add_argument("--part-size", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="results/encode_job.json")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "STORE"), help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()  # what is left goes to the job: --cpus 2
    if options.side:
        side, store = options.side
        job(store, options.name, options.passages, more) if side == "job" else bare(store, options.passages)
        return
    store = tempfile.mkdtemp(prefix="riptide-encode-")
    rounds = []
    try:
        imports = ("--source", options.source, "--part-size", str(options.part_size))
        subprocess.run([sys.executable, "jobs/import_corpus.py", "--store", store, *imports], cwd=ROOT, check=True,
                       capture_output=True)  # fmt: skip
        for number in range(options.rounds):
            common = (__file__, "--passages", str(options.passages), "--name", f"e{number}", "--side")
            sides = Side(*common, "bare", store), Side(*common, "job", store, *more)
            try:
                found = take_turns(*sides)
            finally:
                for side in sides:
                    side.end()
            rounds.append(found | {"ratio": found["job"] / found["bare"]})
            print(f"bare {found['bare']:6.0f}/s (start {found['bare_startup']:.1f} s)   "
                  f"job {found['job']:6.0f}/s (start {found['job_startup']:.1f} s)   "
                  f"ratio {rounds[-1]['ratio']:.3f}", flush=True)  # fmt: skip
    finally:
        shutil.rmtree(store)
    median = statistics.median(found["ratio"] for found in rounds)
    print(f"job / bare encoder: {median:.3f} (median of {len(rounds)} rounds)")
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rounds": rounds, "median_ratio": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
