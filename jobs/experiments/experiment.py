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
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import resumable
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say
from riptide.jobs.common.steps import make_step, read_entry
from riptide.jobs.experiments.arms import Experiment, Settings, read_experiment, replace_in
from riptide.jobs.experiments.choosing import choose
from riptide.jobs.experiments.measuring import ControlFunctions, Measurement
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.results import Results, RunValues, markdown_tables, summarise
from riptide.jobs.experiments.subsets import seen_queries
from riptide.jobs.experiments.trials import Trial, make_trial, with_models


@dataclass(frozen=True, kw_only=True)
class RunExperiment(Common):
    arms: str
    """A YAML file of sets, arms and comparisons."""
    only: tuple[str, ...] = ()
    """Names of arms that are measured; default: all. An arm that one of them is like is trained too."""
    seeds: tuple[int, ...] = ()
    """Seeds of the training runs of all arms, the first one of which chooses values; default: as the file says."""
    json: str | None = None
    """File of the figures; tables and runs are written next to it; default: results/NAME.json, of the file of
    arms."""


def main(options: RunExperiment, controls: Mapping[str, ControlFunctions] | None = None) -> None:
    """Runs the experiment of a file; with --plan, prints its steps.

    Args:
        options: The options.
        controls: The functions that arms name as `control`.
    """
    if options.limit is not None:
        raise InputError(f"{Parameter('limit')}: expected in the file of {Parameter('arms')}, as an option of its jobs")
    experiment = read_experiment(options.arms, options.store)
    if unknown := [name for name in options.only if name not in experiment.arms]:
        raise InputError(f"{Parameter('only', unknown[0])}: no such arm; expected some of {', '.join(experiment.arms)}")
    if options.seeds:
        arms = {name: arm.model_copy(update={"seeds": None}) for name, arm in experiment.arms.items()}
        experiment = experiment.model_copy(update={"seeds": list(options.seeds), "arms": arms})
    path = Path(options.json or f"results/{Path(options.arms).stem}.json")
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    performer = Performer(options.plan, before.get("seconds", {}))
    run = ExperimentRun(experiment, options.arms, path.with_suffix(""), performer, controls or {})
    run.check()
    with resumable():
        run.prepare()
        for arm in options.only or experiment.arms:
            run.measure(arm)
            if not options.plan:
                _write_figures(path, {"arms": before.get("arms", {}) | run.notes, "seconds": performer.seconds})
    if options.plan:
        say(performer.estimate())
        return
    document = summarise(run.results, experiment.pairs, run.subsets())
    _write_figures(path, {"sets": document, "arms": run.notes, "seconds": performer.seconds})
    text = markdown_tables(document)
    write_files([(str(path.with_suffix(".md")), text)], overwrite=True)
    say(f"{text}\nfigures in {path}")


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
        self.results = Results({name for name, arm in self.experiment.arms.items() if not arm.is_trained})

    def check(self) -> None:
        """Raises InputError for an option that its job does not have, or for a control that does not exist."""
        first = {name: {o: v[0] for o, v in arm.tried.items()} for name, arm in self.experiment.arms.items()}
        for name, arm in self.experiment.arms.items():
            if arm.control is not None and arm.control not in self.controls:
                known = ", ".join(self.controls) or "none"
                raise InputError(f"{self.path}: arms.{name}.control: found {arm.control!r}; expected one of {known}")
            if arm.is_trained and arm.uses is None:
                set_name = next(iter(self.experiment.sets))
                make_trial(self.experiment, name, first, 0, set_name, choosing=False).step(self.path)

    def prepare(self) -> None:
        """Performs the steps in `prepare`, once per set if they contain {set}."""
        for number, entry in enumerate(self.experiment.prepare, 1):
            where = f"{self.path}: prepare, step {number}"
            for set_name in self.experiment.sets if "{set}" in str(entry) else [""]:
                job, settings = read_entry(replace_in(entry, "{set}", set_name), where)
                default = (
                    self.experiment.sets[set_name].store
                    if set_name
                    else next(iter(self.experiment.sets.values())).store
                )
                store = settings.pop("store", default)
                self.performer.perform(make_step(where, job, settings, store))

    def measure(self, arm: str) -> None:
        """Trains an arm with the chosen values for each seed, and measures it on each set."""
        split = self.experiment.split
        if not self.experiment.arms[arm].is_trained:
            for set_name in self.experiment.sets:
                self.results.add(set_name, arm, 0, self.measurement.measure_untrained(arm, set_name))
            return
        self.choose(arm)
        for seed in self.experiment.seeds_of(arm):
            for set_name in self.experiment.sets:
                trial = self.train(arm, seed, set_name)
                for other, values in self._measure_task(trial, set_name, split).items():
                    self.results.add(set_name, f"{other}+{arm}" if other else arm, seed, values)

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

        chosen = choose(arm, settings.tried, quality, one_at_a_time=self.experiment.choose.one_at_a_time)
        self.chosen[arm] = chosen
        self.notes[arm] = {"chosen": chosen, "dev": qualities}
        if settings.tried:
            say(f"{arm}: {'the first values, as none is chosen yet' if self.performer.plan else 'chosen'} {chosen}")

    def _dev_quality(self, arm: str) -> float | None:
        """Returns the quality of an arm's values on a dev split; None if the training diverges, NaN with --plan."""
        choice, seed = self.experiment.choose, self.experiment.seeds_of(arm)[0]
        qualities = []
        for set_name in choice.sets or self.experiment.sets:
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
        models = {
            name: self._trained_task(name, seed, set_name)
            for name in self.experiment.arms
            if f"{{model:{name}}}" in str(trial)
        }
        trial = with_models(trial, models, plan=self.performer.plan)
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
        """Returns the queries of each subset by set, as masks: bool [queries]."""
        masks: dict[str, dict[str, np.ndarray]] = {}
        for name, by_arm in self.results.values.items():
            first = next(iter(next(iter(by_arm.values())).values()))
            masks[name] = {"all": np.ones(len(next(iter(first.metrics.values()))), bool)}
            if self.experiment.seen:
                trained_split = self.experiment.common.get("split", "train")
                seen = seen_queries(self.experiment.sets[name], self.experiment.split, trained_split)
                masks[name] |= {subset: mask for subset, mask in (("seen", seen), ("unseen", ~seen)) if mask.any()}
        return masks


def _write_figures(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the JSON file of an experiment's figures."""
    write_files([(str(path), json.dumps(document, indent=1) + "\n")], overwrite=True)
