"""Measures the search of a corpus of which the new encoder has encoded a share, for `riptide migrate`.

    python benchmarks/migration.py --raw S/raw/scifact --folder S/stores --trained ../planstore --others tuned
    python benchmarks/migration_share.py --folder S/stores/scifact --others tuned

The passages of the share have scores of the new encoder, the others those of mapped queries. The share has the first
hits of a log of queries, in the old and in the mapped search, or random passages. Queries of the log are those of
other splits than the measured one and test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.migration.forecast import JudgedQuery, difference_interval, judged_queries, values_of_hits
from riptide.indexing.migration.rank_metrics import RankMetric
from riptide.indexing.migration.space_maps import fit_maps, unit_rows
from riptide.indexing.queries.queries import ALL, Queries

METRIC = RankMetric.parse("nDCG@10")
SHARES = (0.1, 0.25, 0.5)
DEPTH = 50  # first hits of a query of the log that count for its share
NEAREST = 20  # first known hits of a query of the log on which the scores are fitted


def hits_of(scores: np.ndarray, k: int) -> np.ndarray:
    """Returns the rows of the k largest scores of each query, best first: int64 [q, k]."""
    rows: np.ndarray = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows


def usefulness(searches: list[np.ndarray]) -> np.ndarray:
    """Returns the sum of reciprocal ranks of each passage over the queries of searches: float64 [n]."""
    total = np.zeros(searches[0].shape[1])
    for scores in searches:
        rows = hits_of(scores, DEPTH)
        np.add.at(total, rows, np.broadcast_to(1 / np.arange(1, DEPTH + 1), rows.shape))
    return total


def measure_pair(
    old: tuple[np.ndarray, np.ndarray],
    new: tuple[np.ndarray, np.ndarray],
    measured: np.ndarray,
    log: np.ndarray,
    judged: list[JudgedQuery],
    sample_size: int,
    seeds: int,
) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the metric of each measured query, as a mean over seeds, by map, choice, share and scores.

    Args:
        old, new: Vectors of passages, float32 [n, d], and of queries, float32 [q, d], of length 1.
        measured: Numbers of the measured queries.
        log: Numbers of the queries of the log.
        judged: The relevant passages of the measured queries.
        sample_size: Random passages on which the map is fitted, with the log.
        seeds: Number of samples.
    """
    values: dict[tuple[str, ...], list[np.ndarray]] = {}

    def add(scores: np.ndarray, *key: str) -> None:
        values.setdefault(key, []).append(values_of_hits(METRIC, hits_of(scores, METRIC.cutoff), judged))

    (old_passages, old_queries), (new_passages, new_queries) = old, new
    number = len(old_passages)
    new_scores = new_queries @ new_passages.T
    add(old_queries[measured] @ old_passages.T, "keep")
    add(new_scores[measured], "all")
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        sample = random.choice(number, sample_size, replace=False)
        fitted = [np.concatenate([each[0][sample], each[1][log]]) for each in (new, old)]
        for space_map in fit_maps(*fitted, seed=seed):
            if space_map.name == "identity":
                continue
            mapped = space_map.apply(new_queries) @ old_passages.T
            add(mapped[measured], space_map.name, "map")
            useful = usefulness([mapped[log], old_queries[log] @ old_passages.T])
            by_log = np.argsort(-useful - 1e-9 * random.random(number))
            for choice, order in (("log", by_log), ("random", random.permutation(number))):
                for share in SHARES:
                    is_encoded = np.zeros(number, bool)
                    is_encoded[order[: int(share * number)]] = True
                    known = np.union1d(np.flatnonzero(is_encoded), sample)
                    nearest = hits_of(mapped[log][:, known], NEAREST)
                    pairs = [np.take_along_axis(each[log][:, known], nearest, 1) for each in (mapped, new_scores)]
                    slope, offset = np.polyfit(*(each.ravel() for each in pairs), 1)
                    for name, others in (("raw", mapped), ("fitted", slope * mapped + offset)):
                        scores = np.where(is_encoded, new_scores[measured], others[measured])
                        add(scores, space_map.name, choice, f"{share:.0%}", name)
    return {key: np.mean(each, axis=0) for key, each in values.items()}


def main() -> None:
    """Reads the options, and prints a row of figures per pair of encoders, map, choice and share."""
    parser = Parser(__doc__)
    parser.add("--folder", None, "store that benchmarks/migration.py has made", type=Path)
    parser.add("--others", ["tuned"], "embeddings that are compared with those of MiniLM")
    parser.add("--split", "dev", "split of the measured queries")
    parser.add("--sample", 400, "random passages on which the map is fitted, with the log")
    parser.add("--seeds", 3, "number of samples")
    options = parser.parse_args()

    store = Store(options.folder)
    corpus, queries = Corpus.open(store), Queries.open(store, None)
    ids, texts = queries.split(ALL)
    numbers = {id: number for number, id in enumerate(ids)}
    table, qrels = queries.qrels(options.split), dict[str, dict[str, int]]()
    for query, passage, grade in zip(*(table[name].to_pylist() for name in table.column_names[:3]), strict=True):
        qrels.setdefault(query, {})[passage] = grade
    passages = sorted({passage for each in qrels.values() for passage in each})
    rows = dict(zip(passages, corpus.rows_of(passages).tolist(), strict=True))
    measured_ids = [id for id in ids if id in qrels and any(grade > 0 for grade in qrels[id].values())]
    judged = judged_queries(measured_ids, qrels, rows)
    measured = np.array([numbers[id] for id in measured_ids])
    excluded = {*qrels, *queries.split("test")[0]}
    log = np.array([number for id, number in numbers.items() if id not in excluded])
    print(f"{options.folder.name} {options.split}: {len(measured)} queries, {len(log)} in the log", flush=True)

    vectors = {}
    for name in ("minilm", *options.others):
        embeddings = Embeddings.open(store, name, corpus)
        of_passages = np.concatenate([each for _, each in embeddings.read_range(0, embeddings.num_rows)])
        vectors[name] = unit_rows(of_passages), unit_rows(embeddings.encoder().encode(texts))
    for other in options.others:
        for old, new in (("minilm", other), (other, "minilm")):
            values = measure_pair(vectors[old], vectors[new], measured, log, judged, options.sample, options.seeds)
            print(f"{old} to {new}: keep {values['keep',].mean():.4f}, all {values['all',].mean():.4f}")
            for key, each in values.items():
                if len(key) > 1:
                    interval = difference_interval(each, values[key[0], "map"])
                    print(
                        f"  {' '.join(key)}: {each.mean():.4f}, {interval.mean:+.4f} ({interval.low:+.4f} to "
                        f"{interval.high:+.4f}) from the map",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
