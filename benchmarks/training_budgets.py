"""Trains on the same pairs for the same CPU time with riptide and with sentence-transformers' trainer; measures MRR@10.

    python benchmarks/gpu_experiments.py --prepare --source ../shared/data/scifact --set sets/scifact --pool 2500
    python benchmarks/training_budgets.py --sets sets/scifact sets/medquad sets/squad --minutes 1 5

The output file is written after each run; the same command resumes. With --tables, the file's tables are printed.

The pairs are the training queries of a prepared set, each with a judged passage; the other passages of the batch are
the negatives. Some queries, drawn at random, are held out: with the first seed and the smallest budget, their mean over
all --sets chooses the learning rate of each method. A first pass measures the CPU time of a step of each method; a
budget is then a number of steps, in which the learning rate rises and falls to 0. The time does not count loading and
encoding. All methods run with the setting of memory that riptide's trainer makes.

Methods: "peer" is sentence-transformers' trainer with MultipleNegativesRankingLoss, without duplicates in a batch;
"peer-cached" its cached form with four times the batch; "finetune", "lora" and "query-prompt" are riptide's. The prompt
of queries has passages with stored vectors.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.files import read_json, write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.prepared_set import PreparedSet
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.training_runs import METHODS, best_rate, budget_lines, rates_of, run_name_of
from benchmarks.gpu import read
from benchmarks.gpu_experiments import reciprocal_ranks
from riptide import Encoder
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.options import EncoderOptions
from riptide.retriever.training.freed_memory import keep_freed_memory

QUERY_LENGTH, PASSAGE_LENGTH = 64, 128
CACHED = 4  # the batch of "peer-cached", divided by that of the other methods
PROBE = 6  # steps of the first pass, of which the first two are not counted


class Data:
    """A prepared set with the vectors of the untrained backbone."""

    def __init__(self, folder: Path, backbone: Path, dev: int):
        self.prepared = PreparedSet(folder, dev)
        self.pairs = self.prepared.training_data("none")
        self.backbone = backbone
        self.encoder = EncoderOptions(query_length=QUERY_LENGTH, passage_length=PASSAGE_LENGTH)
        positives = [row for each in self.prepared.dev for row in each["positives"]]
        self.searched = np.union1d(np.arange(self.prepared.about["pool"]), np.array(positives, np.int64))
        self._vectors: np.ndarray | None = None

    def texts(self, rows: np.ndarray) -> list[str]:
        """Returns passages as the encoder reads them: title and text."""
        return [f"{title} {text}".strip() for title, text in zip(*self.prepared.passages(rows.tolist()), strict=True)]

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors of the untrained backbone, float16 [n, dim]."""
        if self._vectors is None:
            every = self.texts(np.arange(self.pairs.num_passages))
            self._vectors = Encoder(str(self.backbone), self.encoder).encode(every, side="passage").astype(np.float16)
        return self._vectors[rows]

    def measure(self, encode: Callable[[list[str]], np.ndarray], passages: np.ndarray) -> dict[str, Any]:
        """Returns the MRR@10 of the dev queries, and the reciprocal rank of each test query.

        Args:
            encode: Returns the vectors of queries, float32 [n, dim].
            passages: The vectors of the searched passages, float32 [n, dim].
        """
        ranks = {}
        for split, queries in {"dev": self.prepared.dev, "test": self.prepared.test}.items():
            vectors = encode([each["text"] for each in queries])
            positives = [np.searchsorted(self.searched, each["positives"]).tolist() for each in queries]
            ranks[split] = reciprocal_ranks(vectors, passages, positives, torch.device("cpu"))
        means = {f"{split} mrr@10": float(values.mean(dtype=np.float64)) for split, values in ranks.items()}
        return {**means, "reciprocal_ranks": [round(float(rank), 4) for rank in ranks["test"]]}

    def measure_folder(self, folder: Path | str) -> dict[str, Any]:
        """Returns the figures of a model folder, which encodes both sides."""
        encoder = Encoder(str(folder), self.encoder)
        passages = encoder.encode(self.texts(self.searched), side="passage")
        return self.measure(lambda texts: encoder.encode(texts, side="query"), passages)


class Training(NamedTuple):
    """A training run: its method, peak learning rate, seed, steps and queries per step.

    Attributes:
        is_probe: Whether only the time of a step is needed.
    """

    method: str
    lr: float
    seed: int
    steps: int
    batch: int
    is_probe: bool = False


def train_with_riptide(data: Data, run: Training) -> dict[str, Any]:
    """Trains with riptide.

    Returns:
        "seconds": the CPU time of each step; and the figures of `Data.measure`, unless it is a probe.
    """
    from riptide.retriever.forward.numerics import choose_dtype
    from riptide.retriever.objectives.tune_options import TuneOptions
    from riptide.retriever.options.loop import LoopOptions
    from riptide.retriever.options.lora import LoraOptions
    from riptide.retriever.systems.dual import DualEncoderSystem
    from riptide.retriever.training.loop import Trainer

    device = torch.device("cpu")
    dtype = choose_dtype("auto", device)
    is_prompt = run.method == "query-prompt"
    tuning = TuneOptions(
        method="prompt" if is_prompt else run.method,  # type: ignore[arg-type]
        sides="query" if is_prompt else "tied",
        lora=LoraOptions() if run.method == "lora" else None,
        batch=run.batch,
        negatives_per_query=0,
        seed=run.seed,
    )
    vectors = data.vectors if is_prompt else None
    where = {"device": device, "dtype": dtype}
    system = DualEncoderSystem(data.backbone, data.encoder, tuning, data.pairs, vectors=vectors, **where)
    decay = 0.01 if run.method == "finetune" else 0.0  # as train-retriever has it
    trainer = Trainer(system, LoopOptions(steps=run.steps, lr=run.lr, weight_decay=decay, seed=run.seed), **where)
    system.module.train()
    if is_prompt:
        data.vectors(np.empty(0, np.int64))  # encodes the passages now, not in the first step
    seconds = []
    for step in range(run.steps):
        started = time.process_time()
        trainer.step(step)
        seconds.append(time.process_time() - started)
    if run.is_probe:
        return {"seconds": seconds}
    if is_prompt:
        passages = data.vectors(data.searched).astype(np.float32)
        return {"seconds": seconds, **data.measure(lambda texts: system.encode(texts, "query"), passages)}
    with tempfile.TemporaryDirectory() as folder:
        system.save(Path(folder) / "model")
        return {"seconds": seconds, **data.measure_folder(Path(folder) / "model")}


def train_with_peer(data: Data, run: Training, dtype: str) -> dict[str, Any]:
    """Trains with sentence-transformers in a dtype; returns the same as `train_with_riptide`."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )
    from sentence_transformers.sentence_transformer.training_args import BatchSamplers
    from transformers import TrainerCallback

    times: list[float] = []  # CPU time at the start of the first step and at the end of each step

    class Clock(TrainerCallback):
        """Notes the times of the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not times:
                times.append(time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    random = np.random.default_rng(run.seed)
    positives = np.array([random.choice(rows) for rows in data.pairs.positives])
    rows = Dataset.from_dict({"anchor": list(data.pairs.queries), "positive": data.texts(positives)})
    model = SentenceTransformer(str(data.backbone), device="cpu")
    model.max_seq_length = PASSAGE_LENGTH
    is_cached = run.method == "peer-cached"
    loss = (
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=run.batch)
        if is_cached
        else MultipleNegativesRankingLoss(model)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = Arguments(
            output_dir=folder,
            max_steps=run.steps,
            per_device_train_batch_size=run.batch * (CACHED if is_cached else 1),
            learning_rate=run.lr,
            warmup_steps=max(1, round(0.1 * run.steps)),
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            bf16=dtype == "bfloat16",
            seed=run.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        clock = [Clock()]
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss, callbacks=clock).train()
        seconds = [float(value) for value in np.diff(times)]
        if run.is_probe:
            return {"seconds": seconds}
        model.save_pretrained(f"{folder}/model")
        return {"seconds": seconds, **data.measure_folder(f"{folder}/model")}


class Runs:
    """The runs of a file: those that it has are not repeated."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        machine = {
            "device": f"{cpu_name()}, one core",
            "settings": {name: getattr(options, name) for name in ("batch", "dev", "peer_dtype")},
        }
        self.document = read(options.out, machine)
        self.measurements: dict[str, dict[str, Any]] = self.document["measurements"]

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of a run, which `make` makes if the file lacks them."""
        if name not in self.measurements:
            self.measurements[name] = make()
            write_json(self.options.out, self.document, None)
        return self.measurements[name]

    def train(self, data: Data, run: Training) -> dict[str, Any]:
        """Makes a run and returns its record."""
        is_peer = run.method.startswith("peer")
        result = train_with_peer(data, run, self.options.peer_dtype) if is_peer else train_with_riptide(data, run)
        seconds = result.pop("seconds")
        if run.is_probe:
            return {"step_s": round(statistics.median(seconds[2:]), 4)}
        return {"steps": run.steps, "cpu_s": round(sum(seconds), 1), **result}

    def run_all(self) -> None:
        """Runs all methods, budgets and seeds on all sets; only the first seed has several learning rates."""
        backbone = Path(find_model_folder(self.options.backbone))
        sets = {folder.name: Data(folder, backbone, self.options.dev) for folder in self.options.sets}
        for name, data in sets.items():
            base = self.get(f"{name} untrained", lambda data=data: data.measure_folder(backbone))
            print(f"{name} untrained: MRR@10 {base['test mrr@10']:.4f}", flush=True)
        step_s = {name: self.step_seconds(name, data) for name, data in sets.items()}
        for minutes in self.options.minutes:
            for method in self.options.methods:
                steps = {name: max(4, round(minutes * 60 / step_s[name][method])) for name in sets}
                self.run_method(sets, method, minutes, steps)

    def step_seconds(self, name: str, data: Data) -> dict[str, float]:
        """Returns the CPU seconds of a step of each method on a set."""
        probes: dict[str, list[float]] = {method: [] for method in self.options.methods}
        for turn in range(3):  # in turns, as the speed of the machine changes
            for method, seconds in probes.items():
                run = Training(method, rates_of(method)[0], 0, PROBE, self.options.batch, is_probe=True)
                step = self.get(f"{name} {method} step {turn}", lambda run=run: self.train(data, run))
                seconds.append(step["step_s"])
        return {method: statistics.median(seconds) for method, seconds in probes.items()}

    def run_method(self, sets: dict[str, Data], method: str, minutes: float, steps: dict[str, int]) -> None:
        """Runs a method with a budget: several learning rates with the first seed, then the best one with the others.

        Args:
            sets: The sets by name.
            method: The method.
            minutes: The budget.
            steps: The steps that fit the budget, by set.
        """

        def run(name: str, lr: float, seed: int) -> None:
            run_name = run_name_of(name, method, minutes, lr, seed)
            training = Training(method, lr, seed, steps[name], self.options.batch)
            result = self.get(run_name, lambda: self.train(sets[name], training))
            figures = f"MRR@10 {result['test mrr@10']:.4f} (dev {result['dev mrr@10']:.4f})"
            print(f"{run_name}: {result['steps']} steps in {result['cpu_s']:.0f} s, {figures}", flush=True)

        first, *others = self.options.seeds
        is_chosen = minutes > min(self.options.minutes) or method == "peer-cached"
        for lr in [self.best_rate(list(sets), method)] if is_chosen else self.rates(method):
            for name in sets:
                run(name, lr, first)
        for seed in others:
            for name in sets:
                run(name, self.best_rate(list(sets), method), seed)

    def best_rate(self, sets: Sequence[str], method: str) -> float:
        """Returns the rate that the sets' dev queries choose, with the smallest budget and the first seed."""
        chosen_for, rates = "peer" if method == "peer-cached" else method, self.rates(method)
        return best_rate(self.measurements, sets, chosen_for, min(self.options.minutes), self.options.seeds[0], rates)

    def rates(self, method: str) -> list[float]:
        """Returns the learning rates of a method that are tried."""
        return [lr for lr in rates_of(method) if lr in (self.options.rates or rates_of(method))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the output file lacks.

    Args:
        arguments: The command line; None: that of the process.
    """
    parser = Parser(__doc__)
    parser.add("--sets", [], "folders of prepared sets", type=Path)
    parser.add("--backbone", "sentence-transformers/all-MiniLM-L6-v2", "the backbone")
    parser.add("--methods", list(METHODS), "what trains", choices=METHODS)
    parser.add("--minutes", [1.0, 5.0], "budgets in minutes of CPU time, rising")
    parser.add("--seeds", [0, 1, 2], "seeds of the training runs")
    parser.add("--batch", 32, "pairs per step")
    parser.add(
        "--rates", [], "learning rates to try, which each method must have (default: all of a method)", type=float
    )
    parser.add("--dev", 150, "training queries that are held out, and choose the learning rate")
    parser.add("--peer-dtype", "bfloat16", "precision of sentence-transformers", choices=("float32", "bfloat16"))
    parser.add("--out", ROOT / "results/training-budgets.json", "the output file (.json, .json.gz), which is continued")
    parser.add("--tables", False, "print the tables of the output file, and do not train")
    options = parser.parse_args(arguments)
    if options.tables:
        print("\n".join(budget_lines(read_json(options.out))))
        return
    if not options.sets:
        parser.error("expected --sets, or --tables")
    for method in options.methods if options.rates else ():
        if unknown := {*options.rates} - {*rates_of(method)}:
            rates = ", ".join(f"{lr:g}" for lr in rates_of(method))
            parser.error(f"--rates: expected some of {rates} for {method}, got {min(unknown):g}")
    torch.set_num_threads(1)
    with keep_freed_memory():
        Runs(options).run_all()


if __name__ == "__main__":
    main()
