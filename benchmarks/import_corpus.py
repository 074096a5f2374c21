"""Measures the import of millions of synthetic rows: time, and peak memory of all processes, those of Ray included.

    python benchmarks/import_corpus.py --rows 10000000
    python benchmarks/import_corpus.py --rows 1000000 --format csv

Memory is the sum of the proportional set sizes (PSS) of the job and all its descendants, so that pages that they share,
including those of the object store, count once. The page cache does not count.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.common.watching import watch_job

ROWS = {
    "beir": '{{"_id": "d{id}", "text": "{text}"}}\n',
    "jsonl": '{{"docid": "d{id}", "body": "{text}"}}\n',
    "csv": "d{id},{text}\n",
    "hashed": "{text} {id}\n",
}
HEADERS = {"csv": "docid,body\n", "hashed": "body\n"}


def write_rows(path: Path, rows: int, format: str) -> None:
    """Writes rows of about 110 bytes whose ids are in random order. format: a key of ROWS."""
    random.seed(0)
    words = [f"w{random.randrange(1 << 30):x}" for _ in range(5_000)]
    texts = [" ".join(random.choices(words, k=8)) for _ in range(10_007)]
    with open(path, "w", encoding="utf-8", buffering=1 << 20) as file:
        file.write(HEADERS.get(format, ""))
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            file.write(
                "".join(ROWS[format].format(id=n * 7_368_787 % 9_999_999_967, text=texts[n % 10_007]) for n in numbers)
            )


def main() -> None:
    """Reads the options, writes the rows, imports them, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--rows", 10_000_000, "number of rows")
    parser.add("--part-size", 100_000, "rows per part")
    parser.add("--format", "beir", "format of the file; hashed: CSV without ids", choices=list(ROWS))
    parser.add("--json", "results/import_corpus.json", "output file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="riptide-import-") as folder:
        store, source = (
            Path(folder, "store"),
            Path(folder, "corpus.csv" if options.format in HEADERS else "corpus.jsonl"),
        )
        write_rows(source, options.rows, options.format)
        job = watch_job(store, "import_corpus", "--source", source, "--part-size", options.part_size)
        figures = {
            "source_bytes": source.stat().st_size,
            "store_bytes": sum(path.stat().st_size for path in store.rglob("*") if path.is_file()),
            "seconds": round(job.seconds, 1),
            "rows_per_second": round(options.rows / job.seconds),
            "peak_pss_bytes_all_processes": job.pss_bytes,
            "peak_rss_bytes_driver": job.rss_bytes,
        }
    write_json(options.json, {"options": vars(options), **figures})
    for name, value in figures.items():
        print(f"{name:30} {value:>16,}")


if __name__ == "__main__":
    main()
