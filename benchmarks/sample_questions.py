"""Draws a random sample of the training queries of a data set and writes it as a separate query set.

    python benchmarks/sample_questions.py --source ../shared/data/squad --count 3000 --out data/squad3k
    python jobs/import_queries.py --store S --source data/squad3k --queries squad3k

SQuAD lists its queries by article, so the first ones are about a few articles only; the sample is spread over all of
them. The other splits are kept complete. For a data set without a dev split, `--dev 100` makes 100 queries of the
sample the dev split. The output is in BEIR form, and the same for the same seed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common.files import judgements_of, read_documents, read_qrels, write_data_set
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
    splits = {file.stem: read_qrels(file) for file in (options.source / "qrels").glob("*.tsv")}
    ids = list(dict.fromkeys(judgement.query for judgement in splits["train"]))
    numbers = np.random.default_rng(options.seed).choice(len(ids), min(options.count, len(ids)), replace=False)
    sample = [ids[number] for number in numbers]
    if not 0 <= options.dev < len(sample):
        parser.error(f"--dev {options.dev}: expected 0 to {len(sample) - 1}")
    if options.dev:
        splits["dev"] = judgements_of(sample[: options.dev], splits["train"])
    splits["train"] = judgements_of(sample[options.dev :], splits["train"])
    dropped = set(ids) - set(sample)
    queries = (query for query in read_documents(options.source / "queries.jsonl") if query["_id"] not in dropped)
    write_data_set(options.out, queries, splits)


if __name__ == "__main__":
    main()
