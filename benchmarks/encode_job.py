"""Compares the speed of the encoding job with that of the bare encoder on the same parts, in passages/s.

    python benchmarks/encode_job.py --source examples/squad --part-size 200 --rounds 5

The bare encoder is a plain loop over the parts of the corpus (compose, tokenise, forward; without read-ahead, and
nothing is written). The job is jobs/encode_corpus.py. In each round, both run at the same time and take turns of a few
seconds: while one runs, all processes of the other, including those of Ray, are stopped. Thus other load on a shared
machine affects both alike, and only the seconds of a side's turns count for it. The start, until the first part is
complete, is reported separately. Unknown options are passed to the job: with --ray it runs on a
private Ray, otherwise in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from benchmarks.common.files import write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide import Store
from riptide.indexing.corpus.corpus import open_table
from riptide.retriever.encoding.encoder import Encoder

TURN_S = 4.0


def run_bare_encoder(store_url: str, limit: int) -> None:
    """Encodes the first `limit` passages of a store again and again, and prints the time and the rows of each part."""
    corpus = Store(store_url).corpus()
    encoder = Encoder(MINILM, threads=len(os.sched_getaffinity(0)))
    while True:
        remaining = limit
        for part in corpus.parts:
            table = open_table(part).slice(0, remaining)
            texts = encoder.compose(table["title"].to_pylist(), table["text"].to_pylist())
            encoder.forward(encoder.tokenize(texts, side="passage"))
            print(time.time(), len(texts), flush=True)
            remaining -= len(texts)
            if not remaining:
                break


class EncodedPart(NamedTuple):
    """A part that is complete: the time, in seconds since the epoch, and its rows."""

    time: float
    rows: int


def committed_parts(store_url: str, name: str) -> list[EncodedPart]:
    """Returns the parts of embeddings in the order in which they were committed."""
    artifact = Store(store_url).generations("embeddings", name)[0]
    return sorted(EncodedPart(os.stat(artifact.local_path(part)).st_mtime, part.rows) for part in artifact.parts)


class Side:
    """A process and its children, which can be stopped for a while.

    Attributes:
        turns: Start and end of each period in which it ran, in seconds since the epoch.
    """

    def __init__(self, *command: str):
        self.out = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = psutil.Popen([sys.executable, *command], cwd=ROOT, stdout=self.out, stderr=subprocess.DEVNULL)
        self.turns: list[tuple[float, float]] = []

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.process, *self.process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def run_turn(self, seconds: float) -> bool:
        """Lets the process run for some seconds; returns whether it still runs."""
        self.signal(signal.SIGCONT)
        started = time.time()
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(seconds)
        self.turns.append((started, time.time()))
        self.signal(signal.SIGSTOP)
        return self.process.poll() is None

    def running_seconds(self, start: float, end: float) -> float:
        """Returns for how many seconds of a period the process ran."""
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in self.turns)

    def passages_per_second(self, parts: Sequence[EncodedPart]) -> float:
        """Returns the rate from the end of the first part to that of the last; the first parts are slower."""
        return sum(part.rows for part in parts[1:]) / self.running_seconds(parts[0].time, parts[-1].time)

    def kill(self) -> None:
        """Kills the process and its children."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.out.close()


def take_turns(bare: Side, job: Side, store_url: str, name: str) -> dict[str, float]:
    """Lets both sides run in turns until the job has ended. name: of the embeddings that it makes.

    Returns:
        "bare" and "job": passages per second of running time; "bare_start" and "job_start": seconds until the first
        part is complete.

    Raises:
        SystemExit: If the job fails, or if the bare encoder encoded too few parts meanwhile.
    """
    bare.signal(signal.SIGSTOP)
    job.signal(signal.SIGSTOP)
    while job.run_turn(TURN_S):
        assert bare.run_turn(TURN_S), "the bare encoder ended"
    if job.process.returncode:
        raise SystemExit(f"the job ended with {job.process.returncode}: try its options with jobs/encode_corpus.py")
    job_parts = committed_parts(store_url, name)
    bare.out.seek(0)
    all_parts = [EncodedPart(float(end), int(rows)) for end, rows in map(str.split, bare.out.read().splitlines())]
    bare_parts = [part for part in all_parts if job_parts[0].time <= part.time <= job_parts[-1].time]
    if len(bare_parts) < 3:
        raise SystemExit(
            f"{len(bare_parts)} parts of the bare encoder while the job ran: give more --passages, or a smaller "
            "--part-size"
        )
    return {
        "bare": bare.passages_per_second(bare_parts),
        "job": job.passages_per_second(job_parts),
        "bare_start": bare.running_seconds(bare.turns[0][0], all_parts[0].time),
        "job_start": job.running_seconds(job.turns[0][0], job_parts[0].time),
    }


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures; or runs one side (--side)."""
    parser = Parser(__doc__)
    parser.add("--source", "examples/squad", "BEIR folder")
    parser.add("--passages", 12_000, "passages to encode")
    parser.add("--part-size", 1_000, "passages per part")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--json", "results/encode_job.json", "output file")
    parser.add("--bare", None, argparse.SUPPRESS, metavar="STORE")
    options, job_options = parser.parse_known_args()  # unknown options, for example --cpus 2, go to the job
    if options.bare:
        run_bare_encoder(options.bare, options.passages)
        return
    rounds = []
    with tempfile.TemporaryDirectory(prefix="riptide-encode-") as store:
        Store(store).import_corpus(options.source, part_size=options.part_size)
        for number in range(options.rounds):
            name, limit = f"e{number}", str(options.passages)
            encoding = ["--store", store, "--encoder", MINILM, "--name", name, "--limit", limit, *job_options]
            bare = Side(__file__, "--passages", limit, "--bare", store)
            job = Side("jobs/encode_corpus.py", *encoding)
            try:
                figures = take_turns(bare, job, store, name)
            finally:
                bare.kill()
                job.kill()
            rounds.append(figures | {"ratio": figures["job"] / figures["bare"]})
            print(
                f"bare {figures['bare']:6.0f}/s (start {figures['bare_start']:.1f} s)   "
                f"job {figures['job']:6.0f}/s (start {figures['job_start']:.1f} s)   "
                f"ratio {rounds[-1]['ratio']:.3f}",
                flush=True,
            )
    median = statistics.median(figures["ratio"] for figures in rounds)
    print(f"job / bare encoder: {median:.3f} (median of {len(rounds)} rounds)")
    write_json(options.json, {"rounds": rounds, "median_ratio": median})


if __name__ == "__main__":
    main()
