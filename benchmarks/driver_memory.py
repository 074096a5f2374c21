"""Measures the peak memory of the encoding driver over few parts and over ten times as many.

    python benchmarks/driver_memory.py --parts 200 2000

The driver is the process of jobs/encode_corpus.py. Its peak is VmHWM, the largest resident set that it ever had,
libraries included. The encoder is tiny and a part holds ten passages, so that growth with the number of parts is
visible. The ratio of the two peaks and the bytes per further part are printed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny import save_bert, write_corpus

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser, run_job
from benchmarks.common.watching import watch_job

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
    run_job(store, "import_corpus", "--source", source, "--part-size", PASSAGES)
    job = watch_job(store, "encode_corpus", "--encoder", model, "--compile", "never", "--name", "tiny")
    records = list((store / "embeddings/tiny/g0000").glob("part-?????.json"))
    assert len(records) == parts, f"{len(records)} parts are committed, expected {parts}"
    return job.rss_bytes, job.seconds


def main() -> None:
    """Reads the options, encodes both corpora, prints and writes the peaks."""
    parser = Parser(__doc__)
    parser.add("--parts", [200, 2000], "parts of the small and of the large corpus", metavar=("FEW", "MANY"), nargs=2)
    parser.add("--json", "results/driver_memory.json", "output file")
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
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
