"""Compares prompts that are computed from each query (HYPER) with fixed ones, on tasks that training has not seen.

    python benchmarks/query_prompt_transfer.py --data ../shared/data --folder W --json results/transfer.json

The backbone, all-MiniLM-L6-v2, is frozen; passages keep its vectors. Five sets are tasks, each with at most --size
training queries and 19 negatives of BM25's top 100 per query. At most --measured queries of a dev or test split are
measured, among at most --passages passages. There are four parts:

choose      trains on all sets with several settings; the mean nDCG@10 over the dev splits chooses
zero-shot   leaves one set out of training and measures it on its test split (`-zero` in the paper: MiniLM as it is)
in-domain   trains on all sets and measures each one on its test split, with multi-task fine-tuning too
few-shot    continues the runs of zero-shot with some training queries of the set that was left out

The arms: `shared`, one prompt for all tasks; `per-task`, a prompt for each task through one prefix encoder, and their
mean for a task that is left out; `hyper`, a prompt for each query; `hyper-uniform`, with the same weight for all basic
prompts; `hyper-free`, without the regulariser of the weights. `fine-tune` trains all weights.

SciFact has no dev split: 200 of its training queries are held out. The file of figures is written after each run, and a
run that it holds is not repeated; tables in Markdown are in the same folder. Intervals are of the mean difference over
the sets, by resampling queries within each set; the values of a query are means over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.bootstrap import interval_over_sets
from benchmarks.common.files import read_documents, write_documents, write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM

SETS = ("squad", "scifact", "medquad", "climate-fever-sent", "inscit")
PARTS = ("choose", "zero-shot", "in-domain", "few-shot")
ARMS = ("shared", "per-task", "hyper", "hyper-uniform", "hyper-free")
# Options that shape all figures of a file.
SHAPING = ("sets", "size", "measured", "passages", "steps", "batch", "query_length", "passage_length", "lengths")
MANY_SEEDS = ("shared", "hyper")  # arms that are trained with each of --seeds; others with the first one
HELD_OUT = 200  # training queries of SciFact that are its dev split
FEW_SHOT_SETS = ("squad", "medquad")  # sets with 2,304 training queries
FEW_SHOT_EPOCHS = 5
NEGATIVES = 19
METRICS = ("nDCG@10", "R@100")
PAIRS = (  # arms whose difference is reported
    ("shared", "minilm"),
    ("per-task", "minilm"),
    ("hyper", "minilm"),
    ("hyper", "shared"),
    ("hyper", "per-task"),
    ("hyper", "hyper-uniform"),
    ("hyper", "hyper-free"),
    ("fine-tune", "minilm"),
    ("fine-tune", "shared"),
    ("fine-tune", "hyper"),
    ("fine-tune", "hyper-free"),
)
ATTENTION_QUERIES = 300  # per set, for divergences


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        name: Its name, also of the prompt.
        arm: One of ARMS, or fine-tune.
        sets: The training sets.
        seed: The seed.
        settings: Options of `train_retriever`.
    """

    name: str
    arm: str
    sets: tuple[str, ...]
    seed: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """How much of a set is used; queries and passages are drawn at random.

    Attributes:
        size: Number of training queries at most.
        measured: Number of queries that the dev split and the test split each have at most.
        passages: Number of passages at most, if fewer are judged.
    """

    size: int
    measured: int
    passages: int


def draw(ids: Iterable[str], count: int) -> set[str]:
    """Returns at most `count` of some ids, drawn at random."""
    ordered = sorted(set(ids))
    return {ordered[place] for place in np.random.default_rng(0).permutation(len(ordered))[:count]}


def write_set(data: Path, folder: Path, limits: Limits, *, hold_out: int = 0, skip: int = 0) -> Path:
    """Writes a BEIR folder with a part of a set.

    Args:
        data: The BEIR folder of the whole set.
        folder: The folder to write to; its name becomes the name of the queries.
        limits: How much of the set is used.
        hold_out: Number of other training queries that become the dev split.
        skip: Number of drawn queries that are left out, because another set holds them.
    """
    if (folder / "queries.jsonl").exists():  # written last
        return folder
    judgements: dict[str, list[tuple[str, str, str]]] = {}
    for file in sorted((data / "qrels").glob("*.tsv")):
        rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()[1:]]
        judgements[file.stem] = [(row[0], row[1], row[2]) for row in rows]
    train = sorted({row[0] for row in judgements["train"] if int(row[2]) > 0})
    order = [train[place] for place in np.random.default_rng(0).permutation(len(train))]
    if hold_out:
        held = set(order[:hold_out])
        judgements["dev"] = [row for row in judgements["train"] if row[0] in held]
    training = set(order[hold_out + skip : hold_out + skip + limits.size])
    judgements["train"] = [row for row in judgements["train"] if row[0] in training]
    for split in judgements.keys() - {"train"}:
        measured = draw((row[0] for row in judgements[split]), limits.measured)
        judgements[split] = [row for row in judgements[split] if row[0] in measured]
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for split, rows_of in judgements.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in rows_of)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    judged = {row[1] for rows_of in judgements.values() for row in rows_of}
    others = {document["_id"] for document in read_documents(data / "corpus.jsonl.gz")} - judged
    passages = judged | draw(others, max(limits.passages - len(judged), 0))
    queries = {row[0] for rows_of in judgements.values() for row in rows_of}
    for name, ids in (("corpus", passages), ("queries", queries)):
        documents = (each for each in read_documents(data / f"{name}.jsonl") if each["_id"] in ids)
        write_documents(folder / f"{name}.jsonl", documents)
    return folder


def store_of(name: str, options: argparse.Namespace) -> str:
    return str(Path(options.folder) / "stores" / name)


def prepare(options: argparse.Namespace) -> None:
    """Imports the sets, encodes their corpora by the backbone, and mines negatives of their training queries."""
    from jobs import build_bm25, encode_corpus, import_corpus, import_queries, mine_negatives

    data, folder = Path(options.data).resolve(), Path(options.folder)
    limits = Limits(options.size, options.measured, options.passages)
    for name in options.sets:
        store = store_of(name, options)
        source = write_set(data / name, folder / "sets" / name, limits, hold_out=HELD_OUT if name == "scifact" else 0)
        import_corpus.main(import_corpus.ImportCorpus(store=store, source=str(source)))
        build_bm25.main(build_bm25.BuildBm25(store=store))
        encode_corpus.main(
            encode_corpus.EncodeCorpus(
                store=store, encoder=MINILM, name="minilm", passage_length=options.passage_length
            )
        )
        queries = [name]
        if "few-shot" in options.parts and name in FEW_SHOT_SETS:
            few = write_set(
                data / name, folder / "few" / f"{name}-few", replace(limits, size=max(options.few)), skip=options.size
            )
            import_queries.main(import_queries.ImportQueries(store=store, source=str(few)))
            queries.append(few.name)
        for each in queries:
            mine_negatives.main(
                mine_negatives.MineNegatives(
                    store=store, sources=["bm25"], queries=each, split="train", depth=100, name=each,
                    drop_answers=name == "squad", pool_negatives=NEGATIVES,
                )
            )  # fmt: skip


def train(run: Run, options: argparse.Namespace) -> dict[str, Path]:
    """Returns the folders of the prompts of a run by their names, or that of its model; trains them if necessary."""
    from jobs import train_retriever
    from jobs.tuning.options import TrainRetriever

    from indexing.models import model_folder
    from indexing.store import Store

    store = store_of(run.sets[0], options)
    kind = "models" if run.arm == "fine-tune" else "prompts"
    names = [run.name] + ([f"{run.name}-{name}" for name in run.sets] if run.arm == "per-task" else [])
    others = tuple(
        ",".join(
            [f"queries={name}", f"negatives={name}", f"store={store_of(name, options)}"]
            + ([] if kind == "models" else ["embeddings=minilm"])
        )
        for name in run.sets[1:]
    )
    settings: dict[str, Any] = {
        "train": "all" if kind == "models" else "prompts",
        "sides": "tied" if kind == "models" else "query",
        "embeddings": None if kind == "models" else "minilm",
        "negatives_per_query": NEGATIVES,
        "negatives": run.sets[0],
        "queries": run.sets[0],
        "batch": options.batch,
        "steps": options.steps,
        "cpus": options.cpus,
        "query_length": options.query_length,
        "passage_length": options.passage_length,
        "seed": run.seed,
        "checkpoint_every": options.steps,
        "also_train": others,
        **run.settings,
    }
    train_retriever.main(TrainRetriever(store=store, task=run.name, backbone=MINILM, **settings))
    opened = Store(store)
    return {name: Path(model_folder(opened.open(kind, name))) for name in names}


class TestSet:
    """The queries and judgements of a set's splits, and the vectors of its corpus."""

    __test__ = False

    def __init__(self, name: str, store: str):
        from indexing.corpus import Corpus
        from indexing.embeddings import Embeddings
        from indexing.queries import Queries
        from indexing.store import Store

        opened = Store(store)
        self.name = name
        self._corpus = Corpus.open(opened)
        self._embeddings = Embeddings.open(opened, "minilm", self._corpus)
        self._queries = Queries.open(opened, name)

    def texts(self, split: str) -> list[str]:
        """Returns the queries of a split."""
        return list(self._queries.split(split).texts)

    def measure(
        self, split: str, vectors: np.ndarray, passages: np.ndarray | None = None, threads: int = 2
    ) -> dict[str, np.ndarray]:
        """Returns the metrics of each query of a split: float64 [queries] by metric.

        Args:
            split: The split.
            vectors: Its queries, float32 [q, dim].
            passages: Vectors of the passages; None: those of the backbone.
            threads: Threads of the search.
        """
        import pyarrow as pa

        from indexing.exact.search import exact_search
        from indexing.metrics import per_query

        parts = self._embeddings.between(0, self._embeddings.num_rows) if passages is None else [(0, passages)]
        hits = exact_search(np.ascontiguousarray(vectors, np.float32), parts, 100, threads=threads)
        ids = np.repeat(np.array(self._queries.split(split).ids, object), hits.rows.shape[1])
        found = hits.rows.ravel() >= 0
        run = pa.table(
            {
                "query_id": pa.array(ids[found], pa.string()),
                "id": pa.array(self._corpus.ids(hits.rows.ravel()[found]), pa.string()),
                "score": pa.array(hits.scores.ravel()[found].astype(np.float64)),
            }
        )
        return per_query(self._queries.qrels(split), run, METRICS)

    def passages(self) -> list[tuple[str, str]]:
        """Returns title and text of each passage."""
        rows = np.arange(self._embeddings.num_rows)
        return [(passage.title, passage.text) for passage in self._corpus.passages(rows)]


class Measurement:
    """Measures prompts and models on the splits of the sets, with one open backbone."""

    def __init__(self, options: argparse.Namespace):
        from retriever.encoder import Encoder

        self.options = options
        self.sets = {name: TestSet(name, store_of(name, options)) for name in options.sets}
        self.encoder = Encoder(MINILM, self._settings(), threads=options.cpus, tasks={})

    def _settings(self) -> Any:
        """Returns the options of the encoders."""
        from retriever.options import EncoderOptions

        return EncoderOptions(query_length=self.options.query_length, passage_length=self.options.passage_length)

    def of_prompt(self, folder: Path | None, name: str, split: str) -> dict[str, list[float]]:
        """Returns the metrics of each query of a set's split, with a prompt or without."""
        from retriever.prompts import load_prompt

        if folder is not None:
            self.encoder.put_task("task", load_prompt(folder))
        texts = self.sets[name].texts(split)
        vectors = self.encoder.encode(texts, side="query", task=None if folder is None else "task")
        if folder is not None:
            self.encoder.drop_task("task")
        values = self.sets[name].measure(split, vectors, threads=self.options.cpus)
        return {metric: numbers.tolist() for metric, numbers in values.items()}

    def of_model(self, folder: Path, name: str, split: str) -> dict[str, list[float]]:
        """Returns the metrics of each query of a set's split, with queries and passages encoded by a model."""
        from retriever.encoder import Encoder

        model = Encoder(str(folder), self._settings(), threads=self.options.cpus)
        titles, texts = zip(*self.sets[name].passages(), strict=True)
        passages = model.encode(model.compose(titles, texts), side="passage").astype(np.float16)
        vectors = model.encode(self.sets[name].texts(split), side="query")
        values = self.sets[name].measure(split, vectors, passages, self.options.cpus)
        return {metric: numbers.tolist() for metric, numbers in values.items()}

    def attention(self, folder: Path, name: str) -> np.ndarray:
        """Returns the weights of the basic prompts for test queries of a set, float32 [n, N], without wordless ones."""
        from retriever.prompts import load_prompt

        self.encoder.put_task("task", load_prompt(folder))
        weights = self.encoder.prompt_weights(self.sets[name].texts("test")[:ATTENTION_QUERIES], task="task")
        self.encoder.drop_task("task")
        return weights[np.isfinite(weights).all(1)]


def divergence_figures(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns mean Jensen-Shannon divergences of the weights of two queries, in nats, within and between sets.

    Also the cosines of the mean weights of two sets, and the effective number of basic prompts: the mean over the sets
    of the exponential of the entropy of their mean weights.

    Args:
        weights: The weights of the basic prompts by set, float32 [n, N].
    """
    import torch

    from retriever.synthesis.divergence import mean_divergences

    names = list(weights)
    tasks = torch.tensor(np.repeat(np.arange(len(names)), [len(weights[name]) for name in names]))
    joined = torch.from_numpy(np.concatenate([weights[name] for name in names])).double()
    within, between = mean_divergences(joined, tasks)
    means = np.stack([weights[name].mean(0) for name in names]).astype(np.float64)
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    return {
        "within": float(within),
        "between": float(between),
        "cosine_of_means": {"sets": names, "values": np.round(unit @ unit.T, 4).tolist()},
        "effective_prompts": float(np.exp(-(means * np.log(np.maximum(means, 1e-30))).sum(1)).mean()),
    }


class Figures:
    """The file of figures: runs by name, each with the metrics of each query by set.

    Args:
        file: The file; that of the metrics of each query is beside it.
        shaping: The options that shape all figures.

    Raises:
        ValueError: If the file has figures of other options.
    """

    def __init__(self, file: Path, shaping: Mapping[str, Any]):
        self.file = file
        self.document: dict[str, Any] = (
            json.loads(file.read_text()) if file.exists() else {"shaping": dict(shaping), "runs": {}}
        )
        if self.document["shaping"] != shaping:
            raise ValueError(f"{file}: has figures of other options; name another file, and another --folder")
        self.queries_file = file.with_suffix(".queries.json")
        self.queries: dict[str, dict[str, dict[str, list[float]]]] = (
            json.loads(self.queries_file.read_text()) if self.queries_file.exists() else {}
        )

    def add(self, name: str, values: Mapping[str, Mapping[str, list[float]]], seconds: float) -> None:
        """Adds a run: the metrics of each query by set."""
        self.queries[name] = {key: dict(of_set) for key, of_set in values.items()}
        self.document["runs"][name] = {
            "seconds": round(seconds, 1),
            "sets": {
                key: {metric: float(np.mean(numbers)) for metric, numbers in of_set.items()}
                for key, of_set in values.items()
            },
        }
        self.save()
        shown = "  ".join(f"{key} {of['nDCG@10']:.4f}" for key, of in self.document["runs"][name]["sets"].items())
        print(f"{name:44} {seconds:6.1f} s  nDCG@10 {shown}", flush=True)

    def save(self) -> None:
        """Writes both files."""
        write_json(self.queries_file, self.queries, indent=None)
        write_json(self.file, self.document)

    def mean(self, name: str) -> float:
        """Returns the mean nDCG@10 over the sets of a run."""
        return float(np.mean([of["nDCG@10"] for of in self.document["runs"][name]["sets"].values()]))

    def per_query(self, names: Iterable[str], key: str) -> np.ndarray:
        """Returns nDCG@10 of each query of a set, the mean over some runs: float64 [queries]."""
        return np.mean([self.queries[name][key]["nDCG@10"] for name in names], axis=0)


def settings_of(arm: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of train_retriever of an arm.

    Args:
        arm: One of ARMS.
        chosen: negatives_from and length of all arms, and lr and divergence_weight by arm.
    """
    common = {"negatives_from": chosen["negatives_from"], "length": chosen["length"]}
    if arm == "shared":
        return common | {"prompt": "matrix", "lr": chosen["lr"]["shared"]}
    if arm == "per-task":
        return common | {"prompt": "per-task", "lr": chosen["lr"]["per-task"]}
    common |= {"prompt": "synthesised", "lr": chosen["lr"]["hyper"], "divergence_weight": 0.0}
    if arm == "hyper":
        common["divergence_weight"] = chosen["divergence_weight"]
    if arm == "hyper-uniform":
        common["attention"] = "uniform"
    return common


def choose(measurement: Measurement, figures: Figures, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings with the best mean nDCG@10 over the dev splits, one setting after the other."""
    chosen: dict[str, Any] = {
        "negatives_from": "own",
        "length": options.lengths[0],
        "lr": {"hyper": 1e-3, "shared": 1e-2, "per-task": 1e-3},
        "divergence_weight": 1.0,
    }

    def value(arm: str, settings: Mapping[str, Any]) -> float:
        """Returns the quality of an arm with some settings on the dev splits; trains it if necessary."""
        shown = f"{settings['negatives_from']}-m{settings['length']}-lr{settings['lr'][arm]:g}" + (
            f"-d{settings['divergence_weight']:g}" if arm == "hyper" else ""
        )
        name = f"choose-{arm}-{shown}"
        if name not in figures.document["runs"]:
            started = time.perf_counter()
            run = Run(name, arm, tuple(options.sets), options.seeds[0], settings_of(arm, settings))
            folders = train(run, options)
            values = {
                key: measurement.of_prompt(folders[f"{name}-{key}" if arm == "per-task" else name], key, "dev")
                for key in options.sets
            }
            figures.add(name, values, time.perf_counter() - started)
        return figures.mean(name)

    def best(arm: str, candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return max(candidates, key=lambda settings: value(arm, settings))

    chosen = best("hyper", [{**chosen, "negatives_from": negatives} for negatives in ("own", "batch")])
    chosen = best("hyper", [{**chosen, "lr": {**chosen["lr"], "hyper": lr}} for lr in (1e-3, 3e-3)])
    chosen = best("hyper", [{**chosen, "divergence_weight": weight} for weight in (1.0, 0.1, 3.0, 10.0)])
    chosen = best("hyper", [{**chosen, "length": length} for length in options.lengths])
    for arm, rates in (("shared", (1e-2, 3e-2)), ("per-task", (1e-3, 3e-3))):
        chosen = best(arm, [{**chosen, "lr": {**chosen["lr"], arm: lr}} for lr in rates])
    return chosen


def seeds_of(arm: str, options: argparse.Namespace) -> Sequence[int]:
    return options.seeds if arm in MANY_SEEDS else options.seeds[:1]


def measure_zero_shot(
    measurement: Measurement, figures: Figures, chosen: Mapping[str, Any], options: argparse.Namespace
) -> None:
    """Trains each arm without each set, and measures that set on its test split."""
    for arm in options.arms:
        for seed in seeds_of(arm, options):
            for left_out in options.folds:
                name = f"zero-{left_out}-{arm}-{seed}"
                if name in figures.document["runs"]:
                    continue
                started = time.perf_counter()
                sets = tuple(key for key in options.sets if key != left_out)
                folders = train(Run(name, arm, sets, seed, settings_of(arm, chosen)), options)
                values = {left_out: measurement.of_prompt(folders[name], left_out, "test")}
                figures.add(name, values, time.perf_counter() - started)


def measure_in_domain(
    measurement: Measurement, figures: Figures, chosen: Mapping[str, Any], options: argparse.Namespace
) -> None:
    """Trains each arm on all sets, and measures each on its test split; divergences of the arms that have weights."""
    for arm in options.arms:
        for seed in seeds_of(arm, options):
            name = f"all-{arm}-{seed}"
            if name in figures.document["runs"]:
                continue
            started = time.perf_counter()
            folders = train(Run(name, arm, tuple(options.sets), seed, settings_of(arm, chosen)), options)
            values = {
                key: measurement.of_prompt(folders[f"{name}-{key}" if arm == "per-task" else name], key, "test")
                for key in options.sets
            }
            if arm in ("hyper", "hyper-free"):
                weights = {key: measurement.attention(folders[name], key) for key in options.sets}
                figures.document.setdefault("divergence", {})[name] = divergence_figures(weights)
            figures.add(name, values, time.perf_counter() - started)  # last, since it marks the run as complete
    name = f"all-fine-tune-{options.seeds[0]}"
    if options.fine_tune and name not in figures.document["runs"]:
        started = time.perf_counter()
        settings = {
            "negatives_from": "batch",
            "negatives_per_query": 1,
            "lr": options.fine_tune_lr,
            "steps": options.fine_tune_steps,
            "checkpoint_every": options.fine_tune_steps,
        }
        folders = train(Run(name, "fine-tune", tuple(options.sets), options.seeds[0], settings), options)
        values = {key: measurement.of_model(folders[name], key, "test") for key in options.sets}
        figures.add(name, values, time.perf_counter() - started)


def measure_few_shot(
    measurement: Measurement, figures: Figures, chosen: Mapping[str, Any], options: argparse.Namespace
) -> None:
    """Continues the runs of zero-shot with some training queries of the set that was left out."""
    for left_out in (key for key in FEW_SHOT_SETS if key in options.folds):
        for arm, size in itertools.product(MANY_SEEDS, options.few):
            name = f"few-{left_out}-{size}-{arm}"
            if name in figures.document["runs"]:
                continue
            started = time.perf_counter()
            first = next(key for key in options.sets if key != left_out)
            start = f"{store_of(first, options)}/prompts/zero-{left_out}-{arm}-{options.seeds[0]}"
            settings = settings_of(arm, {**chosen, "divergence_weight": 0.0}) | {
                "init": start,
                "queries": f"{left_out}-few",
                "negatives": f"{left_out}-few",
                "task_size": size,
                "steps": -(-FEW_SHOT_EPOCHS * size // options.batch),
            }
            folders = train(Run(name, arm, (left_out,), options.seeds[0], settings), options)
            figures.add(name, {left_out: measurement.of_prompt(folders[name], left_out, "test")},
                        time.perf_counter() - started)  # fmt: skip


def values_of(figures: Figures, part: str, arm: str, key: str) -> np.ndarray | None:
    """Returns nDCG@10 of each test query of a set by an arm, the mean over seeds: float64 [queries]; None: no run."""
    pattern = {"zero-shot": rf"zero-{key}-{arm}-\d+", "in-domain": rf"all-{arm}-\d+"}[part]
    pattern = f"minilm-{key}" if arm == "minilm" else pattern
    names = [name for name in figures.document["runs"] if re.fullmatch(pattern, name)]
    return figures.per_query(names, key) if names else None


def summarise(figures: Figures, sets: Sequence[str]) -> dict[str, Any]:
    """Returns, for zero-shot and in-domain, a table of nDCG@10 and intervals of the differences between arms."""
    summary: dict[str, Any] = {}
    for part in ("zero-shot", "in-domain"):
        values: dict[str, dict[str, np.ndarray]] = {}
        for arm, key in itertools.product(("minilm", *ARMS, "fine-tune"), sets):
            if (of_set := values_of(figures, part, arm, key)) is not None:
                values.setdefault(arm, {})[key] = of_set
        values = {arm: of_arm for arm, of_arm in values.items() if len(of_arm) == len(sets)}
        differences = {}
        for one, other in PAIRS:
            if one in values and other in values:
                pairs = {key: values[one][key] - values[other][key] for key in sets}
                by_set = {key: interval_over_sets([pair]) for key, pair in pairs.items()}
                differences[f"{one} - {other}"] = {**by_set, "mean": interval_over_sets(list(pairs.values()))}
        table = {arm: {key: float(of_set.mean()) for key, of_set in of_arm.items()} for arm, of_arm in values.items()}
        summary[part] = {"nDCG@10": table, "differences": differences}
    return summary


def tables(document: Mapping[str, Any], sets: Sequence[str]) -> str:
    """Returns the figures as tables in Markdown."""
    lines = [f"{document['cpu']}. Chosen: {json.dumps(document['chosen'])}"]
    for part, summary in document["summary"].items():
        lines += ["", f"| {part}, nDCG@10 | {' | '.join(sets)} | mean |", "| --- " * (len(sets) + 2) + "|"]
        for arm, of_arm in summary["nDCG@10"].items():
            numbers = [of_arm[key] for key in sets]
            lines.append(f"| {arm} | {' | '.join(f'{number:.3f}' for number in [*numbers, np.mean(numbers)])} |")
        lines += ["", f"| {part}, difference | {' | '.join(sets)} | mean |", "| --- " * (len(sets) + 2) + "|"]
        for pair, of_pair in summary["differences"].items():
            cells = [f"{of['mean']:+.3f} [{of['low']:+.3f}, {of['high']:+.3f}]" for of in of_pair.values()]
            lines.append(f"| {pair} | {' | '.join(cells)} |")
    if divergence := document.get("divergence"):
        lines += ["", "| divergence of weights, nats | within a set | between sets | effective basic prompts |"]
        lines += ["| --- " * 4 + "|"]
        for name, of in divergence.items():
            lines.append(f"| {name} | {of['within']:.2g} | {of['between']:.2g} | {of['effective_prompts']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Reads the options, trains and measures each run, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the BEIR folders of all sets")
    parser.add_argument("--folder", required=True, help="folder of stores and models")
    parser.add_argument("--parts", nargs="+", default=["choose", "zero-shot", "in-domain"], choices=PARTS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="the sets (default: %(default)s)")
    parser.add_argument("--folds", nargs="+", help="sets that are left out in turn (default: all)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--size", type=int, default=1000, help="training queries of a set (default: %(default)s)")
    parser.add_argument(
        "--measured", type=int, default=1000, help="queries of a dev or test split at most (default: %(default)s)"
    )
    parser.add_argument(
        "--passages", type=int, default=1_000_000, help="passages of a set at most (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="queries of a step (default: %(default)s)")
    parser.add_argument("--query-length", type=int, default=64, help="tokens of a query (default: %(default)s)")
    parser.add_argument("--passage-length", type=int, default=256, help="tokens of a passage (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32, 10, 100], help="tokens of a prompt to choose from"
    )
    parser.add_argument(
        "--few", type=int, nargs="+", default=[192, 576, 2304], help="training queries of few-shot runs"
    )
    parser.add_argument("--fine-tune", action="store_true", help="in-domain: also fine-tune the whole backbone")
    parser.add_argument("--fine-tune-lr", type=float, default=2e-5, help="(default: %(default)s)")
    parser.add_argument("--fine-tune-steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1, help="(default: all cores)")
    parser.add_argument("--json", default="results/transfer.json", help="file of figures (default: %(default)s)")
    options = parser.parse_args()
    options.folds = options.folds or options.sets
    try:
        figures = Figures(Path(options.json), {name: getattr(options, name) for name in SHAPING})
    except ValueError as error:
        parser.error(f"--json {error}")
    prepare(options)
    measurement = Measurement(options)
    for key in options.sets:
        if f"minilm-{key}" not in figures.document["runs"]:
            started = time.perf_counter()
            values = {key: measurement.of_prompt(None, key, "test")}
            figures.add(f"minilm-{key}", values, time.perf_counter() - started)
    if "choose" in options.parts:
        figures.document["chosen"] = choose(measurement, figures, options)
    chosen = figures.document["chosen"]
    print(f"chosen: {chosen}", flush=True)
    if "zero-shot" in options.parts:
        measure_zero_shot(measurement, figures, chosen, options)
    if "in-domain" in options.parts:
        measure_in_domain(measurement, figures, chosen, options)
    if "few-shot" in options.parts:
        measure_few_shot(measurement, figures, chosen, options)
    figures.document |= {"options": vars(options), "cpu": cpu_name(), "summary": summarise(figures, options.sets)}
    figures.save()
    shown = tables(figures.document, options.sets)
    Path(options.json).with_suffix(".md").write_text(shown)
    print(shown, end="")


if __name__ == "__main__":
    main()
