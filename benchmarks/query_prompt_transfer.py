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
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.machine import cpu_name
from benchmarks.transfer.figures import Figures
from benchmarks.transfer.runs import ARMS, FEW_SHOT_SETS, Run, store_of
from benchmarks.transfer.tables import summarise, tables

if TYPE_CHECKING:
    from benchmarks.transfer.measurement import Measurement

SETS = ("squad", "scifact", "medquad", "climate-fever-sent", "inscit")
PARTS = ("choose", "zero-shot", "in-domain", "few-shot")
# Options that shape all figures of a file.
SHAPING = ("sets", "size", "measured", "passages", "steps", "batch", "query_length", "passage_length", "lengths")
MANY_SEEDS = ("shared", "hyper")  # arms that are trained with each of --seeds; others with the first one
WITH_WEIGHTS = ("hyper", "hyper-free")  # arms with weights of basic prompts that are computed from each query
FEW_SHOT_EPOCHS = 5

Settings = dict[str, Any]
"""negatives_from and length of all arms, lr by arm, and divergence_weight of `hyper`."""


def settings_of(arm: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of train_retriever of an arm.

    Args:
        arm: One of ARMS.
        chosen: The chosen settings.
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


@dataclass(frozen=True)
class Experiment:
    """Makes the runs that the file of figures lacks.

    Attributes:
        options: The options of the benchmark.
        measurement: Trains and measures.
        figures: The file of figures.
    """

    options: argparse.Namespace
    measurement: Measurement
    figures: Figures

    def finish(self, run: Run, sets: Sequence[str], split: str, *, with_divergence: bool = False) -> None:
        """Trains a run and measures it on a split of some sets, unless the file has it.

        Args:
            run: The run.
            sets: The sets.
            split: The split.
            with_divergence: Whether the divergence of its weights is measured too.
        """
        if self.figures.has(run.name):
            return
        started = time.perf_counter()
        values = self.measurement.measure(run, sets, split)
        if with_divergence:
            self.figures.document.setdefault("divergence", {})[run.name] = self.measurement.divergence(run)
        self.figures.add(run.name, values, time.perf_counter() - started)  # last, since it marks the run as complete

    def measure_backbone(self) -> None:
        """Measures the backbone without a prompt on the test split of each set."""
        for data in self.options.sets:
            if not self.figures.has(f"minilm-{data}"):
                started = time.perf_counter()
                values = {data: self.measurement.of_prompt(None, data, "test")}
                self.figures.add(f"minilm-{data}", values, time.perf_counter() - started)

    def choose(self) -> Settings:
        """Returns the settings with the best mean nDCG@10 over the dev splits, one setting after the other."""
        lengths = self.options.lengths
        rates = {"hyper": 1e-3, "shared": 1e-2, "per-task": 1e-3}
        chosen = {"negatives_from": "own", "length": lengths[0], "lr": rates, "divergence_weight": 1.0}
        chosen = self.best("hyper", [{**chosen, "negatives_from": negatives} for negatives in ("own", "batch")])
        chosen = self.best("hyper", with_rates(chosen, "hyper", (1e-3, 3e-3)))
        chosen = self.best("hyper", [{**chosen, "divergence_weight": weight} for weight in (1.0, 0.1, 3.0, 10.0)])
        chosen = self.best("hyper", [{**chosen, "length": length} for length in lengths])
        chosen = self.best("shared", with_rates(chosen, "shared", (1e-2, 3e-2)))
        return self.best("per-task", with_rates(chosen, "per-task", (1e-3, 3e-3)))

    def best(self, arm: str, candidates: Sequence[Settings]) -> Settings:
        """Returns the settings with which an arm is best on the dev splits."""
        return max(candidates, key=lambda settings: self.dev_quality(arm, settings))

    def dev_quality(self, arm: str, settings: Settings) -> float:
        """Returns the mean nDCG@10 of an arm over the dev splits; makes the run if needed."""
        name = f"choose-{arm}-{settings['negatives_from']}-m{settings['length']}-lr{settings['lr'][arm]:g}"
        if arm == "hyper":
            name += f"-d{settings['divergence_weight']:g}"
        sets, seed = tuple(self.options.sets), self.options.seeds[0]
        self.finish(Run(name, arm, sets, seed, settings_of(arm, settings)), sets, "dev")
        return self.figures.mean(name)

    def seeds_of(self, arm: str) -> Sequence[int]:
        """Returns the seeds with which an arm is trained."""
        return self.options.seeds if arm in MANY_SEEDS else self.options.seeds[:1]

    def zero_shot(self, chosen: Settings) -> None:
        """Trains each arm without each set, and measures that set on its test split."""
        for arm in self.options.arms:
            for seed, left_out in itertools.product(self.seeds_of(arm), self.options.folds):
                name = f"zero-{left_out}-{arm}-{seed}"
                sets = tuple(data for data in self.options.sets if data != left_out)
                self.finish(Run(name, arm, sets, seed, settings_of(arm, chosen)), [left_out], "test")

    def in_domain(self, chosen: Settings) -> None:
        """Trains each arm on all sets, and measures each set on its test split."""
        sets = tuple(self.options.sets)
        for arm in self.options.arms:
            for seed in self.seeds_of(arm):
                run = Run(f"all-{arm}-{seed}", arm, sets, seed, settings_of(arm, chosen))
                self.finish(run, sets, "test", with_divergence=arm in WITH_WEIGHTS)
        if self.options.fine_tune:
            settings = {
                "negatives_from": "batch",
                "negatives_per_query": 1,
                "lr": self.options.fine_tune_lr,
                "steps": self.options.fine_tune_steps,
                "checkpoint_every": self.options.fine_tune_steps,
            }
            seed = self.options.seeds[0]
            self.finish(Run(f"all-fine-tune-{seed}", "fine-tune", sets, seed, settings), sets, "test")

    def few_shot(self, chosen: Settings) -> None:
        """Continues the runs of zero-shot with some training queries of the set that was left out."""
        seed = self.options.seeds[0]
        for left_out in (data for data in FEW_SHOT_SETS if data in self.options.folds):
            first = next(data for data in self.options.sets if data != left_out)
            for arm, size in itertools.product(MANY_SEEDS, self.options.few):
                settings = settings_of(arm, {**chosen, "divergence_weight": 0.0}) | {
                    "init": f"{store_of(first, self.options)}/prompts/zero-{left_out}-{arm}-{seed}",
                    "queries": f"{left_out}-few",
                    "negatives": f"{left_out}-few",
                    "task_size": size,
                    "steps": -(-FEW_SHOT_EPOCHS * size // self.options.batch),
                }
                run = Run(f"few-{left_out}-{size}-{arm}", arm, (left_out,), seed, settings)
                self.finish(run, [left_out], "test")


def with_rates(settings: Settings, arm: str, rates: Sequence[float]) -> list[Settings]:
    """Returns the settings with each of some learning rates of an arm."""
    return [{**settings, "lr": {**settings["lr"], arm: rate}} for rate in rates]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
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


def main() -> None:
    """Reads the options, trains and measures each run, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    options.folds = options.folds or options.sets
    try:
        figures = Figures(Path(options.json), {name: getattr(options, name) for name in SHAPING})
    except ValueError as error:
        parser.error(f"--json {error}")
    from benchmarks.transfer.measurement import Measurement
    from benchmarks.transfer.sets import prepare

    prepare(options)
    experiment = Experiment(options, Measurement(options), figures)
    experiment.measure_backbone()
    if "choose" in options.parts:
        figures.document["chosen"] = experiment.choose()
    chosen = figures.document["chosen"]
    print(f"chosen: {chosen}", flush=True)
    if "zero-shot" in options.parts:
        experiment.zero_shot(chosen)
    if "in-domain" in options.parts:
        experiment.in_domain(chosen)
    if "few-shot" in options.parts:
        experiment.few_shot(chosen)
    figures.document |= {"options": vars(options), "cpu": cpu_name(), "summary": summarise(figures, options.sets)}
    figures.save()
    markdown = tables(figures.document, options.sets)
    Path(options.json).with_suffix(".md").write_text(markdown)
    print(markdown, end="")


if __name__ == "__main__":
    main()
