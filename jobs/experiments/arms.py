"""Reads and checks the YAML file of an experiment: sets, arms, choices and comparisons.

    sets:                      # data sets; default: one, the store of --store
      squad: {store: "{store}/squad", queries: squad, train: {queries: squad, negatives: bm25}}
    prepare:                   # steps of jobs, in order; one with {set} in it is repeated for each set
      - build_bm25: {store: "{store}/{set}"}
    common: {train: prompts, steps: 300}                   # options of train_retriever of all arms
    arms:
      bm25: {source: bm25}                                 # a search source
      minilm: {encoder: sentence-transformers/…}           # an encoder that is not trained
      prompt: {try: {lr: [0.01, 0.03]}}                    # options of train_retriever, and values to choose from
      mlp: {like: prompt, prompt: mlp}                     # the options and chosen values of another arm, with changes
    pairs: [[prompt, bm25]]    # arms whose difference is reported

{store} in a text stands for --store, {model:ARM} for the folder of the model that an earlier arm has trained, and
{prompt:ARM} for its prompt. Sets may share a store if their query sets differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from riptide.base.errors import InputError
from riptide.base.yaml_files import read_yaml
from riptide.jobs.commands.steps import replace_in

STORE = "{store}"  # stands for --store in a file
Settings = dict[str, Any]
TrainOn = Literal["own", "all", "others"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSet(_Strict):
    """A query set over the corpus of a store.

    Attributes:
        store: URL or folder of its store. Sets with different query sets may share a store.
        queries: Name of the query set; None: the only one of the store.
        train: Options of train_retriever for an arm that is trained on the set; they replace those of `common`.
        is_trained_on: Whether arms are trained on the set; if not, it is only measured.
        split: The split that is measured, in place of that of the experiment.
        hits: Hits per query, in place of those of the experiment.
        encode: Options of encode_corpus; they replace those of the experiment.
        evaluate: Options of evaluate; they replace those of the experiment.
    """

    store: str
    queries: str | None = None
    train: Settings = Field(default_factory=dict)
    is_trained_on: bool = True
    split: str | None = None
    hits: int | None = Field(default=None, gt=0)
    encode: Settings = Field(default_factory=dict)
    evaluate: Settings = Field(default_factory=dict)


class Arm(BaseModel):
    """An arm of an experiment. Other keys are options of train_retriever, or of encode_corpus if `encoder` is set.

    Attributes:
        like: An earlier arm whose options and chosen values this one has, apart from its own.
        tried: Under the key `try`: the values to choose from, by option.
        uses: An earlier arm whose trained tasks are measured; nothing is trained.
        control: The function that trains or searches in place of a job.
        source: A search source that is measured; nothing is trained.
        encoder: An encoder that is measured; nothing is trained.
        train_on: As of Experiment, in place of it.
        seeds: Seeds of the training runs, in place of those of the experiment.
        measured_on: The sets that it is measured on, and trained on if each set is a training run; None: all.
        for_set: Options that replace those of the arm in training runs on a set, by set.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    like: str | None = None
    tried: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict, alias="try")
    uses: str | None = None
    control: str | None = None
    source: str | None = None
    encoder: str | None = None
    train_on: TrainOn | None = None
    seeds: list[int] | None = None
    measured_on: list[str] | None = None
    for_set: dict[str, Settings] = Field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The options of the arm for its job, without the keys of the class."""
        return dict(self.model_extra or {})

    @property
    def is_trained(self) -> bool:
        """Whether the arm has training runs, either its own or those of another arm."""
        return self.source is None and self.encoder is None


class ChoiceRule(_Strict):
    """The rule by which the values of options are chosen.

    Attributes:
        metric: The metric of a search whose mean over sets decides; None: the best quality that training measures.
        split: The split that is searched.
        sets: The sets that are searched; None: all.
        one_at_a_time: Whether the values of an option are tried after those of the option before it was chosen; if
            not, all combinations are tried.
        extensions: How often a further value of an option is tried if the best one is the smallest or the largest; for
            arms with one option to choose, or `one_at_a_time`.
        train_on: As of Experiment; None: the same.
        options: Options of training runs that only choose, in place of those of the arm.
    """

    metric: str | None = None
    split: str = "dev"
    sets: list[str] | None = None
    one_at_a_time: bool = False
    extensions: int = Field(default=0, ge=0)
    train_on: TrainOn | None = None
    options: Settings = Field(default_factory=dict)


class Experiment(_Strict):
    """An experiment as its file defines it.

    Attributes:
        sets: The data sets by name.
        prepare: Steps of jobs that run first.
        common: Options of train_retriever of all arms.
        arms: The arms by name.
        choose: How the values of options are chosen.
        train_on: The sets that an arm is trained on: own: each set is a training run, measured on the same set; all: a
            run on all sets is measured on each; others: a set is measured with a run on the others. An arm with the
            option `store` has one training run on the data that its options name.
        seeds: Seeds of the training runs; the first one chooses.
        split: The split that is measured.
        hits: Hits per query.
        drop_self: Whether a passage with the id of a query is no hit for it, as in BEIR.
        encode: Options of encode_corpus.
        evaluate: Options of evaluate.
        measure_embeddings: Whether `evaluate` measures the embeddings too; raw: their vectors as they are, otherwise
            scaled to unit length.
        hybrid: A source; trained arms and encoders are also measured fused with it, with equal weights, as the arm
            SOURCE+ARM.
        seen: Whether queries with passages that training has seen are reported apart.
        pairs: Arms whose difference is reported.
    """

    sets: dict[str, DataSet]
    prepare: list[Settings] = Field(default_factory=list)
    common: Settings = Field(default_factory=dict)
    arms: dict[str, Arm]
    choose: ChoiceRule = ChoiceRule()
    train_on: TrainOn = "own"
    seeds: list[int] = Field(default=[0], min_length=1)
    split: str = "test"
    hits: int = Field(default=100, gt=0)
    drop_self: bool = False
    encode: Settings = Field(default_factory=dict)
    evaluate: Settings = Field(default_factory=lambda: {"metrics": ["RR@10", "R@20", "R@100"]})
    measure_embeddings: bool | Literal["raw"] = False
    hybrid: str | None = None
    seen: bool = False
    pairs: list[tuple[str, str]] = Field(default_factory=list)

    @property
    def untrained(self) -> set[str]:
        """The arms without training runs, alone and fused with another source."""
        names = {name for name, arm in self.arms.items() if not arm.is_trained}
        return names | {f"{self.hybrid}+{name}" for name in names if self.hybrid}

    def own_options(self, name: str) -> Settings:
        """Returns the options of an arm without `common`; its own options override those of the arm in `like`."""
        arm = self.arms[name]
        return {**(self.own_options(arm.like) if arm.like else {}), **arm.settings}

    def options_for(self, name: str, set_name: str) -> Settings:
        """Returns the own options of an arm in training runs on a set."""
        arm = self.arms[name]
        like = self.options_for(arm.like, set_name) if arm.like else {}
        return {**like, **arm.settings, **arm.for_set.get(set_name, {})}

    def sets_of(self, name: str) -> list[str]:
        """Returns the sets that an arm is measured on."""
        measured_on = self.arms[name].measured_on
        return [set_name for set_name in self.sets if measured_on is None or set_name in measured_on]

    def split_of(self, set_name: str) -> str:
        """Returns the split of a set that is measured."""
        return self.sets[set_name].split or self.split

    def name_in_store(self, set_name: str) -> str:
        """Returns the part of a name that tells a set from others in its store; "" if it has a separate store."""
        shares = [name for name, data in self.sets.items() if data.store == self.sets[set_name].store]
        return set_name if len(shares) > 1 else ""

    def with_seeds(self, seeds: Sequence[int]) -> Experiment:
        """Returns an experiment whose arms all have these seeds; without seeds, the same one."""
        if not seeds:
            return self
        arms = {name: arm.model_copy(update={"seeds": None}) for name, arm in self.arms.items()}
        return self.model_copy(update={"seeds": [*seeds], "arms": arms})

    def seeds_of(self, name: str) -> list[int]:
        """Returns the seeds of an arm; [0] if the arm is not trained."""
        arm = self.arms[name]
        return (arm.seeds or self.seeds) if arm.is_trained else [0]


def read_experiment(path: str, store: str) -> Experiment:
    """Reads the experiment of a file.

    Args:
        path: The YAML file.
        store: The store, which replaces {store} in the file.

    Raises:
        InputError: If the file is invalid; names the file, the key and what is expected.
    """
    document = read_yaml(path, "--arms expects a YAML file of arms")
    if not isinstance(document, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(document).__name__}")
    return make_experiment(document, path, store)


def make_experiment(document: Mapping[str, Any], path: str, store: str) -> Experiment:
    """Makes the experiment of a document.

    Args:
        document: The YAML values.
        path: Its file, for messages.
        store: The store, which replaces {store} in the document.

    Raises:
        InputError: If the document is invalid; names the file, the key and what is expected.
    """
    document = dict(replace_in(document, STORE, store.rstrip("/")))
    document.setdefault("sets", {"": {"store": store, "queries": (document.get("common") or {}).get("queries")}})
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: {_first_problem(error)}") from None
    _check_experiment(experiment, path)
    return experiment


def named_arms(value: Any) -> list[str]:
    """Returns the arms that {model:ARM} and {prompt:ARM} in a YAML value name, each once."""
    return [*dict.fromkeys(re.findall(r"\{(?:model|prompt):([^}]*)\}", str(value)))]


def _first_problem(error: ValidationError) -> str:
    """Returns the first problem in a file: the key, the value, and the expected type."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        kinds: dict[str, type[BaseModel]] = {"sets": DataSet, "choose": ChoiceRule}
        known = kinds.get(str(first["loc"][0]), Experiment).model_fields
        return f"{key}: unknown key; expected one of {', '.join(known)}"
    if first["type"] == "missing":
        return f"{key}: missing key"
    return f"{key}: found {first['input']!r}; {first['msg'][0].lower()}{first['msg'][1:]}"


def _check_experiment(experiment: Experiment, path: str) -> None:
    """Raises InputError for undefined names, for sets that share a store, and for arms that lack a key."""
    fused = [f"{experiment.hybrid}+{name}" for name in experiment.arms] if experiment.hybrid else []
    known = [*experiment.arms, *fused]
    for name in (name for pair in experiment.pairs for name in pair):
        _check_known(name, known, f"{path}: pairs")
    for name in experiment.choose.sets or ():
        _check_known(name, [*experiment.sets], f"{path}: choose.sets")
    query_sets: dict[tuple[str, str | None], str] = {}
    for name, data in experiment.sets.items():
        if (first := query_sets.setdefault((data.store, data.queries), name)) != name:
            raise InputError(
                f"{path}: sets.{name}.store: found {data.store}, the store of {first}, and the same queries; expected "
                "another store or other queries"
            )
    for place, (name, arm) in enumerate(experiment.arms.items()):
        where = f"{path}: arms.{name}"
        for key, other in (("like", arm.like), ("uses", arm.uses)):
            if other is not None:
                _check_known(other, [*experiment.arms][:place], f"{where}.{key}", "an earlier arm")
        if arm.uses is not None and arm.control is None:
            raise InputError(f"{where}: missing key control: the arm would be the same as {arm.uses}")
        for key, names in (("measured_on", arm.measured_on or ()), ("for_set", arm.for_set)):
            for set_name in names:
                _check_known(set_name, [*experiment.sets], f"{where}.{key}")
        options = {**experiment.common, **experiment.own_options(name)}
        trained = [earlier for earlier in [*experiment.arms][:place] if experiment.arms[earlier].is_trained]
        for other in named_arms([options, arm.tried]):
            _check_known(other, trained, f"{where}: {{model:{other}}}", "an earlier, trained arm")
        if arm.tried and experiment.choose.metric is None and options.get("dev_split") is None:
            raise InputError(f"{where}.try: expected the option dev_split, whose quality chooses, or choose.metric")


def _check_known(name: str, known_names: list[str], place: str, noun: str = "one") -> None:
    """Raises InputError if a name is not among the known names."""
    if name not in known_names:
        raise InputError(f"{place}: found {name!r}; expected {noun} of {', '.join(known_names) or 'none'}")
