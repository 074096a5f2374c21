"""Measures the import of millions of synthetic rows: time, and peak memory of all processes, those of Ray included.

    python benchmarks/import_corpus.py --rows 10000000
    python benchmarks/import_corpus.py --rows 1000000 --format csv

Memory is the sum of the proportional set sizes (PSS) of the job and all its descendants, so that pages that they share,
including those of the object store, count once. The page cache does not count.
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


def write_rows(path: Path, rows: int, format: str) -> None:
    """Writes rows of about 110 bytes whose ids are in random order.

    Args:
        path: The file.
        rows: Number of rows.
        format: A key of ROWS.
    """
    random.seed(0)
    words = [f"w{random.randrange(1 << 30):x}" for _ in range(5_000)]
    texts = [" ".join(random.choices(words, k=8)) for _ in range(10_007)]
    with open(path, "w", buffering=1 << 20) as file:
        file.write(HEADERS.get(format, ""))
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            file.write(
                "".join(ROWS[format].format(id=n * 7_368_787 % 9_999_999_967, text=texts[n % 10_007]) for n in numbers)
            )


def tree_pss(process: psutil.Process) -> int:
    """Returns the proportional set size of a process and all its descendants, in bytes."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def main() -> None:
    """Reads the options, writes the rows, imports them, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="number of rows (default: %(default)s)")
    parser.add_argument("--part-size", type=int, default=100_000, help="rows per part (default: %(default)s)")
    parser.add_argument(
        "--format",
        choices=list(ROWS),
        default="beir",
        help="format of the file; hashed: CSV without ids (default: %(default)s)",
    )
    parser.add_argument("--json", default="results/import_corpus.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="riptide-import-"))
    try:
        source = folder / ("corpus.csv" if options.format in HEADERS else "corpus.jsonl")
        write_rows(source, options.rows, options.format)
        command = [sys.executable, str(ROOT / "jobs/import_corpus.py"), "--store", str(folder / "store")]
        command += ["--source", str(source), "--part-size", str(options.part_size)]
        started = time.monotonic()
        job = subprocess.Popen(command)
        driver, peak_pss, peak_rss = psutil.Process(job.pid), 0, 0
        while job.poll() is None:
            try:
                peak_pss = max(peak_pss, tree_pss(driver))
                peak_rss = max(peak_rss, driver.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.25)
        seconds = time.monotonic() - started
        if job.wait():
            sys.exit(job.returncode)
        stored_bytes = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
        figures = {
            "format": options.format,
            "rows": options.rows,
            "part_size": options.part_size,
            "source_bytes": source.stat().st_size,
            "stored_bytes": stored_bytes,
            "seconds": round(seconds, 1),
            "rows_per_second": round(options.rows / seconds),
            "peak_pss_bytes_all_processes": peak_pss,
            "peak_rss_bytes_driver": peak_rss,
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
