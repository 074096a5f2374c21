"""Simulates `riptide judge` on sets with full judgements: verdicts until a decision, right winners, and coverage.

    python benchmarks/judging.py --data ../shared/data --folder results/judging --seeds 500

The runs of each set are those of BM25, of MiniLM, of MiniLM over the first 24 tokens of each passage (short), and of
BM25 and MiniLM fused (hybrid); weak is hybrid with a fifth of its hits removed at random. The judgements of the set are
the truth. Models and people err: at random for a share of the pairs, or in favour of the second run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.files import read_documents, read_qrels, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.judging.difference import estimate_difference
from riptide.indexing.judging.judging_order import JudgingOrder
from riptide.indexing.judging.judging_pool import JudgingPool, parse_measure, pool_runs
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.search.run_files import read_run_file

SOURCES = {"bm25": "bm25", "minilm": "exact:minilm", "short": "exact:short", "hybrid": "0.5*bm25+0.5*exact:minilm"}
# The share of the pairs with a wrong verdict, and the share of the pairs of the second run that are called relevant.
ERRORS = {"errs 10%": (0.1, 0.0), "errs 30%": (0.3, 0.0), "favours second": (0.1, 0.3)}
MODELS = {"none": None, **ERRORS}
PEOPLE = {"right": (0.0, 0.0), **ERRORS}

Runs = Mapping[str, Mapping[str, Sequence[str]]]


class Setting(NamedTuple):
    """Two runs whose difference is estimated.

    relevant: 1 for each relevant pair, 0 for others, float64 [pairs].
    """

    name: str
    pool: JudgingPool
    relevant: np.ndarray

    @property
    def difference(self) -> float:
        """The difference by all judgements."""
        return float(self.pool.gains @ self.relevant)


def make_runs(source: Path, folder: Path, num_queries: int) -> Runs:
    """Returns the ranked hits of each run; searches unless the files of the runs exist."""
    if not all((folder / f"{run}.trec").exists() for run in SOURCES):
        store = Store(folder / "store")
        store.import_corpus(source)
        store.build_bm25()
        store.encode_corpus(MINILM, name="short", passage_length=24)
        store.encode_corpus(MINILM, name="minilm")
        for run, expression in SOURCES.items():
            hits = store.search_queries(expression, split="test", k=20, limit=num_queries, name=run)
            hits.write_trec(str(folder / f"{run}.trec"))
    tables = {run: read_run_file(str(folder / f"{run}.trec")) for run in SOURCES}
    queries = sorted({query for table in tables.values() for query in table["query_id"].unique().to_pylist()})
    runs = {run: ranked_hits(table, queries) for run, table in tables.items()}
    random = np.random.default_rng(0)
    runs["weak"] = {query: [id for id in hits if random.random() >= 0.2] for query, hits in runs["hybrid"].items()}
    return runs


def relevant_pairs(source: Path, *, by_category: bool) -> set[tuple[str, str]]:
    """Returns the (query, passage) pairs that are relevant: judged so, or with a common category."""
    if not by_category:
        qrels = read_qrels(source / "qrels/test.tsv")
        return {(each.query, each.passage) for each in qrels if int(each.score) > 0}
    passages: dict[str, set[str]] = {}
    for document in read_documents(source / "corpus.jsonl"):
        for category in document["metadata"]["categories"]:
            passages.setdefault(category, set()).add(document["_id"])
    return {
        (query["_id"], id)
        for query in read_documents(source / "queries.jsonl")
        for category in query["metadata"]["categories"]
        for id in passages.get(category, ())
    }


def simulate(
    setting: Setting,
    model: tuple[float, float] | None,
    people: tuple[float, float],
    seeds: int,
    first: int,
    share: float,
) -> dict[str, Any]:
    """Judges the pairs of a setting with each seed, and returns counts.

    Args:
        setting: The runs.
        model: The errors of the model; None: there is no model.
        people: The errors of the people.
        seeds: Number of seeds.
        first: Verdicts of the first round.
        share: Share of the pool after which no more verdicts are given.
    """
    pool, truth = setting.pool, setting.difference
    limit = share * pool.num_pooled
    missed, missed_first, missed_truth, used, decisions = 0, 0, 0, [], {"right": 0, "wrong": 0, "none": 0}
    right_signs, shift = 0, 0.0
    for seed in range(seeds):
        order = JudgingOrder(pool, seed, first, None if model is None else _verdicts(setting, model, [seed, 1]))
        verdicts = _verdicts(setting, people, [seed, 2])
        of_people = float(pool.gains @ verdicts)
        shift += (of_people - truth) / seeds
        decision, is_missed, is_truth_missed = None, False, False
        for number, end in enumerate(order.ends, 1):
            if end > limit and number > 1:
                break
            last = estimate_difference(pool, order, verdicts, number)
            is_outside = not last.low <= of_people <= last.high
            is_missed |= is_outside
            is_truth_missed |= not last.low <= truth <= last.high
            missed_first += is_outside and number == 1
            if decision is None and last.decision:
                decision, spent = last.decision, end
        missed += is_missed
        missed_truth += is_truth_missed
        right_signs += last.difference * truth > 0
        winner = "second" if truth > 0 else "first"
        decisions["none" if decision is None else "right" if decision == winner else "wrong"] += 1
        if decision:
            used.append(spent)
    return {
        "coverage_all_rounds": 1 - missed / seeds,
        "coverage_first_round": 1 - missed_first / seeds,
        "coverage_of_truth": 1 - missed_truth / seeds,
        "shift_by_people": shift,
        **{name: count / seeds for name, count in decisions.items()},
        "right_sign_of_last_round": right_signs / seeds,
        "median_verdicts": float(np.median(used)) if used else None,
    }


def _verdicts(setting: Setting, errors: tuple[float, float], seed: Sequence[int]) -> np.ndarray:
    """Returns verdicts with errors, float64 [pairs]."""
    random = np.random.default_rng(seed)
    errs, favours = (random.random(len(setting.pool)) < share for share in errors)
    verdicts = np.where(errs, 1 - setting.relevant, setting.relevant)
    return np.where(favours & (setting.pool.gains > 0), 1.0, verdicts)


def main() -> None:
    """Reads the options, makes the runs, simulates, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", Path("../shared/data"), "folder of the sets", type=Path)
    parser.add("--sets", ["scifact"], "sets whose judgements name the relevant passages", nargs="*")
    parser.add("--category-sets", ["reuters-topics"], "sets whose passages are relevant by category", nargs="*")
    parser.add("--folder", Path("results/judging"), "folder for stores and runs", type=Path)
    parser.add("--queries", 300, "queries of each set")
    parser.add("--measures", ["DCG@10", "P@10"], "measures")
    parser.add("--runs", [], "pairs of runs, for example short,hybrid; default: all pairs", nargs="*")
    parser.add("--models", list(MODELS), "models", nargs="*", choices=MODELS)
    parser.add("--people", ["right"], "errors of the people", nargs="*", choices=PEOPLE)
    parser.add("--first", 50, "verdicts of the first round")
    parser.add("--share", 0.1, "share of the pool after which no more verdicts are given; 1: all pairs are judged")
    parser.add("--seeds", 500, "seeds")
    parser.add("--json", "results/judging.json", "output file")
    options = parser.parse_args()

    rows = []
    for name in [*options.sets, *options.category_sets]:
        source = options.data / name
        runs = make_runs(source, options.folder / name, options.queries)
        relevant = relevant_pairs(source, by_category=name in options.category_sets)
        pairs = [tuple(pair.split(",")) for pair in options.runs] or list(itertools.combinations(runs, 2))
        for measure, (first, second) in itertools.product(options.measures, pairs):
            pool = pool_runs(runs[first], runs[second], parse_measure(measure))
            verdicts = np.array([pair in relevant for pair in pool.positions()], np.float64)
            setting = Setting(f"{name} {first} {second}", pool, verdicts)
            for model, people in itertools.product(options.models, options.people):
                errors = MODELS[model], PEOPLE[people]
                figures = simulate(setting, *errors, options.seeds, options.first, options.share)
                row = {
                    "set": name,
                    "runs": f"{first}, {second}",
                    "measure": measure,
                    "model": model,
                    "people": people,
                    "difference": setting.difference,
                    "pool": pool.num_pooled,
                    "deciding_pairs": len(pool),
                    **figures,
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    write_json(Path(options.json), rows)


if __name__ == "__main__":
    main()
