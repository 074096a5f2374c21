"""Compares the speed of the encoding job with that of the bare encoder on the same parts, in passages/s.

    python benchmarks/encode_job.py --source examples/squad --part-size 200 --rounds 5

The bare encoder is a plain loop over the parts of the corpus (compose, tokenise, forward; without read-ahead, and
nothing is written). The job is jobs/encode_corpus.py. In each round, both run at the same time and take turns of a few
seconds: while one runs, all processes of the other, including those of Ray, are stopped. Thus other load on a shared
machine affects both alike, and only the seconds of a side's turns count for it. Start-up is reported separately.
Unknown options are passed to the job: with --ray it runs on a private Ray, otherwise in its own process.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser

TURN_S = 4.0


def run_bare_encoder(store: str, limit: int) -> None:
    """Encodes the first passages of a store repeatedly until the process is stopped.

    Prints a JSON line per part: rows so far, the time at which the encoder was ready, and the current time.

    Args:
        store: The store.
        limit: Passages per repetition.
    """
    from indexing.corpus.corpus import Corpus, open_table
    from indexing.store.store import Store
    from retriever.encoding.encoder import Encoder

    encoder = Encoder(MINILM, threads=len(os.sched_getaffinity(0)))
    ready = time.time()
    rows = 0
    while True:
        remaining = limit
        for part in Corpus.open(Store(store)).parts:
            table = open_table(part).slice(0, remaining)
            texts = encoder.compose(table["title"].to_pylist(), table["text"].to_pylist())
            encoder.forward(encoder.tokenize(texts, side="passage"))
            remaining -= len(texts)
            rows += len(texts)
            print(json.dumps({"rows": rows, "ready": ready, "last": time.time()}), flush=True)
            if not remaining:
                break


def run_job(store: str, name: str, limit: int, job_options: list[str]) -> None:
    """Does what jobs/encode_corpus.py does, and prints a JSON line per committed part as `run_bare_encoder`.

    Args:
        store: The store.
        name: Name of the embeddings.
        limit: Passages to encode.
        job_options: Further options of the job.
    """
    from jobs.common import cli
    from jobs.encode_corpus import EncodeCorpus, open_encoders

    from indexing.embeddings.embeddings import DENSE
    from indexing.embeddings.encoders import find_encoder_spec
    from indexing.embeddings.encoding import EncodeCorpusWork, PartDone, numerics_of
    from indexing.store.store import Store
    from indexing.work.tasks import WorkerResources
    from indexing.work.work import WorkUnit, run_work

    rows = 0

    def observe(unit: WorkUnit, part: PartDone | dict[str, Any]) -> None:
        nonlocal rows
        part = part if isinstance(part, PartDone) else PartDone(**part)
        rows += part.rows
        print(json.dumps({"rows": rows, "ready": part.ready, "last": time.time()}), flush=True)

    def main(options: EncodeCorpus) -> None:
        corpus_store = Store(options.store)
        spec = find_encoder_spec(corpus_store, options.encoder, options.task, options.vectors)
        model_type = spec.settings("passage")["model_type"]
        runner, resources = open_encoders(corpus_store, options, spec, model_type, name)
        numerics = numerics_of(runner, spec.options, model_type, WorkerResources(resources.cores, resources.gpus), 1)
        work = EncodeCorpusWork(corpus_store, spec, DENSE, name, resources=resources, numerics=numerics, limit=limit)
        run_work(corpus_store, work, runner, observe=observe)

    sys.argv[1:] = ["--store", store, "--encoder", MINILM, "--name", name, *job_options]
    cli.run(main, EncodeCorpus)


class Side:
    """A process and its children, which can be stopped for a while.

    Attributes:
        turns: Start and end of each period in which it ran, in seconds since the epoch.
    """

    def __init__(self, *command: str):
        self.out = tempfile.TemporaryFile("w+")  # noqa: SIM115
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

    def lines(self) -> list[dict[str, Any]]:
        """Returns the JSON lines that the process has printed."""
        self.out.seek(0)
        return [json.loads(line) for line in self.out.read().splitlines() if line.startswith("{")]

    def kill(self) -> None:
        """Kills the process and its children."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.out.close()


def take_turns(bare: Side, job: Side) -> dict[str, float]:
    """Lets both sides run in turns until the job has ended.

    Returns:
        "bare" and "job": passages per second of running time; "bare_startup" and "job_startup": seconds.

    Raises:
        SystemExit: If the job fails, or if the bare encoder encoded too few parts meanwhile.
    """
    bare.signal(signal.SIGSTOP)
    job.signal(signal.SIGSTOP)
    while job.run_turn(TURN_S):
        assert bare.run_turn(TURN_S), "the bare encoder ended"
    if job.process.returncode:
        raise SystemExit(f"the job ended with {job.process.returncode}: try its options with jobs/encode_corpus.py")
    job_parts = job.lines()
    first, last = job_parts[0]["last"], job_parts[-1]["last"]
    bare_parts = [part for part in bare.lines() if first <= part["last"] <= last]
    if len(bare_parts) < 3:
        raise SystemExit(
            f"{len(bare_parts)} parts of the bare encoder while the job ran: give more --passages, or a smaller "
            "--part-size"
        )
    # Both are measured from the end of one part to the end of another, because the first parts are slower.
    bare_rows = bare_parts[-1]["rows"] - bare_parts[0]["rows"]
    bare_seconds = bare.running_seconds(bare_parts[0]["last"], bare_parts[-1]["last"])
    return {
        "bare": bare_rows / bare_seconds,
        "job": (job_parts[-1]["rows"] - job_parts[0]["rows"]) / job.running_seconds(first, last),
        "bare_startup": bare.running_seconds(bare.turns[0][0], bare_parts[0]["ready"]),
        "job_startup": job.running_seconds(job.turns[0][0], job_parts[0]["ready"]),
    }


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures; or runs one side (--side)."""
    parser = Parser(__doc__)
    parser.add("--source", "examples/squad", "BEIR folder")
    parser.add("--passages", 12_000, "passages to encode")
    parser.add("--part-size", 1_000, "passages per part")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--json", "results/encode_job.json", "output file")
    parser.add("--side", None, argparse.SUPPRESS, metavar=("SIDE", "STORE"), nargs=2)
    parser.add("--name", None, argparse.SUPPRESS)
    options, job_options = parser.parse_known_args()  # unknown options, for example --cpus 2, go to the job
    if options.side:
        side, store = options.side
        if side == "job":
            run_job(store, options.name, options.passages, job_options)
        else:
            run_bare_encoder(store, options.passages)
        return
    store = tempfile.mkdtemp(prefix="riptide-encode-")
    rounds = []
    try:
        import_job = ["jobs/import_corpus.py", "--store", store]
        import_job += ["--source", options.source, "--part-size", str(options.part_size)]
        subprocess.run([sys.executable, *import_job], cwd=ROOT, check=True, capture_output=True)
        for number in range(options.rounds):
            common = (__file__, "--passages", str(options.passages), "--name", f"e{number}", "--side")
            sides = Side(*common, "bare", store), Side(*common, "job", store, *job_options)
            try:
                figures = take_turns(*sides)
            finally:
                for side in sides:
                    side.kill()
            rounds.append(figures | {"ratio": figures["job"] / figures["bare"]})
            print(
                f"bare {figures['bare']:6.0f}/s (start {figures['bare_startup']:.1f} s)   "
                f"job {figures['job']:6.0f}/s (start {figures['job_startup']:.1f} s)   "
                f"ratio {rounds[-1]['ratio']:.3f}",
                flush=True,
            )
    finally:
        shutil.rmtree(store)
    median = statistics.median(figures["ratio"] for figures in rounds)
    print(f"job / bare encoder: {median:.3f} (median of {len(rounds)} rounds)")
    write_json(options.json, {"rounds": rounds, "median_ratio": median})


if __name__ == "__main__":
    main()
