"""The steps that prepare the sets of an experiment, and the part of an experiment that some arms need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from riptide.jobs.commands.steps import JobStep, make_step, read_entry, replace_in
from riptide.jobs.experiments.arms import Experiment, Settings, named_arms
from riptide.jobs.experiments.measuring import SPLADE
from riptide.jobs.experiments.trials import make_trial

DATA = {"corpus", "queries"}  # kinds of artifacts that every job of a store may read


def preparing_steps(experiment: Experiment, path: str) -> list[JobStep]:
    """Returns the steps in `prepare`, in order; an entry that contains {set} is one step per set.

    Args:
        experiment: The experiment.
        path: Its file, for messages.

    Raises:
        InputError: If a job does not exist or does not take an option.
    """
    return [step for _, step in _entries(experiment, path)]


def _entries(experiment: Experiment, path: str) -> list[tuple[Settings, JobStep]]:
    """Returns the entries in `prepare` with their stores, one per set if they contain {set}, and their steps."""
    entries = []
    for number, entry in enumerate(experiment.prepare, 1):
        where = f"{path}: prepare, step {number}"
        for set_name in experiment.sets if "{set}" in str(entry) else [""]:
            job, settings = read_entry(replace_in(entry, "{set}", set_name), where)
            data_set = experiment.sets[set_name] if set_name else next(iter(experiment.sets.values()))
            store = settings.pop("store", data_set.store)
            entries.append(({job: {"store": store, **settings}}, make_step(where, job, settings, store)))
    return entries


def select_arms(experiment: Experiment, path: str, measured: Mapping[str, Sequence[str]]) -> Experiment:
    """Returns the part of an experiment that some arms need: arms, sets, and steps in `prepare`.

    Args:
        experiment: The experiment.
        path: Its file, for messages.
        measured: The sets that each of the arms is measured on.

    Raises:
        InputError: As `preparing_steps`, and for an option of an arm that its job does not take.
    """
    arms = {
        name: arm.model_copy(update={"measured_on": [*measured.get(name, ())]})
        for name, arm in experiment.arms.items()
        if name in _with_sources(experiment, measured)
    }
    modes = {arm.train_on or experiment.train_on for arm in arms.values() if arm.is_trained}
    sets = {
        name: data_set
        for name, data_set in experiment.sets.items()
        if any(name in names for names in measured.values()) or (data_set.is_trained_on and modes & {"all", "others"})
    }
    part = experiment.model_copy(update={"arms": arms, "sets": sets})
    pairs = [pair for pair in experiment.pairs if {*pair} <= arms.keys()]
    entries = _needed_entries(_entries(experiment, path), _read_keys(part, path))
    return part.model_copy(update={"prepare": entries, "pairs": pairs})


def _with_sources(experiment: Experiment, names: Iterable[str]) -> set[str]:
    """Returns some arms, and those whose options, tasks or models they use."""
    arms: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name not in arms:
            arms.add(name)
            arm = experiment.arms[name]
            pending += filter(None, (arm.like, arm.uses))
            pending += named_arms([experiment.own_options(name), arm.for_set])
    return arms


def _read_keys(experiment: Experiment, path: str) -> set[tuple[str, str]]:
    """Returns the store and the key of each artifact that the arms read; "corpus" stands for the data of a store."""
    keys = {(data_set.store, "corpus") for data_set in experiment.sets.values()}
    first = {name: {o: v[0] for o, v in arm.tried.items()} for name, arm in experiment.arms.items()}
    for name, arm in experiment.arms.items():
        sets = [*experiment.sets] if arm.uses is None else []
        if "store" in experiment.own_options(name):
            sets = sets[:1]  # one training serves all sets
        for set_name in sets:
            store = experiment.sets[set_name].store
            if arm.source is not None:
                step = make_step(path, "search", {"source": arm.source}, store)
            elif arm.encoder is not None:
                step = make_step(path, "encode_corpus", {"encoder": arm.encoder}, store)
            else:
                trial = make_trial(experiment, name, first, 0, set_name, choosing=False)
                step = trial.step(path)
                if trial.keeps_passages:
                    kinds = ("embeddings", "index") if trial.options.get("pooling") == SPLADE else ("embeddings",)
                    keys |= {(store, f"{kind}/{trial.options['embeddings']}") for kind in kinds}
                for text in trial.options.get("also_train", ()):
                    values = dict(pair.partition("=")[::2] for pair in text.split(","))
                    other = values.get("store", trial.store)
                    keys.add((other, "corpus"))
                    keys |= {
                        (other, f"{kind}/{values[kind]}") for kind in ("negatives", "embeddings") if kind in values
                    }
            keys.add((step.options.store, "corpus"))
            keys |= {(step.options.store, key) for key in step.reads()}
    return keys


def _needed_entries(entries: Sequence[tuple[Settings, JobStep]], keys: set[tuple[str, str]]) -> list[Settings]:
    """Returns the entries whose steps make some artifacts, or what these are made from."""
    needed = set(keys)
    needed_entries = []
    for entry, step in reversed(entries):
        store = step.options.store
        urls = {key.partition("/")[2] for _, key in needed}  # a model of another store is named by its URL
        is_data = not DATA.isdisjoint(step.options.MAKES) and (store, "corpus") in needed
        if is_data or any((store, key) in needed or f"{store}/{key}" in urls for key in step.makes()):
            needed_entries.append(entry)
            needed |= {(store, "corpus"), *((store, key) for key in step.reads())}
    return needed_entries[::-1]
