"""A training run of an arm: its name, its data, and the step that performs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from riptide.indexing.store.model_artifacts import commit_files, model_folder
from riptide.indexing.store.store import Store
from riptide.jobs.commands.steps import JobStep, make_step, replace_in
from riptide.jobs.experiments.arms import DataSet, Experiment, Settings
from riptide.jobs.training.training_options import TrainRetriever

TRAINING = "train_retriever"
CHOOSING = "choose"


@dataclass(frozen=True)
class Trial:
    """A training run of an arm.

    Attributes:
        arm: Name of the arm.
        name: Name of the trained task, unless the arm uses the tasks of another one.
        store: The store of the trained task.
        options: All options of the job but the store and the task.
        seed: The seed.
        trained_on: The sets that it is trained on; empty if options name the data.
    """

    arm: str
    name: str
    store: str
    options: Settings
    seed: int
    trained_on: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The kind of the trained artifact: prompts or models."""
        return "prompts" if self.options.get("train") == "prompts" else "models"

    @property
    def keeps_passages(self) -> bool:
        """Whether only prompts of queries are trained, so that the existing vectors of passages stay valid."""
        return self.kind == "prompts" and self.options.get("sides") == "query"

    @property
    def own_prompt(self) -> str | None:
        """Name of the prompt that is trained together with the model, in the same store; None: no prompt is."""
        options = self.step(self.arm).options
        has_prompt = isinstance(options, TrainRetriever) and options.trains_prompt_with_weights
        return f"{self.name}-prompt" if has_prompt else None

    def step(self, path: str) -> JobStep:
        """Returns the training step. Raises InputError with the name of the experiment's file for an invalid option."""
        return make_step(f"{path}: arms.{self.arm}", TRAINING, {"task": self.name, **self.options}, self.store)


def make_trial(
    experiment: Experiment,
    arm: str,
    chosen_settings: Mapping[str, Settings],
    seed: int,
    set_name: str,
    *,
    choosing: bool,
) -> Trial:
    """Returns the training run of an arm for measuring it on a set.

    Args:
        experiment: The experiment.
        arm: Name of the arm.
        chosen_settings: The chosen values by arm, those of this arm too.
        seed: The seed.
        set_name: Name of the set.
        choosing: Whether the run chooses values.
    """
    chosen = {**inherited_values(experiment, arm, chosen_settings), **chosen_settings[arm]}
    replaced = experiment.choose.options if choosing else {}
    train_on = (choosing and experiment.choose.train_on) or experiment.arms[arm].train_on or experiment.train_on
    arm_options = {**experiment.own_options(arm), **chosen}
    options = {**experiment.common, **arm_options, **replaced}
    data_name = ""
    trained_on: tuple[str, ...] = ()
    store = options.pop("store", None)
    if store is None:
        names = [name for name, data in experiment.sets.items() if data.is_trained_on]
        if train_on == "others" and set_name in names:
            names.remove(set_name)
            data_name = f"without-{set_name}"
        elif train_on == "own":
            names = [set_name]
            data_name = experiment.name_in_store(set_name)
            arm_options = {**experiment.options_for(arm, set_name), **chosen}
        trained_on = tuple(names)
        first, *others = (experiment.sets[name] for name in names)
        store = first.store
        options = {**experiment.common, **first.train, **arm_options, **replaced}
        if others:
            options["also_train"] = [_training_set(each, options, arm_options) for each in others]
    values = [f"{option}{_name_part(value)}" for option, value in chosen_settings[arm].items()]
    words = [CHOOSING if replaced else "", arm, data_name, *values, f"seed{seed}"]
    name = "-".join(filter(None, words)).replace("_", "-")
    return Trial(arm, name, store, {**options, "seed": seed}, seed, trained_on)


def inherited_values(experiment: Experiment, arm: str, chosen_settings: Mapping[str, Settings]) -> Settings:
    """Returns the chosen values that an arm inherits from the arm in `like`, except options that it sets itself."""
    like = experiment.arms[arm].like
    if like is None:
        return {}
    values = {**inherited_values(experiment, like, chosen_settings), **chosen_settings[like]}
    return {option: value for option, value in values.items() if option not in experiment.arms[arm].settings}


def _training_set(data_set: DataSet, options: Settings, arm_options: Settings) -> str:
    """Returns a set as a value of --also-train, without options that the arm sets to null.

    The embeddings of passages have the same name in all stores, and the dev split that training measures in all sets.
    """
    shared = {"embeddings": options.get("embeddings"), "dev": options.get("dev_split")}
    values = {name: value for name, value in shared.items() if value}
    values |= {**data_set.train, "store": data_set.store}
    named = {
        option: value
        for option, value in values.items()
        if option not in arm_options or arm_options[option] is not None
    }
    return ",".join(f"{option}={value}" for option, value in named.items())


def _name_part(value: Any) -> str:
    """Converts a value to a part of a name."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def with_trained(trial: Trial, tasks: Mapping[str, tuple[str, str]], *, plan: bool) -> Trial:
    """Returns a trial in whose options {model:ARM} is replaced by a model's folder and {prompt:ARM} by a prompt's URL.

    Args:
        trial: The trial.
        tasks: The store and the name of the task of each arm.
        plan: Whether nothing is trained, so that the place of a model in its store stands for its folder.
    """
    options = trial.options
    for arm, (store, name) in tasks.items():
        options = replace_in(options, f"{{prompt:{arm}}}", f"{store}/prompts/{name}")
        if (text := f"{{model:{arm}}}") in str(options):
            folder = f"{store}/models/{name}" if plan else str(model_folder(Store(store).open("models", name)))
            options = replace_in(options, text, folder)
    return Trial(trial.arm, trial.name, trial.store, options, trial.seed, trial.trained_on)


def copy_prompt(source: str, target: str, name: str) -> None:
    """Copies prompts/NAME to another store, so that queries can be encoded with it there; an existing prompt is kept.

    Args:
        source: The store with the prompt.
        target: The other store. Its corpus is encoded by the backbone of the prompt.
        name: Name of the prompt.
    """
    artifact = Store(source).open("prompts", name)
    config = {"copy": {"store": source, "fingerprint": artifact.fingerprint}}
    with Store(target).create("prompts", name, inputs={}, config=config) as draft:
        if not draft.is_complete:
            draft.add_notes(backbone=artifact.notes["backbone"], options=artifact.notes["options"])
            commit_files(draft, model_folder(artifact))
