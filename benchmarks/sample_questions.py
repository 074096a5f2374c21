"""Draws a random sample of the training queries of a data set and writes it as a separate query set.

    python benchmarks/sample_questions.py --source ../shared/data/squad --count 3000 --out data/squad3k
    python jobs/import_queries.py --store S --source data/squad3k --queries squad3k

SQuAD lists its queries by article, so the first ones are about a few articles only; the sample is spread over all of
them. The other splits are kept complete. For a data set without a dev split, `--dev 100` makes 100 queries of the
sample the dev split. The output is in BEIR form, and the same for the same seed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import read_documents, read_qrels, write_documents, write_qrels
from benchmarks.common.program import Parser


def main() -> None:
    """Reads the options, draws the sample and writes it."""
    parser = Parser(__doc__)
    parser.add("--source", None, "BEIR folder with compressed queries", type=Path, required=True)
    parser.add("--count", None, "training queries to draw, those of --dev included", type=int, required=True)
    parser.add("--dev", 0, "queries of the sample that become the dev split")
    parser.add("--out", None, "folder to write, which must not exist", type=Path, required=True)
    parser.add("--seed", 0, "seed of the sample")
    options = parser.parse_args()
    if options.dev and (options.source / "qrels/dev.tsv").exists():
        parser.error(f"--dev {options.dev}: {options.source} has a dev split; leave out --dev")
    if options.out.exists():
        parser.error(f"--out {options.out}: already exists; give another folder")
    judgements = read_qrels(options.source / "qrels/train.tsv")
    ids = list(dict.fromkeys(judgement.query for judgement in judgements))
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
            of_split = (judgement for judgement in judgements if judgement.query in split_ids)
            write_qrels(options.out / f"qrels/{split}.tsv", of_split)
    queries = read_documents(options.source / "queries.jsonl")
    write_documents(options.out / "queries.jsonl", (query for query in queries if query["_id"] not in dropped_ids))


if __name__ == "__main__":
    main()
