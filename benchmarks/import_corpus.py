"""Import millions of synthetic rows: time, and the peak memory of all processes together, Ray's own included.

    python benchmarks/import_corpus.py --rows 10000000
    python benchmarks/import_corpus.py --rows 1000000 --format csv

Memory is the sum of the proportional set sizes (PSS) of the job and all its descendants, so pages that they share, the
object store's too, count once. The page cache does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


ROWS = {
    "beir": '{{"_id": "d{id}", "text": "{text}"}}\n',
    "jsonl": '{{"docid": "d{id}", "body": "{text}"}}\n',
    "csv": "d{id},{text}\n",
    "hashed": "{text} {id}\n",
}
HEADERS = {"csv": "docid,body\n", "hashed": "body\n"}


def write_rows(path: Path, rows: int, form: str) -> None:
    """Rows of about 110 bytes, with ids in no order."""
    random.seed(0)
    words = [f"w{random.randrange(1 << 30):x}" for _ in range(5_000)]
    texts = [" ".join(random.choices(words, k=8)) for _ in range(10_007)]
    with open(path, "w", buffering=1 << 20) as file:
        file.write(HEADERS.get(form, ""))
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            file.write(
                "".join(ROWS[form].format(id=n * 7_368_787 % 9_999_999_967, text=texts[n % 10_007]) for n in numbers)
            )


def tree_pss(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--part-size", type=int, default=100_000)
    parser.add_argument("--format", choices=list(ROWS), default="beir", help="hashed: CSV without ids")
    parser.add_argument("--json", default="results/import_corpus.json")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="riptide-import-"))
    try:
        source = folder / ("corpus.csv" if options.format in HEADERS else "corpus.jsonl")
        write_rows(source, options.rows, options.format)
        command = [sys.executable, str(ROOT / "jobs/import_corpus.py"), "--store", str(folder / "store")]
        command += ["--source", str(source), "--part-size", str(options.part_size)]
        started = time.monotonic()
        job = subprocess.Popen(command)
        watched, peak, largest = psutil.Process(job.pid), 0, 0
        while job.poll() is None:
            try:
                peak = max(peak, tree_pss(watched))
                largest = max(largest, watched.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.25)
        seconds = time.monotonic() - started
        if job.wait():
            sys.exit(job.returncode)
        stored = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
        figures = {
            "format": options.format,
            "rows": options.rows,
            "part_size": options.part_size,
            "source_bytes": source.stat().st_size,
            "stored_bytes": stored,
            "seconds": round(seconds, 1),
            "rows_per_second": round(options.rows / seconds),
            "peak_pss_bytes_all_processes": peak,
            "peak_rss_bytes_driver": largest,
        }
    finally:
        shutil.rmtree(folder)
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name:30} {value:>16,}" if isinstance(value, int | float) else f"{name:30} {value:>16}")


if __name__ == "__main__":
    main()
