"""Draws a random sample of the training queries of a data set and writes it as a separate query set.

    python benchmarks/sample_questions.py --source ../shared/data/squad --count 3000 --out data/squad3k
    python jobs/import_queries.py --store S --source data/squad3k --queries squad3k

SQuAD lists its queries by article, so the first ones are about a few articles only; the sample is spread over all of
them. The other splits are kept complete. For a data set without a dev split, `--dev 100` makes 100 queries of the
sample the dev split. The output is in BEIR form, and the same for the same seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from pathlib import Path

import numpy as np


def main() -> None:
    """Reads the options, draws the sample and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="BEIR folder with compressed queries")
    parser.add_argument("--count", type=int, required=True, help="training queries to draw, those of --dev included")
    parser.add_argument("--dev", type=int, default=0, help="queries of the sample that become the dev split")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    options = parser.parse_args()
    if options.dev and (options.source / "qrels/dev.tsv").exists():
        parser.error(f"--dev {options.dev}: {options.source} has a dev split; leave out --dev")
    if options.out.exists():
        parser.error(f"--out {options.out}: already exists; give another folder")
    header, *lines = (options.source / "qrels/train.tsv").read_text().splitlines()
    ids = list(dict.fromkeys(line.split("\t")[0] for line in lines))
    sample = np.random.default_rng(options.seed).choice(len(ids), min(options.count, len(ids)), replace=False)
    if not 0 <= options.dev < len(sample):
        parser.error(f"--dev {options.dev}: expected 0 to {len(sample) - 1}")
    dev_ids, train_ids = {ids[n] for n in sample[: options.dev]}, {ids[n] for n in sample[options.dev :]}
    dropped_ids = set(ids) - dev_ids - train_ids
    (options.out / "qrels").mkdir(parents=True, exist_ok=True)
    for file in (options.source / "qrels").glob("*.tsv"):
        shutil.copyfile(file, options.out / "qrels" / file.name)
    for split, split_ids in (("train", train_ids), ("dev", dev_ids)):
        if split_ids:
            split_lines = [line for line in lines if line.split("\t")[0] in split_ids]
            (options.out / f"qrels/{split}.tsv").write_text("\n".join([header, *split_lines]) + "\n")
    with (
        gzip.open(options.source / "queries.jsonl.gz", "rt", encoding="utf-8") as source,
        open(options.out / "queries.jsonl", "w", encoding="utf-8") as target,
    ):
        target.writelines(line for line in source if json.loads(line)["_id"] not in dropped_ids)


if __name__ == "__main__":
    main()
