"""Compares forecasts of `riptide migrate` with what the new encoder has on the whole corpus.

    python benchmarks/migration.py --raw S/raw/inscit --folder S/stores --trained ../planstore

Each encoder encodes the whole corpus. Then each pair of MiniLM and another encoder, in both directions, has a forecast
from a sample of the passages (the vectors are read from the embeddings instead of being encoded again), for several
seeds. The figures are written after each pair.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide import Store
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.stored_encoder import StoredEncoder
from riptide.indexing.migration.requirements import Requirement, decide
from riptide.jobs.migration.both_encoders import open_both
from riptide.jobs.migration.forecasting import make_forecast, open_encoder
from riptide.jobs.migration.migrate_options import Migrate
from riptide.retriever.options import EncoderOptions, Side

SMALL = str(ROOT / "examples" / "backbone")
METRIC = "nDCG@10"
GATE = Requirement.parse(f"{METRIC} >= -0.005")

Draw = Callable[[np.random.Generator, int], np.ndarray]


class KnownVectors(StoredEncoder):
    """An encoder whose passages' vectors are read from embeddings, and which encodes each query once.

    Args:
        encoder: The encoder.
        embeddings: Its embeddings of the corpus.
        corpus: The corpus.
    """

    def __init__(self, encoder: StoredEncoder, embeddings: Embeddings, corpus: Corpus):
        super().__init__(encoder.spec, embeddings.kind, dim=encoder.dim, similarity=encoder.similarity)
        texts = self.compose(*zip(*((each.title, each.text) for each in corpus), strict=True))
        rows = np.setdiff1d(np.arange(corpus.num_rows), corpus.deleted)
        self._rows, self._embeddings = dict(zip(texts, rows.tolist(), strict=True)), embeddings
        self._queries = dict[str, np.ndarray]()

    def encode(self, texts: Sequence[str], *, side: Side = "query") -> np.ndarray:
        if side == "query":
            if missing := [text for text in dict.fromkeys(texts) if text not in self._queries]:
                self._queries.update(zip(missing, super().encode(missing, side=side), strict=True))
            return np.stack([self._queries[text] for text in texts])
        return self._embeddings.take(np.array([self._rows[text] for text in texts], np.int64)).astype(np.float32)


def measure_pair(
    options: Migrate, name: str, encoders: dict[str, KnownVectors], truth: dict[str, np.ndarray], seeds: int
) -> dict[str, Any]:
    """Returns the forecasts of a pair of encoders and the truth.

    Args:
        options: The options of the forecasts.
        name: The embeddings of the new encoder.
        encoders: An encoder of each embeddings, which is added when it is first needed.
        truth: The metric of each query by embeddings.
        seeds: The number of forecasts.
    """
    store, old = Store(options.store), str(options.embeddings)
    difference = truth[name] - truth[old]
    forecasts = []
    for seed in range(seeds):
        options = replace(options, seed=seed)
        both = open_both(store, options)
        for each, make in ((old, both.old.encoder), (name, partial(open_encoder, both))):
            if each not in encoders:
                encoders[each] = KnownVectors(make(), Embeddings.open(store, each, both.corpus), both.corpus)
        result = make_forecast(both, options, encoders[old], encoders[name])
        whole, best = result.choices[-1], result.best_map
        [mapped] = [each for each in result.choices if each.name == f"map ({best.name})"]
        forecasts.append(
            {
                "known": result.num_random + result.num_chosen,
                "map": best.name,
                "maps": {each.name: [each.cosine, each.neighbours] for each in result.maps},
                "mapped": {each.name: each.value for each in result.choices[1:-1]},
                "mapped_difference": list(mapped.difference or ()),
                "value": whole.value,
                "difference": list(whole.difference or ()),
            }
        )
    decision = decide(GATE, difference)
    return {
        "old": float(truth[old].mean()),
        "new": float(truth[name].mean()),
        "passages": result.num_passages,
        "queries": result.num_queries,
        "forecasts": forecasts,
        "gate": decision.describe(),
    }


def simulate_coverage(draw: Draw, truth: float, queries: int, repetitions: int) -> tuple[float, float, float]:
    """Returns how often the interval of a gate has the true mean, its lower end is above it, and the gate passes.

    Args:
        draw: Draws the differences of queries.
        truth: Their true mean.
        queries: The number of queries.
        repetitions: The number of intervals.
    """
    random = np.random.default_rng(0)
    decisions = [decide(GATE, draw(random, queries)) for _ in range(repetitions)]
    low, high = np.array([(each.low, each.high) for each in decisions]).T
    pass_share = np.mean([each.is_met for each in decisions])
    return float(((low <= truth) & (truth <= high)).mean()), float((low > truth).mean()), float(pass_share)


def draw_usual(random: np.random.Generator, queries: int) -> np.ndarray:
    """Draws differences of which two thirds are 0, the others normal, as of nDCG@10 with one relevant passage."""
    return np.where(random.random(queries) < 2 / 3, 0, np.clip(random.normal(0.03, 0.4, queries), -1, 1))


def draw_rare(random: np.random.Generator, queries: int) -> np.ndarray:
    """Draws differences of which 2% are -1, the others 0."""
    return -(random.random(queries) < 0.02).astype(np.float64)


def draw_mixed(random: np.random.Generator, queries: int) -> np.ndarray:
    """Draws differences of which 2% are -1, 20% are 0.05, the others 0."""
    return np.select([(chance := random.random(queries)) < 0.02, chance < 0.22], [-1.0, 0.05], 0.0)


CASES: dict[str, tuple[Draw, float]] = {
    "a third changed": (draw_usual, 0.01),
    "2% lose 1": (draw_rare, -0.02),
    "2% lose 1, 20% gain 0.05": (draw_mixed, -0.01),
}


def main() -> None:
    """Reads the options, makes the store, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--raw", None, "BEIR folder with this split", type=Path)
    parser.add("--folder", None, "folder for the stores", type=Path)
    parser.add("--trained", None, "store with models/tuned and prompts/prompt over MiniLM", type=Path)
    parser.add("--others", ["small", "tuned", "prompt"], "encoders that are compared with MiniLM")
    parser.add("--split", "dev", "split of the queries")
    parser.add("--seeds", 5, "forecasts of a pair")
    parser.add("--sizes", [500, 5], "options --sample and --hard of the forecasts")
    parser.add("--json", None, "output file; default: migration-SET-SPLIT.json in the folder")
    parser.add("--repetitions", 0, "instead, repetitions of a simulation of the gate's interval")
    options = parser.parse_args()

    if options.repetitions:
        for case, (draw, truth) in CASES.items():
            for queries in (50, 100, 200):
                covered, above, pass_share = simulate_coverage(draw, truth, queries, options.repetitions)
                print(
                    f"{case}, {queries} queries: {covered:.3f} of the intervals have the truth, {above:.3f} are above "
                    f"it; the gate {GATE} passes in {pass_share:.3f}"
                )
        return
    url, name = options.folder / options.raw.name, options.raw.name
    store = Store(url)
    store.import_corpus(options.raw)
    for other, key in (("tuned", "models/tuned"), ("prompt", "prompts/prompt")):
        if other in options.others:
            shutil.copytree(options.trained / key, url / key, dirs_exist_ok=True)
    encoders: dict[str, dict[str, Any]] = {
        "minilm": {"to": MINILM},
        "small": {"to": SMALL},
        "tuned": {"to": "models/tuned"},
        "prompt": {"task": "prompt"},
    }
    encoders = {name: encoders[name] for name in ("minilm", *options.others)}
    for embeddings, named in encoders.items():
        words = {"encoder" if option == "to" else option: value for option, value in named.items()}
        store.encode_corpus(**words, name=embeddings, compile="never")
        print(name, "encoded by", embeddings, flush=True)
    sources = [f"exact:{each}" for each in encoders]
    evaluation = store.evaluate(sources, split=options.split, metrics=[METRIC])
    truth = {name: evaluation.per_query[f"exact:{name}"][METRIC] for name in encoders}
    figures: dict[str, Any] = {"set": name, "split": options.split, "sizes": options.sizes, "pairs": {}}
    known = dict[str, KnownVectors]()
    for other in options.others:
        for old, new in (("minilm", other), (other, "minilm")):
            sample, hard = options.sizes
            migrate = Migrate(
                store=str(url),
                embeddings=old,
                split=options.split,
                metric=METRIC,
                sample=sample,
                hard=hard,
                vectors=EncoderOptions(compile="never"),
                **encoders[new],
            )
            pair = measure_pair(migrate, new, known, truth, options.seeds)
            figures["pairs"][f"{old} to {new}"] = pair
            errors = [abs(each["value"] - pair["new"]) for each in pair["forecasts"]]
            gain = pair["new"] - pair["old"]
            covered = sum(each["difference"][1] <= gain <= each["difference"][2] for each in pair["forecasts"])
            print(
                f"{name}: {old} to {new}: {METRIC} {pair['old']:.4f} to {pair['new']:.4f}, forecasts "
                f"{np.mean([each['value'] for each in pair['forecasts']]):.4f}, largest error {max(errors):.4f}, "
                f"{covered} of {len(errors)} intervals have the truth; gate: {pair['gate']}",
                flush=True,
            )
            write_json(options.json or options.folder / f"migration-{name}-{options.split}.json", figures)


if __name__ == "__main__":
    main()
