"""A sample of a data set's training questions, spread over all of them, as a question set of its own.

    python benchmarks/sample_questions.py --source ../shared/data/squad --count 3000 --out data/squad3k
    python jobs/import_queries.py --store S --source data/squad3k --queries squad3k

SQuAD's questions come article by article, so that the first of them are about a handful of articles. The other splits
are kept whole. Of a data set without a dev split `--dev 100` holds out so many of the sample as one. Writes BEIR files;
the same for the same seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a folder in BEIR form")
    parser.add_argument("--count", type=int, required=True, help="of training questions")
    parser.add_argument("--dev", type=int, default=0, help="of them held out as the dev split")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.dev and (options.source / "qrels/dev.tsv").exists():
        parser.error(f"{options.source} has a dev split")
    if options.out.exists():
        parser.error(f"--out {options.out}: there is something already")
    header, *lines = (options.source / "qrels/train.tsv").read_text().splitlines()
    ids = list(dict.fromkeys(line.split("\t")[0] for line in lines))
    chosen = np.random.default_rng(options.seed).choice(len(ids), min(options.count, len(ids)), replace=False)
    if not 0 <= options.dev < len(chosen):
        parser.error(f"--dev {options.dev}: expected 0 to {len(chosen) - 1}")
    held, kept = {ids[n] for n in chosen[: options.dev]}, {ids[n] for n in chosen[options.dev :]}
    dropped = set(ids) - held - kept
    (options.out / "qrels").mkdir(parents=True, exist_ok=True)
    for file in (options.source / "qrels").glob("*.tsv"):
        shutil.copyfile(file, options.out / "qrels" / file.name)
    for split, members in (("train", kept), ("dev", held)):
        if members:
            left = [line for line in lines if line.split("\t")[0] in members]
            (options.out / f"qrels/{split}.tsv").write_text("\n".join([header, *left]) + "\n")
    with (
        gzip.open(options.source / "queries.jsonl.gz", "rt", encoding="utf-8") as source,
        open(options.out / "queries.jsonl", "w", encoding="utf-8") as target,
    ):
        target.writelines(line for line in source if json.loads(line)["_id"] not in dropped)


if __name__ == "__main__":
    main()
