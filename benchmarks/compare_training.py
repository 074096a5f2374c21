"""Compares ways of training a retriever, through the jobs: the dev split chooses, the test split is measured once.

    python benchmarks/compare_training.py benchmarks/arms/table3.yaml --store S --json results/table3.json

The file has `common` options of train_retriever, and `arms`, each with further ones. Options with a list of values form
a grid: it is trained with the first seed, and the settings with the best MRR@10 on the dev split are trained with all
seeds. `floors` names search sources (bm25) and untrained encoders (encoder: FOLDER; with pooling: splade, sparse ones).
With `hybrid: bm25`, each arm is also measured fused with that source, with equal weights, as the arm bm25+ARM. `pairs`
names the arms whose difference is reported. {store} in a text stands for --store. Artifacts of the store are reused, so
an interrupted run resumes.

Arms with `pooling: splade` are searched through an index of impacts. A table has the mean number of non-zero words of
their test queries and passages, the products of a query and a passage that are not zero on average (FLOPS of the SPLADE
papers), and the sums over words of the squared mean weight, which the regulariser weighs.

Intervals are of 95%, by a bootstrap over queries of each query's mean over the seeds. With --seen, the test queries one
of whose relevant passages is also relevant to a training query are reported apart from the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.bootstrap import interval
from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from retriever.errors import Diverged

Values = dict[str, np.ndarray]
"""Values of each metric, float64 [queries]."""

ENCODING = ("pooling", "normalize", "query_prefix", "passage_prefix", "title", "query_length", "passage_length")
K = 100  # hits per query
LISTS = ("also_train",)  # options whose values are lists, and no grids


class Comparison:
    """The arms of one file, trained and measured in a store."""

    def __init__(self, store: str, settings: dict[str, Any], split: str, metrics: list[str], seeds: list[int]):
        self.store, self.settings, self.split, self.metrics, self.seeds = store, settings, split, metrics, seeds
        self.common: dict[str, Any] = settings["common"]

    def train(self, arm: str, options: dict[str, Any], point: dict[str, Any], seed: int) -> tuple[str, float]:
        """Trains an arm with the settings of a point of its grid, unless the store has it.

        Returns:
            The name of the task, and its best MRR@10 on the dev split.
        """
        from jobs import train_retriever
        from jobs.common.options import build
        from jobs.training.options import TrainRetriever

        from indexing.store.store import Store

        texts = [f"{key}{value}" if isinstance(value, str) else f"{key}{value:g}" for key, value in point.items()]
        task = "-".join([arm, *texts, f"seed{seed}"]).replace("_", "-")
        job = build(TrainRetriever, {**options, **point, "store": self.store, "task": task, "seed": seed})
        train_retriever.main(job)
        return task, float(Store(self.store).open(job.kind, task).notes["best"])

    def choose(self, arm: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the point of an arm's grid that the dev split chooses, and the MRR@10 of each by task.

        Ends the program if all points diverge.
        """
        grid = {key: value for key, value in options.items() if isinstance(value, list) and key not in LISTS}
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        qualities: dict[str, float] = {}
        best, chosen = -1.0, points[0]
        for point in points:
            try:
                task, quality = self.train(arm, options, point, self.seeds[0])
            except Diverged as error:
                print(f"{arm} {point}: {error}", flush=True)  # a result: this point is not chosen
                continue
            qualities[task] = quality
            if quality > best:
                best, chosen = quality, point
        if not qualities:
            raise SystemExit(f"{arm}: every point of its grid diverged: give lower learning rates")
        return chosen, qualities

    def search(self, name: str, source: str, **options: Any) -> Values:
        """Returns the values of the metrics for a search source on the test split."""
        from jobs import evaluate, search
        from jobs.common.options import build
        from jobs.evaluation.measures import measure_of

        from indexing.corpus.queries import Queries
        from indexing.store.store import Store

        queries = self.common.get("queries")
        run = f"{name}-{self.split}"
        search.main(
            build(
                search.Search,
                {
                    "store": self.store,
                    "source": source,
                    "queries": queries,
                    "split": self.split,
                    "k": K,
                    "name": run,
                    **options,
                },
            )
        )
        store = Store(self.store)
        query_set = Queries.open(store, queries)
        ids = query_set.split(self.split).ids
        measure = measure_of(store, query_set, query_set.qrels(self.split), ids, self.metrics)
        return measure(evaluate.load(store, run, query_set, self.split))

    def encode(self, name: str, **options: Any) -> None:
        """Encodes the corpus by an encoder or for a task."""
        from jobs import encode_corpus

        encode_corpus.main(encode_corpus.EncodeCorpus(store=self.store, name=name, **options))

    def source(self, task: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the source that searches a trained task, and its search options; encodes the corpus if needed."""
        if self.keeps_passages(options):
            kind = "splade" if options.get("pooling") == "splade" else "exact"
            return f"{kind}:{options['embeddings']}", {"task": task}
        if options["train"] == "prompts":
            self.encode(task, task=task)
        else:
            self.encode(task, encoder=f"models/{task}", **self.encoding(options))
        return self.source_over(task, options), {}

    @staticmethod
    def keeps_passages(options: dict[str, Any]) -> bool:
        """Returns whether an arm trains prompts of queries only, so that passages keep the vectors of --embeddings."""
        return options.get("sides") == "query" and options["train"] == "prompts"

    def source_over(self, embeddings: str, options: dict[str, Any]) -> str:
        """Returns the source that searches embeddings exactly; builds the index of sparse ones if needed."""
        from jobs import build_index

        if options.get("pooling") != "splade":
            return f"exact:{embeddings}"
        build_index.main(build_index.BuildIndex(store=self.store, embeddings=embeddings, name=embeddings, shards=1))
        return f"splade:{embeddings}"

    def measure(self, task: str, options: dict[str, Any]) -> dict[str, Values]:
        """Returns the values of the metrics on the test split for a trained task, and fused, by the fused source."""
        from indexing.hit_sources.modes import hybrid

        source, search_options = self.source(task, options)
        values = {"": self.search(task, source, **search_options)}
        if other := self.settings.get("hybrid"):
            values[other] = self.search(f"{other}-{task}".replace(":", "-"), hybrid(other, source), **search_options)
        return values

    def sparsity(self, name: str, task: str | None = None) -> dict[str, float]:
        """Returns how sparse the vectors of the test queries, with the prompt of a task, and of the corpus are.

        Args:
            name: The sparse embeddings of the corpus.
            task: The task; None: that of the embeddings.
        """
        from indexing.corpus.corpus import Corpus
        from indexing.corpus.queries import Queries
        from indexing.hit_sources.options import SearchOptions
        from indexing.hit_sources.query_encoder import QueryEncoder
        from indexing.sparse.embeddings import SparseEmbeddings
        from indexing.store.store import Store
        from indexing.work.local import LocalRunner
        from retriever.encoding.sparse_vectors import SparseVectors

        store = Store(self.store)
        embeddings = SparseEmbeddings.open(store, name, Corpus.open(store))
        texts = Queries.open(store, self.common.get("queries")).split(self.split).texts
        queries: SparseVectors = QueryEncoder(store, embeddings, SearchOptions(task=task)).encode(texts, LocalRunner())
        passages = [vectors for _, vectors in embeddings.between(0, embeddings.num_rows)]
        figures, shares = {}, {}
        for side, parts in (("queries", [queries]), ("passages", passages)):
            total = sum(map(len, parts))
            shares[side] = sum(np.bincount(part.indices, minlength=embeddings.dim) for part in parts) / total
            means = sum(np.bincount(part.indices, part.values, embeddings.dim) for part in parts) / total
            figures[f"words of {side}"] = float(shares[side].sum())
            figures[f"regularised, {side}"] = float(np.square(means).sum())
        figures["FLOPS"] = float(shares["queries"] @ shares["passages"])
        return figures

    def encoding(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that shape the vectors."""
        return {key: options[key] for key in ENCODING if key in options}

    def floor(self, name: str, floor: dict[str, Any]) -> Values:
        """Returns the values of the metrics for a search source or an untrained encoder."""
        if "source" in floor:
            return self.search(f"floor-{name}", floor["source"])
        options = {**self.common, **floor}
        if "pooling" not in floor and options.get("pooling") == "splade":
            del options["pooling"]  # arms train a head for it
        self.encode(f"floor-{name}", encoder=floor["encoder"], **self.encoding(options))
        return self.search(f"floor-{name}", self.source_over(f"floor-{name}", options))

    def seen_queries(self) -> np.ndarray:
        """Returns which test queries share a relevant passage with a training query, bool [queries]."""
        from indexing.corpus.queries import Queries
        from indexing.store.store import Store

        queries = Queries.open(Store(self.store), self.common.get("queries"))

        def relevant(split: str) -> dict[str, set[str]]:
            table = queries.qrels(split)
            passages: dict[str, set[str]] = {}
            for query, passage, score in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
                if score > 0:
                    passages.setdefault(query, set()).add(passage)
            return passages

        trained = set().union(*relevant(self.common.get("split", "train")).values())
        tested = relevant(self.split)
        judged = sorted(set(queries.qrels(self.split).column(0).to_pylist()))
        return np.array([bool(tested.get(query, set()) & trained) for query in judged])


def report(means: dict[str, Values], pairs: list[list[str]], metrics: list[str]) -> dict[str, Any]:
    """Prints a Markdown table of the arms and one of their differences, and returns the figures."""
    differences = {f"{a} - {b}": {m: means[a][m] - means[b][m] for m in metrics} for a, b in pairs}
    figures: dict[str, Any] = {}
    for title, rows in (("arm", means), ("difference", differences)):
        print(f"\n| {title} | {' | '.join(metrics)} |\n| --- |{' --- |' * len(metrics)}")
        for name, values in rows.items():
            intervals = {metric: interval(values[metric]) for metric in metrics}
            cells = [f"{mean:.4f} [{low:.4f}, {high:.4f}]" for mean, low, high in intervals.values()]
            print(f"| {name} | {' | '.join(cells)} |")
            figures[name] = intervals
    return figures


def fill_in(value: Any, store: str) -> Any:
    """Returns a document of YAML with {store} in its texts replaced."""
    if isinstance(value, dict):
        return {key: fill_in(item, store) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item, store) for item in value]
    return value.replace("{store}", store) if isinstance(value, str) else value


def report_sparsity(figures: dict[str, list[dict[str, float]]]) -> None:
    """Prints a Markdown table of the figures of sparse arms by seed, as means over the seeds."""
    names = list(next(iter(figures.values()))[0])
    print(f"\n| arm | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
    for arm, runs in figures.items():
        print(f"| {arm} | {' | '.join(f'{np.mean([run[name] for run in runs]):,.2f}' for name in names)} |")


def check(settings: dict[str, Any], only: list[str]) -> None:
    """Ends the program if names of arms are unknown, or if no dev split chooses."""
    arms = [*settings["arms"]]
    fused = [f"{settings['hybrid']}+{arm}" for arm in arms] if "hybrid" in settings else []
    measured = [*arms, *fused, *(f"floor {name}" for name in settings.get("floors", {}))]
    in_pairs = itertools.chain.from_iterable(settings.get("pairs", []))
    for option, names, known in (("--only", only, arms), ("pairs", in_pairs, measured)):
        if unknown := [name for name in names if name not in known]:
            sys.exit(f"{option}: no such arm: {', '.join(unknown)}; expected some of {', '.join(known)}")
    if without := [arm for arm, own in settings["arms"].items() if "dev_split" not in {**settings["common"], **own}]:
        sys.exit(f"arm {without[0]}: no dev_split, which chooses the settings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path, help="the YAML file")
    parser.add_argument("--store", required=True, help="its URL or folder")
    parser.add_argument("--only", nargs="+", help="names of arms; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the first one is used to choose settings")
    parser.add_argument("--split", default="test", help="the split that is measured once")
    parser.add_argument("--metrics", nargs="+", default=["RR@10", "R@20", "R@100"], help="names as in evaluate")
    parser.add_argument("--seen", action="store_true", help="report queries with passages that training has seen apart")
    parser.add_argument(
        "--json", type=Path, default=Path("results/compare_training.json"), help="figures; written after each arm"
    )
    options = parser.parse_args()
    settings = fill_in(yaml.safe_load(options.arms.read_text()), options.store.rstrip("/"))
    check(settings, options.only or [])
    comparison = Comparison(options.store, settings, options.split, options.metrics, options.seeds)
    shown = {key: str(value) for key, value in vars(options).items()}
    document: dict[str, Any] = {"options": shown, "cpu": cpu_name(), "arms": settings}
    means = {f"floor {name}": comparison.floor(name, floor) for name, floor in settings.get("floors", {}).items()}
    document["dev"], document["chosen"], document["by_seed"], document["sparsity"] = {}, {}, {}, {}
    for arm, own in settings["arms"].items():
        if options.only and arm not in options.only:
            continue
        every = {**comparison.common, **own}
        chosen, document["dev"][arm] = comparison.choose(arm, every)
        document["chosen"][arm] = chosen
        runs: dict[str, list[Values]] = {}
        for seed in options.seeds:
            task, _ = comparison.train(arm, every, chosen, seed)
            for other, values in comparison.measure(task, every).items():
                runs.setdefault(f"{other}+{arm}" if other else arm, []).append(values)
            if every.get("pooling") == "splade":
                of_task = (every["embeddings"], task) if comparison.keeps_passages(every) else (task,)
                document["sparsity"].setdefault(arm, []).append(comparison.sparsity(*of_task))
        for name, values_by_seed in runs.items():
            document["by_seed"][name] = [
                {metric: float(v.mean()) for metric, v in run.items()} for run in values_by_seed
            ]
            means[name] = {
                metric: np.mean([run[metric] for run in values_by_seed], axis=0) for metric in options.metrics
            }
        print(json.dumps({"arm": arm, "dev": document["dev"][arm], "test": document["by_seed"][arm]}), flush=True)
        write_json(options.json, document)
    pairs = [pair for pair in settings.get("pairs", []) if set(pair) <= set(means)]
    subsets = {"all": np.ones(len(next(iter(means.values()))[options.metrics[0]]), bool)}
    if options.seen:
        seen = comparison.seen_queries()
        subsets |= {name: mask for name, mask in (("seen in training", seen), ("unseen", ~seen)) if mask.any()}
    for subset, mask in subsets.items():
        print(f"\n{subset}: {int(mask.sum()):,} queries")
        part = {name: {metric: v[mask] for metric, v in values.items()} for name, values in means.items()}
        document[subset] = report(part, pairs, options.metrics)
    if document["sparsity"]:
        report_sparsity(document["sparsity"])
    print(f"\nCPU: {document['cpu']}, {os.cpu_count()} cores")
    write_json(options.json, document)


if __name__ == "__main__":
    main()
