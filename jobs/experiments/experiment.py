"""Runs an experiment: prepares sets, chooses values, trains each arm with its seeds, measures and compares.

Every step is a job, so an interrupted experiment resumes with the first step whose artifact is not complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import DivergedError, InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import resumable
from riptide.jobs.commands.steps import JobStep
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say
from riptide.jobs.experiments.arms import STORE, Experiment, Settings, named_arms, read_experiment
from riptide.jobs.experiments.choosing import choose
from riptide.jobs.experiments.measuring import ControlFunctions, Measurement
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.preparing import preparing_steps
from riptide.jobs.experiments.results import Results, RunValues
from riptide.jobs.experiments.results_file import (
    ENDING,
    check_name,
    check_results,
    identity,
    read_results,
    results_bytes,
    results_lines,
    summarise_results,
)
from riptide.jobs.experiments.subsets import seen_queries
from riptide.jobs.experiments.trials import Trial, make_trial, with_trained
from riptide.jobs.training.training_options import TrainRetriever


@dataclass(frozen=True, kw_only=True)
class RunExperiment(Common):
    arms: str
    """A YAML file of sets, arms and comparisons."""
    only: tuple[str, ...] = ()
    """Names of arms that are measured; default: all. An arm that one of them is like is trained too."""
    seeds: tuple[int, ...] = ()
    """Seeds of the training runs of all arms, the first one of which chooses values; default: as the file says."""
    results: str | None = option(None, metavar="FILE")
    """File of the results, FILE.json.gz: options, the values of each query, machine and commit. Tables (.md) and
    further figures (.json) are written next to it. Default: results/NAME.json.gz, of the file of arms."""
    overwrite: bool = False
    """Replace a file of --results that holds results of other options."""


def main(options: RunExperiment, controls: Mapping[str, ControlFunctions] | None = None) -> None:
    """Runs the experiment of a file; with --plan, prints its steps.

    Args:
        options: The options.
        controls: The functions that arms name as `control`.
    """
    if options.limit is not None:
        raise InputError(f"{Parameter('limit')}: expected in the file of {Parameter('arms')}, as an option of its jobs")
    experiment = read_experiment(options.arms, options.store).with_seeds(options.seeds)
    if unknown := [name for name in options.only if name not in experiment.arms]:
        raise InputError(f"{Parameter('only', unknown[0])}: no such arm; expected some of {', '.join(experiment.arms)}")
    name = Path(options.arms).stem
    path = options.results or f"results/{name}{ENDING}"
    check_name(path)
    only = {"only": [*options.only]} if options.only else {}
    expected = identity(read_experiment(options.arms, STORE).with_seeds(options.seeds), arms=name, **only)
    if not options.overwrite:
        check_results(path, expected)
    stem = path.removesuffix(ENDING)
    figures = Path(f"{stem}.json")
    before = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    performer = Performer(options.plan, before.get("seconds", {}))
    run = ExperimentRun(experiment, options.arms, Path(stem), performer, controls or {})
    run.check()
    with resumable():
        run.prepare()
        for arm in options.only or experiment.arms:
            run.measure(arm)
            if not options.plan:
                _write_figures(figures, {"arms": before.get("arms", {}) | run.notes, "seconds": performer.seconds})
    if options.plan:
        say(performer.estimate())
        return
    content = results_bytes(expected, run.results, run.notes, experiment.sets, run.subsets())
    write_files([(path, content)], overwrite=True)
    document = read_results(path)
    summary = summarise_results(document)
    _write_figures(figures, {"sets": summary, "arms": run.notes, "seconds": performer.seconds})
    text = "\n".join(results_lines(document, summary)) + "\n"
    write_files([(f"{stem}.md", text)], overwrite=True)
    say(f"{text}\nvalues of each query: {path}; figures: {figures}")


@dataclass
class ExperimentRun:
    """The run of an experiment, which trains, chooses and measures its arms.

    Attributes:
        experiment: The experiment.
        path: Its file.
        folder: Folder of the figures of single runs.
        performer: Performs the steps.
        controls: The functions that arms name as `control`.
        chosen: The chosen values by arm.
        notes: The chosen values and the qualities on dev splits by arm.
    """

    experiment: Experiment
    path: str
    folder: Path
    performer: Performer
    controls: Mapping[str, ControlFunctions]
    chosen: dict[str, Settings] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measurement = Measurement(self.experiment, self.path, self.folder, self.performer)
        self.results = Results(self.experiment.untrained)

    def check(self) -> None:
        """Raises InputError for an option that its job does not take, or for a control that does not exist."""
        first = {name: {o: v[0] for o, v in arm.tried.items()} for name, arm in self.experiment.arms.items()}
        for name, arm in self.experiment.arms.items():
            if arm.control is not None and arm.control not in self.controls:
                known = ", ".join(self.controls) or "none"
                raise InputError(f"{self.path}: arms.{name}.control: found {arm.control!r}; expected one of {known}")
            sets = self.experiment.sets_of(name) if arm.is_trained and arm.uses is None else []
            for set_name in sets:
                trial = make_trial(self.experiment, name, first, 0, set_name, choosing=False)
                _check_training(trial.step(self.path), f"{self.path}: arms.{name}")
                if trial.own_prompt and trial.store != (store := self.experiment.sets[set_name].store):
                    raise InputError(
                        f"{self.path}: arms.{name}: sets.{set_name}.store: found {store}, and the prompt that is "
                        f"trained together with the weights is in {trial.store}, the store of the training; expected "
                        "train_on: own, or sets of one store in measured_on"
                    )
        for step in preparing_steps(self.experiment, self.path):
            _check_training(step, f"{self.path}: prepare, {step.title}")

    def prepare(self) -> None:
        """Performs the steps in `prepare`."""
        for step in preparing_steps(self.experiment, self.path):
            self.performer.perform(step)

    def measure(self, arm: str) -> None:
        """Trains an arm with the chosen values for each seed, and measures it on each set."""
        if not self.experiment.arms[arm].is_trained:
            for set_name in self.experiment.sets_of(arm):
                self._add(set_name, arm, 0, self.measurement.measure_untrained(arm, set_name))
            return
        self.choose(arm)
        for seed in self.experiment.seeds_of(arm):
            for set_name in self.experiment.sets_of(arm):
                trial = self.train(arm, seed, set_name)
                self._add(set_name, arm, seed, self._measure_task(trial, set_name, self.experiment.split_of(set_name)))

    def _add(self, set_name: str, arm: str, seed: int, values: Mapping[str, RunValues]) -> None:
        """Adds the values of an arm, alone and fused with another source."""
        for other, of_source in values.items():
            self.results.add(set_name, f"{other}+{arm}" if other else arm, seed, of_source)

    def choose(self, arm: str) -> None:
        """Chooses the values of an arm, after those of the arms in `like` and `uses`."""
        if arm in self.chosen:
            return
        settings = self.experiment.arms[arm]
        for other in filter(None, (settings.like, settings.uses)):
            self.choose(other)
        qualities: dict[str, float | None] = {}

        def quality(values: Settings) -> float | None:
            self.chosen[arm] = values
            qualities[json.dumps(values)] = value = self._dev_quality(arm)
            return value

        rule = self.experiment.choose
        chosen = choose(arm, settings.tried, quality, one_at_a_time=rule.one_at_a_time, extensions=rule.extensions)
        self.chosen[arm] = chosen
        self.notes[arm] = {"chosen": chosen, "dev": qualities}
        if settings.tried:
            say(f"{arm}: {'the first values, as none is chosen yet' if self.performer.plan else 'chosen'} {chosen}")

    def _dev_quality(self, arm: str) -> float | None:
        """Returns the quality of an arm's values on a dev split; None if the training diverges, NaN with --plan."""
        choice, seed = self.experiment.choose, self.experiment.seeds_of(arm)[0]
        qualities = []
        for set_name in choice.sets or self.experiment.sets_of(arm):
            try:
                trial = self.train(arm, seed, set_name, choosing=True)
            except InputError as error:
                if not isinstance(error.__cause__, DivergedError):
                    raise
                # A divergence is a result: these values are not chosen, and the experiment continues.
                say(f"{arm} {self.chosen[arm]}: {error}")
                return None
            if choice.metric is None:
                if not self.performer.plan:
                    qualities.append(float(Store(trial.store).open(trial.kind, trial.name).notes["best"]))
            elif metrics := self._measure_task(trial, set_name, choice.split)[""].metrics:
                qualities.append(float(metrics[choice.metric].mean()))
        return float(np.mean(qualities)) if qualities else math.nan

    def train(self, arm: str, seed: int, set_name: str, *, choosing: bool = False) -> Trial:
        """Trains an arm for a set, unless the task is complete or the arm uses that of another arm."""
        settings = self.experiment.arms[arm]
        trial = make_trial(
            self.experiment, arm, self.chosen, seed, set_name, choosing=choosing and settings.uses is None
        )
        if settings.uses is not None:
            self.choose(settings.uses)
            self.train(settings.uses, seed, set_name)
            return trial
        tasks = {name: self._trained_task(name, seed, set_name) for name in named_arms(trial.options)}
        trial = with_trained(trial, tasks, plan=self.performer.plan)
        step = trial.step(self.path)
        control = self.controls.get(settings.control or "", ControlFunctions())
        if control.train is not None and not self.performer.plan:
            control.train(step)
        else:
            self.performer.perform(step)
        return trial

    def _trained_task(self, arm: str, seed: int, set_name: str) -> tuple[str, str]:
        """Returns the store and the name of an arm's trained task; trains it if it is missing."""
        self.choose(arm)
        trial = self.train(arm, seed, set_name)
        return trial.store, trial.name

    def _measure_task(self, trial: Trial, set_name: str, split: str) -> dict[str, RunValues]:
        """Returns the values of a trained task on a set: alone under "", fused with another source under its name."""
        settings = self.experiment.arms[trial.arm]
        control = self.controls.get(settings.control or "", ControlFunctions())
        if control.search is None:
            return self.measurement.measure_trial(trial, set_name, split)
        task = trial.name if settings.uses is None else self._trained_task(settings.uses, trial.seed, set_name)[1]
        return self.measurement.measure_control(control.search, trial, task, set_name, split)

    def subsets(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the queries of each subset by set, as masks: bool [queries]; {} without subsets."""
        masks: dict[str, dict[str, np.ndarray]] = {}
        for name in self.results.values if self.experiment.seen else ():
            trained_split = self.experiment.common.get("split", "train")
            seen = seen_queries(self.experiment.sets[name], self.experiment.split_of(name), trained_split)
            masks[name] = {subset: mask for subset, mask in (("seen", seen), ("unseen", ~seen)) if mask.any()}
        return masks


def _check_training(step: JobStep, where: str) -> None:
    """Raises InputError if options of a training of a retriever contradict each other; other jobs are not checked."""
    if isinstance(step.options, TrainRetriever):
        from riptide.jobs.training.resolving import tune_options  # imports torch, which would delay --help

        try:
            tune_options(step.options)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _write_figures(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the JSON file of an experiment's figures."""
    write_files([(str(path), json.dumps(document, indent=1) + "\n")], overwrite=True)
