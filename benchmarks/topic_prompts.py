"""Compares prompts of topics (Topic-DPR) with one prompt for all texts (DPTDR), by the categories of the passages.

    python benchmarks/topic_prompts.py --data ../shared/data --folder W --backbone examples/backbone --json R.json
    python benchmarks/topic_prompts.py --only serve --json R.json

A query is a title and a passage the text below it; a passage is relevant if it has a category of the query. The
backbones are frozen: all-MiniLM-L6-v2 (`minilm`), and the one in the folder of --backbone (`small`). The parts:

choose    tries several values of one setting after another, in shorter training runs with the first seed; the mean
          MAP@50 over the dev splits of the sets decides, for topics by the protocol `own`
main      on the test splits, with each of --seeds: `dptdr`, one prompt for all texts, trained with the loss of queries
          and passages alone; `topic`, a prompt of equal length for each topic, with all losses. Also `bm25`, the
          backbone without a prompt (`none`), and the expected values of a random ranking
controls  with the first seed: `random`: random topics of equal sizes, in training and in search (by `own`, the random
          topic of a query does not depend on its passage); `shuffled`: the topics of passages, and those of queries,
          are shuffled after training; `swapped`: each topic has the prompt of another one after training; `alpha-0`:
          `topic` without the loss of pairs of queries and that of topics; `no-topic-loss`: without the latter; `lda`:
          as many topics, by LDA; `dptdr-queries`: `dptdr` with the loss of pairs of queries; `dptdr-mlp`: `dptdr` whose
          prompt is the output of a network, like those of topics. With each seed: `same-topic`: the prompt of `dptdr`,
          and a weight is added to the score of each passage that has the topic of the query. `shuffled` and `swapped`
          need the runs of `topic` in `main` (with the same protocol), and `same-topic` those of `dptdr`
text      with the first seed, all weights are trained: `fine-tune`; `words`: the words of its topic are in front of
          each query and passage; `random-words`: those of a random topic, drawn for each text (Topic-DPR, Table 2)
serve     random prompts: 20 tasks with topics beside 20 fixed and 20 computed ones in mixed batches of one encoder

There are two protocols, in training and in search: `own`, the topic of a query is inferred from its text; `judged`, it
is that of its judged passage, as in the paper, which tells the query where its passage is. Topics of passages and BM25
come from whole passages, and encoders get the first --passage-length tokens: with --passage-words, all have equal text.

The file of figures is written after each run, and a run that it holds is not repeated. Intervals are of the mean
difference of MAP@50 over queries, which are resampled; the values of a query are means over the seeds that both arms
have. They do not contain the variation between seeds. The metrics of each query are in a second file, .queries.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.topics.figures import Figures
from benchmarks.topics.options import SHAPING, add_options
from benchmarks.topics.runs import CHOSEN_BY, ONE_PROMPT, SAME_TOPIC, WITH_PROMPTS_OF, Run, run_name
from benchmarks.topics.settings import CANDIDATES, START, Settings
from benchmarks.topics.summary import summarise
from benchmarks.topics.tables import tables

if TYPE_CHECKING:
    from benchmarks.topics.measurement import Measurement

SERVED_TASKS = 20  # of each kind


@dataclass(frozen=True)
class Experiment:
    """Makes the runs that the file of figures lacks, with one backbone.

    Attributes:
        model: minilm or small.
        options: The options of the benchmark.
        measurement: Trains and measures.
        figures: The file of figures.
    """

    model: str
    options: argparse.Namespace
    measurement: Measurement
    figures: Figures

    def finish(self, run: Run) -> None:
        """Makes a run, unless the file has it."""
        if not self.figures.has(run):
            started = time.perf_counter()
            values = self.measurement.measure(run)
            self.figures.add(run, values, time.perf_counter() - started)

    def choose(self) -> dict[str, Settings]:
        """Returns the settings of each arm that has candidates."""
        topic = self.choose_settings("topic", START)
        dptdr = self.choose_settings("dptdr", {**START, "length": topic["length"]})
        chosen = {"topic": topic, "dptdr": dptdr}
        start = {**START, "length": topic["length"], "temperature": dptdr["temperature"]}
        controls = self.options.controls if "controls" in self.options.only else ()
        if "dptdr-mlp" in controls:
            chosen["dptdr-mlp"] = self.choose_settings("dptdr-mlp", start)
        if SAME_TOPIC in controls:
            for data in self.options.choose_sets:  # its prompts are those of `dptdr`
                self.finish(self.test_run("dptdr", data, None, self.options.seeds[0], dptdr))
            chosen[SAME_TOPIC] = self.choose_settings(SAME_TOPIC, {})
        if "text" in self.options.only:
            chosen["fine-tune"] = self.choose_settings("fine-tune", start)
        return chosen

    def choose_settings(self, arm: str, start: Settings) -> Settings:
        """Returns the settings with the best mean MAP@50 over the dev splits, one setting after the other.

        Args:
            arm: An arm with candidates.
            start: The settings without candidates.
        """
        candidates = CANDIDATES[arm]
        settings = {**start, **{key: values[0] for key, values in candidates.items()}}
        for key in [key for key in candidates if key in self.options.choose_settings]:
            variants = [{**settings, key: value} for value in candidates[key]]
            settings = max(variants, key=lambda variant: self.dev_quality(arm, variant))
        return settings

    def dev_quality(self, arm: str, settings: Settings) -> float:
        """Returns the mean MAP@50 of an arm over the dev splits; makes the runs if needed."""
        named = "-".join(f"{key}{settings[key]:g}" for key in CANDIDATES[arm])
        if arm in ONE_PROMPT:
            named += f"-length{settings['length']:g}"
        qualities = []
        for data in self.options.choose_sets:
            run = Run(
                name=f"choose-{self.model}-{data}-{arm}-{named}",
                arm=arm,
                data=data,
                model=self.model,
                seed=self.options.seeds[0],
                protocol="own" if arm in ("topic", SAME_TOPIC) else None,
                split="dev",
                steps=self.options.choose_steps,
                settings=settings,
            )
            self.finish(run)
            qualities.append(self.figures.document["runs"][run.name]["metrics"][CHOSEN_BY])
        return float(np.mean(qualities))

    def test_run(self, arm: str, data: str, protocol: str | None, seed: int, settings: Settings | None) -> Run:
        """Returns a run on the test split; the arguments are those of a Run, with None if nothing is trained."""
        backbone = "" if arm == "bm25" else self.model
        return Run(
            name=run_name(backbone, data, arm, protocol, seed),
            arm=arm,
            data=data,
            model=backbone,
            seed=seed,
            protocol=protocol,
            split="test",
            steps=0 if settings is None else self.options.steps,
            settings=settings or {},
        )

    def finish_planned(self, chosen: Mapping[str, Settings]) -> None:
        """Makes the runs on the test splits. The summary, whose intervals take seconds, is made after the last one."""
        try:
            arms = planned_arms(chosen, self.options)
        except KeyError as error:
            raise SystemExit(f"no settings of {error.args[0]} in the file of figures: add choose to --only") from error
        for planned in arms:
            for data, protocol, seed in itertools.product(self.options.sets, planned.protocols, planned.seeds):
                self.check_prompts(planned.arm, data, protocol, seed, chosen)
                self.finish(self.test_run(planned.arm, data, protocol, seed, planned.settings))
        self.figures.document["summary"] = summarise(self.figures)
        self.figures.save()

    def check_prompts(
        self, arm: str, data: str, protocol: str | None, seed: int, chosen: Mapping[str, Settings]
    ) -> None:
        """Ends the program if an arm uses the prompts of another one, and the file lacks its run with these settings.

        The first arguments are those of a Run.
        """
        if (other := WITH_PROMPTS_OF.get(arm)) is None:
            return
        run = self.test_run(other, data, None if other in ONE_PROMPT else protocol, seed, chosen[other])
        if not self.figures.has(run):
            raise SystemExit(f"{arm}: uses the prompts of {run.name}, which is not in the file: add the part main")


@dataclass(frozen=True)
class PlannedArm:
    """An arm on the test splits.

    Attributes:
        arm: The arm.
        settings: Its settings; None: it is not trained.
        seeds: The seeds.
        protocols: The protocols; None stands for an arm without topics.
    """

    arm: str
    settings: Settings | None
    seeds: Sequence[int]
    protocols: Sequence[str | None] = (None,)


def planned_arms(chosen: Mapping[str, Settings], options: argparse.Namespace) -> list[PlannedArm]:
    """Returns the arms on the test splits, the important ones first.

    Args:
        chosen: The settings of arms with candidates; an arm without has those of a similar one.
        options: The options of the benchmark.
    """
    first = options.seeds[:1]
    arms = []
    if "main" in options.only:
        arms += [
            PlannedArm("bm25", None, first),
            PlannedArm("none", None, first),
            PlannedArm("dptdr", chosen["dptdr"], options.seeds),
            PlannedArm("topic", chosen["topic"], options.seeds, options.protocols),
        ]
    if "controls" in options.only:
        arms += [planned_control(arm, chosen, options) for arm in options.controls]
    if "text" in options.only:
        arms += [
            PlannedArm("fine-tune", chosen["fine-tune"], first),
            PlannedArm("words", chosen["fine-tune"], first, options.protocols),
            PlannedArm("random-words", chosen["fine-tune"], first),
        ]
    return arms


def planned_control(arm: str, chosen: Mapping[str, Settings], options: argparse.Namespace) -> PlannedArm:
    """Returns a control on the test splits; the other arguments are those of `planned_arms`."""
    first = options.seeds[:1]
    if arm == SAME_TOPIC:
        return PlannedArm(arm, chosen[SAME_TOPIC], options.seeds, options.control_protocols)
    if arm == "dptdr-mlp":
        return PlannedArm(arm, chosen[arm], first)
    if arm == "dptdr-queries":
        return PlannedArm(arm, {**chosen["dptdr"], "alpha": chosen["topic"]["alpha"]}, first)
    return PlannedArm(arm, chosen["topic"], first, options.control_protocols)


def main() -> None:
    """Reads the options, trains and measures each run, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    options.choose_sets = options.choose_sets or options.sets
    options.models = options.models or (["minilm", "small"] if options.backbone else ["minilm"])
    if "small" in options.models and not options.backbone:
        parser.error("--models small: give its folder with --backbone")
    if "choose" in options.only and options.settings_of:
        parser.error("--settings-of: leave out the part choose, or this option")
    if "choose" in options.only and (missing := set(options.choose_sets) - set(options.sets)):
        parser.error(f"--choose-sets {' '.join(sorted(missing))}: not in --sets: add it there")
    needs_data = options.only != ["serve"]
    if needs_data and not (options.data and options.folder):
        parser.error("--data and --folder: needed for all parts but serve")
    chosen_before: dict[str, Any] = {}
    if options.settings_of:
        try:
            chosen_before = json.loads(Path(options.settings_of).read_text())["chosen"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--settings-of {options.settings_of}: not a file of figures with chosen settings: {error!r}")
    figures = Figures(Path(options.json), {name: getattr(options, name) for name in SHAPING})
    document = figures.document
    if needs_data:
        from benchmarks.topics.measurement import Measurement

        measurement = Measurement(options)
        document.setdefault("topics", {}).update(
            {name: topic_set.describe() for name, topic_set in measurement.sets.items()}
        )
        chosen: dict[str, Any] = document.setdefault("chosen", {})
        chosen |= chosen_before
        for model in options.models:
            experiment = Experiment(model, options, measurement, figures)
            if "choose" in options.only:
                chosen[model] = chosen.get(model, {}) | experiment.choose()
            if model not in chosen:
                parser.error(f"--only {' '.join(options.only)}: {options.json} has no settings of {model}: add choose")
            print(f"chosen: {chosen[model]}", flush=True)
            experiment.finish_planned(chosen[model])
    if "serve" in options.only and "serve" not in document:
        from benchmarks.topics.serving import measure_serving

        document["serve"] = measure_serving(options, SERVED_TASKS)
    figures.save()
    markdown = tables(document, SERVED_TASKS)
    Path(options.json).with_suffix(".md").write_text(markdown)
    print(markdown, end="")


if __name__ == "__main__":
    main()
