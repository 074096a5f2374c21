"""Options of the training jobs: option groups of the library, and options for the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.flat_options import replace_options as replace_options
from riptide.jobs.common.job_options import PROCESS_OPTIONS, EstimatedJob
from riptide.jobs.training.run_options import DevPool, Training
from riptide.jobs.training.sweep import SweepRun, parse_grid
from riptide.retriever.objectives.pair_losses import LossOptions
from riptide.retriever.objectives.terms import AllTermOptions
from riptide.retriever.options import PLURALS, TextOptions
from riptide.retriever.options.loop import ContrastiveOptimisation
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.options.pretraining import PretrainingOptions
from riptide.retriever.options.reranking import PairOptions
from riptide.retriever.options.synthesis import BasicPromptOptions
from riptide.retriever.options.topics import TopicLossOptions
from riptide.retriever.options.tuning import BatchOptions, NetworkPrompt, PromptOptions, Sides, WeightOptions

Train = Literal["prompts", "lora", "all"]
Prompt = Literal["none", "matrix", NetworkPrompt]
# The prompts that may be trained together with all weights, and the sides that this needs.
SIDES_OF_TRAINED_PROMPTS: dict[Prompt, Sides] = {"synthesised": "untied", "topics": "tied", "matrix": "tied"}
# Options that all runs of a sweep share: where the job runs, the name, the limit, checkpoints and curves, and the
# options of the dev split (queries, passages, steps between evaluations), by which the runs are compared.
FIXED = (
    *PROCESS_OPTIONS,
    "task",
    "sweep",
    "curves",
    "ray",
    "limit",
    "workers",
    "wait",
    "checkpoint_every",
    "checkpoint_minutes",
    "queries",
    "dev_split",
    "dev_limit",
    "dev_passages",
    "evaluate_every",
)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(EstimatedJob):
    """Options of single training methods; each has an effect only if another option enables its method."""

    lora: LoraOptions = field(default_factory=LoraOptions)
    topics: str | None = option(None, group=TopicLossOptions.GROUP)
    """With --prompt topics: topics/NAME of the corpus (`riptide fit-topics`); may be left out if the store has
    only one."""
    topic_prompts: TopicLossOptions = field(default_factory=TopicLossOptions)
    prompt_hidden: int | None = option(None, group=BasicPromptOptions.GROUP)
    """With --prompt synthesised: size of the hidden layer over the words of a query. Default: 400 (HYPER). With
    --prompt topics: size of the hidden layer over the words of a topic. Default: 512 (our choice)."""
    basic_prompts: BasicPromptOptions = field(default_factory=BasicPromptOptions)
    terms: Any = field(default_factory=AllTermOptions)
    sweep: tuple[str, ...] = option((), group="sweep")
    """Train with every combination of the values of some options, and choose one by --dev-split: lr=1e-2,3e-2
    seed=0,1,2 makes six runs, prompts/TASK-lr0.01-seed0 and so on, and sweeps/TASK, which names the chosen one:
    --task TASK of other jobs means that one. Settings are compared by their mean over the seeds. --curves gets a table
    and a picture."""


@dataclass(frozen=True, kw_only=True)
class TrainRetriever(Training, MethodOptions):
    GROUP: ClassVar = "data"
    HELP_FIRST: ClassVar = ("data", "optimisation", "batches", "quality during training", "what is trained", "prompt")
    MAKES: ClassVar = ("tasks", "models")
    NAMED_BY: ClassVar = ("task",)
    READS: ClassVar = {
        "queries": "queries",
        "negatives": "negatives",
        "backbone": "models",
        "embeddings": "embeddings",
        "init": "tasks",
        "topics": "topics",
    }

    task: str
    """Name of the task. The job makes prompts/TASK with --train prompts, otherwise models/TASK."""
    backbone: str
    """Backbone: a Hugging Face name, a folder, models/NAME of the store, or STORE/models/NAME of another store."""
    train: Train
    """prompts: train deep prompts over the frozen backbone; lora: train a LoRA adapter of the frozen backbone, which is
    saved in PEFT's format and merged into the weights (needs the extra `lora`); all: train all weights of the backbone
    (fine-tuning)."""
    prompt: Prompt | None = option(None, group=WeightOptions.GROUP)
    """none: no prompt; matrix: train the prompt's values; mlp: train a small network that computes them (Li & Liang
    2021); synthesised: with --sides query, train a network that computes a prompt for each query from its words
    (HYPER); per-task: with --sides query and --also-train, train a prompt for each task by one small network. It makes
    prompts/TASK, the mean of them, for tasks that are not trained, and prompts/TASK-NAME for each task; topics: train a
    network that makes the prompt of each topic of --topics from its words (Topic-DPR). With --train all, prompts are
    trained together with the weights, which makes models/TASK and prompts/TASK-prompt: matrix and topics with --sides
    tied, synthesised with --sides untied. Default: matrix with --train prompts, otherwise none."""
    weights: WeightOptions = field(default_factory=WeightOptions)
    embeddings: str | None = option(None, group=WeightOptions.GROUP)
    """Embeddings of the passages by the backbone, for --sides query; may be left out if the store has only one that was
    made with the same options."""
    init: str | None = option(None, group=WeightOptions.GROUP)
    """Start from prompts/NAME, of the same backbone and length (`riptide pretrain-rip --train prompts` trains one), or
    from STORE/prompts/NAME of another store. It may have been trained for vectors of another scale (--normalize). With
    --prompt synthesised: continue training its network, whose sizes apply."""
    prompts: PromptOptions = field(default_factory=PromptOptions)
    negatives: str | None = None
    """Name of the mined negatives; may be left out if the store has only one. none: train on the judged pairs of the
    split, with the other passages of the batch as negatives; copies of a positive are then not excluded."""
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "train"
    """The split to train on."""
    positives: Literal["judged", "categories"] = "judged"
    """judged: the positives of a query are the passages that its judgements name; categories (Topic-DPR): all passages
    of the batch that share a category with its judged passage, each weighted by the overlap of their categories, and
    the other passages of the batch are its negatives. Without mined negatives; use a large --batch. The relevance of
    --dev-split is by category too."""
    also_train: tuple[str, ...] = ()
    """Further training sets, each as KEY=VALUE,KEY=VALUE: for example queries=nq,negatives=bm25,weight=2. Keys:
    queries, the query set; negatives (default: none, the judged pairs are used); split (default: train); weight: a
    query of weight 2 comes twice as often as one of --queries, whose weight is 1; task, the name of its task; store
    (default: that of --store); size, the --task-size of this set; embeddings of its store, for --sides query; dev, a
    split of this set: quality is then the mean over it and --dev-split. Queries of several stores in one batch have
    each other's passages as negatives, equal texts too, unless --batches is one-task. To resume a run, leave its stores
    where they are."""
    task_size: int | None = option(None, minimum=1)
    """Use at most N queries of each training set, drawn at random, the same ones with every --seed, so that a large set
    does not outweigh the others. Unlike --limit, which takes the first ones. Default: all."""
    batches: Literal["mixed", "one-task"] = "mixed"
    """With --also-train: mixed: each batch holds queries of all training sets; one-task: queries of one set, and sets
    take turns."""
    refresh_epochs: float | None = option(None, positive=True)
    """Mine negatives again with the current model every N epochs (ANCE); the mined ones are used until then. Passages
    that contain a known answer are not excluded."""
    refresh_depth: int = option(100, minimum=1)
    """Negatives per query in each of these minings."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    losses: LossOptions = field(default_factory=LossOptions)
    texts: TextOptions = field(default_factory=TextOptions)
    loop: ContrastiveOptimisation = field(default_factory=ContrastiveOptimisation)
    limit: int | None = None
    """Train on the first N queries of the split."""

    def made_keys(self, label: str) -> list[str]:
        """Adds the prompt that is trained together with encoders."""
        return super().made_keys(label) + ([f"tasks/{label}-prompt"] if self.trains_prompt_with_weights else [])

    def sweep_runs(self) -> list[SweepRun]:
        """Returns the runs of a sweep, each with the options of the task that it trains.

        Raises:
            InputError: If --sweep names an unknown option or a bad value.
        """
        runs = parse_grid(self.sweep, replace(self, sweep=()), FIXED)
        return [replace(run, options=run.options.as_run(f"{self.task}-{run.suffix}")) for run in runs]

    def as_run(self, task: str) -> Self:
        """Returns the options of one run of a sweep, for the task that the run trains."""
        return replace(self, task=task, sweep=(), curves=self.curves and f"{self.curves}/{task}")

    def estimated_as(self, job: str) -> Sequence[tuple[str, EstimatedJob]]:
        """Returns the runs of a sweep, or this job."""
        return [(job, run.options) for run in self.sweep_runs()] if self.sweep else super().estimated_as(job)

    @property
    def rows_per_step(self) -> int:
        """The number of queries in a batch."""
        return self.batch.batch

    @property
    def frozen_by(self) -> str:
        """The option that freezes the weights of the backbone; "" with --train all."""
        return "" if self.train == "all" else f"{Parameter('train', self.train)}"

    @property
    def kind(self) -> Literal["prompts", "models"]:
        """The kind of artifact that the job makes."""
        return "prompts" if self.train == "prompts" else "models"

    @property
    def prompt_kind(self) -> Prompt:
        """The kind of prompt that is trained."""
        return self.prompt or ("matrix" if self.train == "prompts" else "none")

    @property
    def trains_prompt_with_weights(self) -> bool:
        """Whether a prompt is trained together with all weights, as prompts/TASK-prompt."""
        return self.train == "all" and self.weights.sides == SIDES_OF_TRAINED_PROMPTS.get(self.prompt_kind)

    def length_advice(self, noun: str) -> str:
        """Returns the advice how to raise the length limit of queries or passages."""
        side = {plural: side for side, plural in PLURALS.items()}[noun]
        return f"give a larger {Parameter(f'{side}_length')} under another {Parameter('task')}"


@dataclass(frozen=True, kw_only=True)
class TunePrompts(TrainRetriever):
    GROUP: ClassVar = "other names"

    train: Train = option("prompts", group=WeightOptions.GROUP)
    """prompts: train deep prompts over the frozen backbone; lora: train a LoRA adapter of it; all: train all weights of
    the backbone (fine-tuning)."""
    method: Literal["prompt", "lora", "finetune"] | None = None
    """Another name for --train: prompt is prompts, finetune is all."""
    side: Literal["query", "both"] | None = None
    """Another name for --sides query; both: not query."""
    untied: bool = False
    """Another name for --sides untied."""
    parametrisation: Literal["embedding", "mlp"] | None = None
    """Another name for --prompt: embedding is matrix. Without effect if no prompt is trained."""

    @property
    def frozen_by(self) -> str:
        """The option that freezes the weights of the backbone; "" if all weights are trained."""
        train = self._train_value or self.train
        return "" if train == "all" else f"{Parameter('train', train)}"

    def estimated_as(self, job: str) -> Sequence[tuple[str, EstimatedJob]]:
        """Returns the same trainings as jobs of train_retriever."""
        return self.as_train_retriever().estimated_as("train_retriever")

    @property
    def _train_value(self) -> Train | None:
        names: dict[str | None, Train] = {"prompt": "prompts", "lora": "lora", "finetune": "all"}
        return names.get(self.method)

    def as_train_retriever(self) -> TrainRetriever:
        """Converts the options to those of train_retriever.

        Raises:
            InputError: If an option and its other name contradict each other.
        """
        if self.side == "query" and self.untied:
            raise InputError(f"{Parameter('side', 'query')} {Parameter('untied')}: only one side has a prompt")
        if self.side == "both" and self.weights.sides == "query":
            raise InputError(f"{Parameter('side', 'both')} and {Parameter('sides', 'query')}: give one of them")
        sides = "query" if self.side == "query" else "untied" if self.untied else None
        prompt = {"embedding": "matrix", "mlp": "mlp", None: None}[self.parametrisation]
        if self.frozen_by != f"{Parameter('train', 'prompts')}":
            prompt = None
        changes: dict[str, Any] = {}
        for alias, name, value in (
            ("method", "train", self._train_value),
            ("untied" if self.untied else "side", "sides", sides),
            ("parametrisation", "prompt", prompt),
        ):
            declared = options_by_name(type(self))[name]
            if value is not None and declared.value(self) not in (declared.default, value):
                raise InputError(f"{Parameter(alias)} and {Parameter(name, declared.value(self))}: give one of them")
            if value is not None:
                changes[name] = value
        options = replace_options(self, changes)
        return TrainRetriever(**{each.name: getattr(options, each.name) for each in fields(TrainRetriever)})


@dataclass(frozen=True, kw_only=True)
class TrainReranker(Training):
    GROUP: ClassVar = "data"
    MAKES: ClassVar = ("models",)
    NAMED_BY: ClassVar = ("name",)
    READS: ClassVar = {"backbone": "models", "negatives": "negatives", "queries": "queries"}

    backbone: str
    """Backbone of the cross-encoder: a Hugging Face name, a folder, or models/NAME of the store."""
    name: str | None = None
    """Name of the model. Default: the last part of the backbone's name, with -reranker appended."""
    negatives: str | None = None
    """Name of the mined negatives; may be left out if the store has only one."""
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "train"
    """The split to train on."""
    dev_negatives: str | None = None
    """Name of the mined negatives of the dev split's queries. Default: --negatives."""
    pairs: PairOptions = field(default_factory=PairOptions)
    dev_passages: DevPool = option(DevPool(20), group="quality during training", metavar="N")
    """Number of passages that are re-ranked for each query of the dev split: its relevant ones, and mined negatives."""
    limit: int | None = None
    """Train on the first N queries of the split."""

    def __post_init__(self) -> None:
        """Raises InputError if an option is out of range or options contradict each other."""
        super().__post_init__()
        if self.dev_passages.hits_per_query:
            raise InputError(
                f"{Parameter('dev_passages', self.dev_passages)}: a re-ranker orders the mined negatives of each "
                f"query: expected a number of passages; mine hits of BM25 for {Parameter('dev_negatives')}"
            )

    @property
    def rows_per_step(self) -> int:
        """The number of queries in a batch."""
        return self.pairs.batch


@dataclass(frozen=True, kw_only=True)
class PretrainRip(Training):
    GROUP: ClassVar = PretrainingOptions.GROUP
    MAKES: ClassVar = ("models", "tasks")
    NAMED_BY: ClassVar = ("name",)
    READS: ClassVar = {"backbone": "models", "queries": "queries"}

    backbone: str
    """Backbone: a Hugging Face name, a folder, or models/NAME of the store."""
    name: str | None = None
    """Name of the model. Default: the last part of the backbone's name, with the objective appended."""
    pretraining: PretrainingOptions = field(default_factory=PretrainingOptions)
    epochs: float = 4.0  # DPTDR pretrains for 8 epochs on MS MARCO and 4 on Wikipedia
    loop: ContrastiveOptimisation = field(default_factory=ContrastiveOptimisation)
    queries: str | None = option(None, group="quality during training")
    """Name of the query set of --dev-split; may be left out if the store has only one."""
    limit: int | None = None
    """Train on the first N passages."""

    @property
    def rows_per_step(self) -> int:
        """The number of passages in a batch."""
        return self.pretraining.batch

    @property
    def frozen_by(self) -> str:
        """The option that freezes the weights of the backbone; "" if they are trained."""
        return f"{Parameter('train', 'prompts')}" if self.pretraining.train == "prompts" else ""
