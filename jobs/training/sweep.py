"""A sweep: the grid of its runs from `lr=1e-2,3e-2 seed=0,1,2`, and the work that makes sweeps/NAME of them.

The work has a part for each run, so that an interrupted sweep resumes at the next run.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from riptide.base.errors import DivergedError, InputError
from riptide.base.wording import STORED, Parameter
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.training.named_values import parse_named_value
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    Progress,
    ProgressCounter,
    WorkUnit,
)
from riptide.indexing.work.worker_tasks import Runner
from riptide.jobs.common.flat_options import describe_type, options_by_name, parse_words, replace_options

Options = TypeVar("Options")

MAX_RUNS = 1_000
Settings = dict[str, Any]  # the values of the swept options of a run, by name
SEED = "seed"  # the option over whose values the quality of other settings is averaged


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep: its swept values and its options.

    Attributes:
        settings: The swept options.
        options: All options of the job.
    """

    settings: Settings
    options: Any

    @property
    def suffix(self) -> str:
        """The swept values as part of a name: `lr0.01-seed2`."""
        return "-".join(f"{name}{_name_part(value)}" for name, value in self.settings.items())


def parse_grid(texts: Sequence[str], options: Options, fixed_options: Collection[str]) -> list[SweepRun]:
    """Returns a run for every combination of the swept values; the last option changes fastest.

    Args:
        texts: `NAME=VALUE,VALUE,…`, one for each swept option.
        options: The options of the job; each run has them, apart from the swept ones.
        fixed_options: Options that cannot be swept.

    Raises:
        InputError: If an option is unknown or cannot be swept, if it comes twice, or if a value does not fit.
    """
    flat = options_by_name(type(options))
    known = [name for name in flat if name not in fixed_options]
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, listed = parse_named_value(text, f"{Parameter('sweep', text)}: expected NAME=VALUE,VALUE")
        name = name.removeprefix("--").replace("-", "_")
        if name in fixed_options and name in flat:
            raise InputError(
                f"{Parameter('sweep', text)}: all runs of a sweep have the same {name}; give it as {Parameter(name)}"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise InputError(f"{Parameter('sweep', text)}: {name} is not an option that can be swept; {hint}")
        if name in values:
            raise InputError(f"{Parameter('sweep', text)}: {name} is swept twice; give all values in one list")
        values[name] = [_parse_value(value.strip(), flat[name].type, text) for value in listed.split(",")]
        if len({_name_part(value) for value in values[name]}) < len(values[name]):
            raise InputError(f"{Parameter('sweep', text)}: a value comes twice")
    count = 1
    for listed_values in values.values():
        count *= len(listed_values)
    if count > MAX_RUNS:
        raise InputError(f"{Parameter('sweep', ' '.join(texts))}: {count:,} runs; expected at most {MAX_RUNS:,}")
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [SweepRun(settings, replace_options(options, settings)) for settings in combinations]


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of one run of a sweep: its settings, and its quality or the problem that ended it.

    Attributes:
        artifact: Key of the artifact that it trained, `kind/name`; empty if the run diverged.
        settings: The swept options.
        quality: The best measurement on the dev split; None if the run diverged.
        step: The step of that measurement.
        problem: Why there is no artifact; empty if there is one.
    """

    artifact: str
    settings: Settings
    quality: float | None
    step: int = 0
    problem: str = ""


@dataclass(frozen=True)
class SweepChoice:
    """The chosen run of a sweep, and the mean quality of its settings.

    Attributes:
        outcome: The run.
        mean: Mean quality of its settings over the seeds.
        seeds: Number of seeds.
    """

    outcome: SweepOutcome
    mean: float
    seeds: int


class SweepWork(BaseWork):
    """The work that makes sweeps/NAME: it trains the runs of a sweep and chooses one.

    Args:
        name: Name of the sweep.
        runs: Its runs.
        inputs: The artifacts that the runs are made from, by role.
        configs: The configuration of each run.
        train: Trains a run and returns its artifact; an artifact that is complete is not made again.
    """

    def __init__(
        self,
        name: str,
        runs: Sequence[SweepRun],
        inputs: Mapping[str, Artifact | ArtifactReference],
        configs: Sequence[Mapping[str, Any]],
        train: Callable[[SweepRun], Artifact],
    ):
        config = {"runs": [run.settings for run in runs], "configs": list(configs)}
        models = {"backbone": ("backbone", runs[0].options.backbone)}
        self.targets = [ArtifactTarget("sweeps", name, inputs, config, models=models)]
        self.stages = [SweepStage(tuple(runs), train)]

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the chosen run to the notes of the sweep. Raises InputError if every run has diverged."""
        [draft] = drafts
        choice = choose_run(read_outcomes(draft))
        draft.add_notes(
            chosen=choice.outcome.artifact,
            quality=choice.outcome.quality,
            settings=choice.outcome.settings,
            mean=choice.mean,
            seeds=choice.seeds,
        )


@dataclass(frozen=True)
class SweepStage(BaseStage):
    """The only stage of a sweep; a unit is a run."""

    runs: tuple[SweepRun, ...]
    train: Callable[[SweepRun], Artifact]
    title: str = "sweep"
    noun: str = "runs"

    @property
    def total(self) -> int:
        """The number of runs of the sweep."""
        return len(self.runs)

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each run."""
        for number, run in enumerate(self.runs):
            yield WorkUnit((f"run-{number:05d}",), 1, run)

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Trains a run, unless its artifact is complete, and commits the outcome."""
        run: SweepRun = unit.payload
        try:
            artifact = self.train(run)
            notes = artifact.notes
            outcome = SweepOutcome(str(artifact.key), run.settings, notes["best"], notes["best_step"])
        # The divergence of a run, for example at a high learning rate, is a result and no failure of the sweep.
        except DivergedError as error:
            outcome = SweepOutcome("", run.settings, None, problem=STORED.render(f"{error}"))
        text = json.dumps(vars(outcome)) + "\n"  # keeps the order of --sweep, in which a table shows the settings
        draft.commit(unit.names[0], ".jsonl", lambda path: path.write_text(text, encoding="utf-8"), rows=1)
        counter.count(1)


def read_outcomes(artifact: Artifact | Draft) -> list[SweepOutcome]:
    """Returns the outcomes of a sweep's runs in the order of the grid."""
    parts = artifact.committed_parts().values() if isinstance(artifact, Draft) else artifact.parts
    ordered = sorted(parts, key=lambda part: part.name)
    return [SweepOutcome(**json.loads(artifact.local_path(part).read_text(encoding="utf-8"))) for part in ordered]


def choose_run(outcomes: Sequence[SweepOutcome]) -> SweepChoice:
    """Chooses the run with the best quality on the dev split.

    Settings are compared by their mean over the seeds; settings with a run that diverged are out. Of the best ones,
    the seed with the highest quality is chosen. Of equal ones, the first of the grid.

    Raises:
        InputError: If no settings are left.
    """
    groups: dict[str, list[SweepOutcome]] = {}
    for outcome in outcomes:
        settings = {name: value for name, value in outcome.settings.items() if name != SEED}
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(outcome)
    best: SweepChoice | None = None
    for members in groups.values():
        qualities = [math.nan if member.quality is None else member.quality for member in members]
        mean = sum(qualities) / len(qualities)
        if not math.isnan(mean) and (best is None or mean > best.mean):
            best = SweepChoice(members[qualities.index(max(qualities))], mean, len(members))
    if best is None:
        raise InputError(f"every run of the sweep has diverged, the first one: {outcomes[0].problem}")
    return best


def _parse_value(value: str, hint: Any, text: str) -> Any:
    """Converts a swept value to the type of its option. Raises InputError if it does not fit."""
    try:
        return parse_words(hint, [value])
    except (ValueError, KeyError):
        raise InputError(f"{Parameter('sweep', text)}: expected {describe_type(hint)}, got {value!r}") from None


def _name_part(value: Any) -> str:
    """Converts a swept value to a part of a name: letters, digits, periods, dashes and underscores."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)
