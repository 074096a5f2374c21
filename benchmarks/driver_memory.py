"""Measures the peak memory of the encoding driver over few parts and over ten times as many.

    python benchmarks/driver_memory.py --parts 200 2000

The driver is the process of jobs/encode_corpus.py. Its peak is VmHWM, the largest resident set that it ever had,
libraries included. The encoder is tiny and a part holds ten passages, so that growth with the number of parts is
visible. The ratio of the two peaks and the bytes per further part are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from tiny import save_bert, write_corpus  # noqa: E402

PASSAGES = 10  # per part


def encode(folder: Path, model: Path, parts: int) -> tuple[int, float]:
    """Encodes a new corpus of a given number of parts.

    Args:
        folder: Gets the corpus and the store.
        model: The encoder.
        parts: Number of parts.

    Returns:
        Peak resident bytes of the driver, and seconds.
    """
    source, store = write_corpus(folder / f"raw-{parts}", parts * PASSAGES), folder / f"store-{parts}"
    run_job("import_corpus", "--store", store, "--source", source, "--part-size", PASSAGES)
    started = time.monotonic()
    peak = run_job("encode_corpus", "--store", store, "--encoder", model, "--compile", "never", "--name", "tiny")
    seconds = time.monotonic() - started
    records = list((store / "embeddings/tiny/g0000").glob("part-?????.json"))
    assert len(records) == parts, f"{len(records)} parts are committed, expected {parts}"
    return peak, seconds


def run_job(name: str, *arguments: object) -> int:
    """Runs a job; returns the peak resident bytes of its process, children excluded.

    Raises:
        CalledProcessError: If the job fails.
    """
    command = [sys.executable, str(ROOT / "jobs" / f"{name}.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        if match := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):  # missing while the process ends
            peak = int(match.group(1)) * 1024
        time.sleep(0.1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return peak


def main() -> None:
    """Reads the options, encodes both corpora, prints and writes the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        type=int,
        nargs=2,
        default=[200, 2000],
        metavar=("FEW", "MANY"),
        help="parts of the small and of the large corpus (default: 200 2000)",
    )
    parser.add_argument("--json", default="results/driver_memory.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="riptide-driver-"))
    figures = []
    try:
        model = save_bert(folder / "model")
        for parts in options.parts:
            peak, seconds = encode(folder, model, parts)
            figures.append({"parts": parts, "peak_bytes": peak, "seconds": round(seconds, 1)})
            print(f"{parts:,} parts: peak memory of the driver {peak / 1e6:,.0f} MB ({seconds:.0f} s)", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    few, many = figures
    growth = (many["peak_bytes"] - few["peak_bytes"]) / (many["parts"] - few["parts"])
    print(f"ratio {many['peak_bytes'] / few['peak_bytes']:.3f}: {growth / 1e3:,.1f} kB per further part")
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
