"""The encoding job through Ray against the bare encoder on the same parts: passages/s once the encoder is ready.

    python benchmarks/encode_job.py --source examples/squad --pairs 5

Each pair is two processes, one after the other: a plain loop over the corpus' parts with an Encoder (compose, tokenise,
forward, no reading ahead, nothing written), and jobs/encode_corpus.py. Start-up is reported beside the rates.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def bare(store: str, limit: int) -> None:
    """Encode the store's parts in a loop and print rate and start-up as JSON."""
    from indexing.corpus import Corpus, open_table
    from indexing.store import Store
    from retriever.encoder import Encoder

    started = time.monotonic()
    encoder = Encoder(MODEL, threads=len(__import__("os").sched_getaffinity(0)))
    ready = time.monotonic()
    rows = 0
    for part in Corpus.open(Store(store)).parts:
        table = open_table(part).slice(0, limit - rows)
        texts = encoder.compose(table["title"].to_pylist(), table["text"].to_pylist())
        encoder.forward(encoder.tokenize(texts, side="passage"))
        rows += len(texts)
    print(json.dumps({"rate": rows / (time.monotonic() - ready), "startup": ready - started}))


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="examples/squad")
    parser.add_argument("--passages", type=int, default=12_000)
    parser.add_argument("--part-size", type=int, default=1_500)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", default="results/encode_job.json")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare, options.passages)
        return
    store = tempfile.mkdtemp(prefix="riptide-encode-")
    pairs = []
    try:
        at = ("--store", store)
        run("jobs/import_corpus.py", *at, "--source", options.source, "--part-size", str(options.part_size))
        for number in range(options.pairs):
            alone = json.loads(run(__file__, "--bare", store, "--passages", str(options.passages)))
            limit = ("--limit", str(options.passages))
            told = run("jobs/encode_corpus.py", *at, "--encoder", MODEL, "--name", f"e{number}", *limit)
            found = re.search(r"starts in ([\d.]+) s, then ([\d,]+) passages/s", told)
            assert found, told
            job = {"rate": float(found[2].replace(",", "")), "startup": float(found[1])}
            pairs.append({"bare": alone, "job": job, "ratio": job["rate"] / alone["rate"]})
            print(f"bare {alone['rate']:6.0f}/s (start {alone['startup']:.1f} s)   job {job['rate']:6.0f}/s (start "
                  f"{job['startup']:.1f} s)   ratio {pairs[-1]['ratio']:.3f}", flush=True)  # fmt: skip
    finally:
        shutil.rmtree(store)
    median = statistics.median(pair["ratio"] for pair in pairs)
    print(f"job through Ray / bare encoder: {median:.3f} (median of {len(pairs)} pairs)")
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pairs": pairs, "median_ratio": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
