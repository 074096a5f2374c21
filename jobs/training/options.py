"""Options of `train_retriever` and `tune_prompts`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

from jobs.training.categories import CategoryTraining
from jobs.training.lora import LoraTraining
from jobs.training.runs import Contrastive
from jobs.training.synthesis import SynthesisTraining
from jobs.training.topics import TopicTraining

from indexing.training.training_sets import NO_NEGATIVES, parse_set
from retriever.errors import InputError
from retriever.losses.flops import MARGIN_MSE_WEIGHTS, SOFTMAX_WEIGHTS, WARM_UP, FlopsOptions
from retriever.model.files import resolve
from retriever.model.recipe import SPLADE, read_recipe
from retriever.options import PLURALS, EncoderOptions
from retriever.prompts.prompts import Parametrisation, Sides
from retriever.prompts.synthesis_options import SynthesisOptions
from retriever.systems.dual import PROMPT_LR, TEMPERATURE_LR
from retriever.training.tuning_options import Method, TuneOptions

Train = Literal["prompts", "lora", "all"]
Prompt = Literal["none", "matrix", "mlp", "synthesised", "per-task", "topics"]
# The names of these options in the configuration of an artifact.
METHODS: dict[Train, Method] = {"prompts": "prompt", "lora": "lora", "all": "finetune"}
LEARNING_RATES: dict[Train, float] = {"prompts": 7e-3, "lora": 4e-4, "all": 2e-5}
SYNTHESIS_LR = PROMPT_LR
LENGTH = 32  # tokens of a prompt that is the same for all texts (DPTDR)
PROMPT_DROPOUT = 0.1  # of such a prompt
WARM_UPS = (0.1, 0.04)  # fraction of the steps, for dense and for sparse vectors (naver/splade: 6,000 of 150,000)
SPLADE_LENGTH = 256  # tokens of a text in naver/splade's configuration
PARAMETRISATIONS: dict[Prompt, Parametrisation] = {
    "matrix": "embedding",
    "mlp": "mlp",
    "synthesised": "synthesised",
    "per-task": "per-task",
    "topics": "topics",
}


@dataclass(frozen=True, kw_only=True)
class TrainRetriever(Contrastive, LoraTraining, SynthesisTraining, CategoryTraining, TopicTraining):
    """--limit N trains on the first N queries of the split."""

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
    """Backbone: a Hugging Face name, a folder, or models/NAME of the store."""
    train: Train
    """prompts: train deep prompts over the frozen backbone; lora: train a LoRA adapter of the frozen backbone, which is
    saved in PEFT's format and merged into the weights (needs the extra `lora`); all: train all weights of the backbone
    (fine-tuning)."""
    prompt: Prompt | None = None
    """none: no prompt; matrix: train the prompt's values; mlp: train a small network that computes them (Li & Liang
    2021); synthesised: with --sides query, train a network that computes a prompt for each query from its words
    (HYPER), or with --train all --sides untied train it together with both encoders, which makes models/TASK and
    prompts/TASK-prompt; per-task: with --sides query and --also-train, train a prompt for each task by one small
    network. It makes prompts/TASK, the mean of them, for tasks that are not trained, and prompts/TASK-NAME for each
    task; topics: train a network that makes the prompt of each topic of --topics from its words (Topic-DPR), or with
    --train all train it together with the encoder, which makes models/TASK and prompts/TASK-prompt. Default: matrix
    with --train prompts, otherwise none."""
    sides: Sides = "tied"
    """tied: queries and passages share what is trained; untied: each side has its own prompt or encoder (DPR); query:
    only queries do, and passages keep the vectors of the backbone, which are read from --embeddings. An index over
    these serves the task."""
    embeddings: str | None = None
    """Embeddings of the passages by the backbone, for --sides query; may be left out if the store has only one that was
    made with the same options."""
    init: str | None = None
    """Start from prompts/NAME, of the same backbone and length (`pretrain_rip --train prompts` trains one), or from
    STORE/prompts/NAME of another store. It may have been trained for vectors of another scale (--normalize). With
    --prompt synthesised: continue training its network, whose options are then the defaults."""
    prompt_dropout: float | None = None
    """Fraction of the prompt's values that are dropped out, with a separate mask for each text; default: 0.1, or 0 with
    --prompt synthesised or per-task."""
    position_offset: bool = False
    """Let the positions of a text start after the prompt, as in the RoBERTa of DPTDR's authors. The prompt's length and
    the maximum length of a text together then need as many positions. It is stored with the prompt."""
    projection: int | None = None
    """With --train all: add a linear layer that maps the pooled vector to N numbers, without bias and in float32 (GTR:
    768, also where the backbone has as many), for a backbone without such a layer. A backbone that has one trains it
    further without this option."""
    dropout: bool = True
    """Train with the backbone's dropout, as its config.json says; --no-dropout: without (GTR). The dropout of a prompt
    is --prompt-dropout."""
    negatives: str | None = None
    """Name of the mined negatives; may be left out if the store has only one. none: train on the judged pairs of the
    split, with the other passages of the batch as negatives; copies of a positive are then not excluded."""
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "train"
    """The split to train on."""
    also_train: tuple[str, ...] = ()
    """Further training sets, each as queries=NAME,negatives=NAME,split=NAME,weight=N,task=NAME,store=URL,size=N,
    embeddings=NAME,dev=SPLIT: without negatives, the judged pairs are used; without a store, that of --store; the split
    is train if it is left out; size is --task-size of this set; embeddings are those of its store, for --sides query;
    dev is a split of this set: quality is then the mean over it and --dev-split. A query of weight 2 comes twice as
    often as one of --queries, whose weight is 1. Queries of several stores in one batch have each other's passages as
    negatives, equal texts too, unless --batches is one-task. To resume a run, leave its stores where they are."""
    task_size: int | None = None
    """Use at most N queries of each training set, drawn at random, the same ones with every --seed, so that a large set
    does not outweigh the others. Unlike --limit, which takes the first ones. Default: all."""
    batches: Literal["mixed", "one-task"] = "mixed"
    """With --also-train: mixed: each batch holds queries of all training sets; one-task: queries of one set, and sets
    take turns."""
    dev_passages: int = 2000
    """Search the dev queries in N passages: their relevant ones, and random others."""
    epochs: float = 1.0
    """Number of passes over the queries."""
    steps: int | None = None
    """Number of steps; overrides --epochs."""
    refresh_epochs: float | None = None
    """Mine negatives again with the current model every N epochs (ANCE); the mined ones are used until then. Passages
    that contain a known answer are not excluded."""
    refresh_depth: int = 100
    """Negatives per query in each of these minings."""
    batch: int = 32
    """Queries per step, summed over all workers."""
    negatives_from: Literal["batch", "own"] = "batch"
    """batch: negatives of a query in the contrastive loss are its mined ones and all passages of the other queries of
    the batch, and more of them make the loss harder; own: its mined ones alone (HYPER)."""
    negatives_per_query: int | None = None
    """Mined negatives per query and step; default: 1, or 0 if no training set has mined negatives. A query that has
    fewer gets random passages."""
    draw_positive: Literal["random", "first", "weighted"] = "random"
    """Which positive a query brings: random, drawn in each epoch; weighted, drawn in each epoch with a probability in
    proportion to the score of its judgement; or the first that is judged, in all epochs, as
    DPTDR's authors do with --positive_passage_no_shuffle (without it, they take the next one in each epoch)."""
    draw_negatives: Literal["random", "windows"] = "random"
    """Which mined negatives a query brings: random, drawn again in each epoch; or windows: shuffled once, then the next
    --negatives-per-query ones in each epoch, as DPTDR's authors do, so that all are used before one comes again."""
    lr: float | None = None
    """Peak learning rate; default: 7e-3 for prompts (DPTDR), 1e-3 for synthesised ones (HYPER), those of tasks
    (per-task) and those of topics, 4e-4 for LoRA (Hu et al. 2021, RoBERTa), 2e-5 for fine-tuning, 1e-3 with --optimizer
    adafactor. Networks of prompts that are trained with the backbone have 1e-3, regardless of it. A prompt that is
    trained for a few hundred steps may need a larger rate (0.1 in docs/measurements.md): compare some with --sweep."""
    warm_up: float | None = None
    """Fraction of the steps in which the learning rate rises; default: 0.1, or 0.04 with sparse vectors (naver/splade:
    6,000 of 150,000 steps)."""
    weight_decay: float | None = None
    """Weight decay; default: 0 for prompts, LoRA and with --optimizer adafactor, 0.01 for fine-tuning."""
    clip: float = 1.0
    """Scale the gradient down to this norm if its norm is larger. Lower it if the loss rises suddenly."""
    loss: Literal["contrastive", "symmetric", "symmetric-sum", "kl", "margin-mse"] = "contrastive"
    """contrastive: softmax of each query over the passages of the batch (DPTDR); symmetric: the mean of that and of a
    softmax of each positive over the queries of the batch; symmetric-sum: the sum of both (GTR); kl and margin-mse:
    distillation of the re-ranker that scored the negatives (mine_negatives --teacher-scores), by the KL divergence over
    a query's positive and mined negatives, or by the squared error of its margins (Hofstätter et al. 2020)."""
    contrastive_weight: float = 0.0
    """Add this times the contrastive loss to a distillation loss."""
    temperature: float | None = None
    """Similarities are divided by this; default: 1, or 0.05 for vectors of length 1."""
    learn_temperature: bool = False
    """Train the temperature, starting from --temperature, but not below 0.01 (CLIP). The artifact's notes have the
    learned value. Not with --zero 3."""
    temperature_lr: float | None = None
    """Peak learning rate of a learned temperature T; default: 1e-3, regardless of --lr. One step of AdamW changes log T
    by about this much, so T can change by a factor of e in 1,000 steps."""
    flops_queries: float | None = None
    """With sparse vectors: weight of the FLOPS regulariser of queries: larger values leave fewer words in a vector.
    Default: 3e-4, or 0.5 with --loss margin-mse (naver/splade)."""
    flops_passages: float | None = None
    """With sparse vectors: weight of the FLOPS regulariser of passages. Default: 1e-4, or 0.4 with --loss margin-mse;
    not with --sides query, which does not encode them."""
    flops_warm_up: float | None = None
    """With sparse vectors: fraction of the steps in which both weights rise quadratically from 0. Default: 1/3."""
    pooling: Literal["cls", "mean", "last", "splade"] | None = None
    """Pooling of token vectors; default: the setting in the backbone's folder. splade: train sparse vectors, which hold
    weights of the vocabulary's words by the backbone's masked-language-model head. This and the next options shape the
    vectors: use the values with which the store's embeddings were made."""
    normalize: bool | None = None
    """Scale vectors to length 1; default: the setting in the backbone's folder."""
    query_prefix: str | None = None
    """Text in front of each query; default: the setting in the backbone's folder."""
    passage_prefix: str | None = None
    """Text in front of each passage; default: the setting in the backbone's folder."""
    title: Literal["space", "newline", "sep", "none"] = "space"
    """Separator between a passage's title and its text; none: leave out the title."""
    query_length: int | None = None
    """Maximum number of tokens per query, special tokens included; default: the setting in the backbone's folder, or
    256 with --pooling splade (naver/splade) if the folder is no SPLADE model. Longer queries are cut; the job says how
    many of those in its batches."""
    passage_length: int | None = None
    """Maximum number of tokens per passage, special tokens included; default: as for queries. Longer passages are cut;
    the job says how many of those in its batches."""
    dimension: int | None = None
    """Keep this many leading dimensions of each vector, for Matryoshka models; default: all."""
    append_eos: bool = False
    """End every text with the end-of-sequence token if the tokenizer does not add it."""
    padding_side: Literal["right", "left"] | None = None
    """The side on which batches are padded; default: the tokenizer's."""

    sweep: tuple[str, ...] = ()
    """Train with every combination of the values of some options, and choose one by --dev-split: lr=1e-2,3e-2
    seed=0,1,2 makes six runs, prompts/TASK-lr0.01-seed0 and so on, and sweeps/TASK, which names the chosen one.
    Settings are compared by their mean over the seeds. --curves gets a table and a picture."""

    def as_run(self, task: str) -> Self:
        """Returns the options of one run of a sweep."""
        return replace(self, task=task, sweep=(), curves=self.curves and f"{self.curves}/{task}")

    @property
    def kind(self) -> Literal["prompts", "models"]:
        """The kind of the artifact."""
        return "prompts" if self.train == "prompts" else "models"

    def tuning(self, saved: SynthesisOptions | None = None) -> TuneOptions:
        """Returns the options of the trained weights and the batches, without those of regularisers.

        Prompts of tasks are those of one task.

        Args:
            saved: The options of the computed prompts of --init; None: there are none.

        Raises:
            InputError: If options contradict each other.
        """
        has_prompt = self.train == "prompts"
        trains_none = f"{'LoRA' if self.train == 'lora' else 'fine-tuning'} trains no prompt"
        prompt: Prompt = self.prompt or ("matrix" if has_prompt else "none")
        both = [("all", "untied", "synthesised"), ("all", "tied", "topics")]  # HYPER, Eq. 8; Topic-DPR
        trains_both = (self.train, self.sides, prompt) in both
        if has_prompt != (prompt != "none") and not trains_both:
            expected = (
                "matrix, mlp, synthesised, per-task or topics"
                if has_prompt
                else f"none: {trains_none}, except --train all --sides untied --prompt synthesised, or --train all "
                "--sides tied --prompt topics"
            )
            raise InputError(f"--train {self.train} --prompt {prompt}: expected --prompt {expected}")
        if self.position_offset and not has_prompt:
            raise InputError(f"--train {self.train} --position-offset: {trains_none} after which a text could start")
        if self.embeddings is not None and self.sides != "query":
            raise InputError(
                f"--embeddings {self.embeddings} --sides {self.sides}: stored vectors of passages are for "
                "--sides query, which trains queries only"
            )
        if prompt != "synthesised":
            self.check_unused(prompt)
        if prompt == "topics" and self.sides != "tied":
            raise InputError(
                f"--prompt topics --sides {self.sides}: queries and passages share the prompts of topics: give --sides "
                "tied"
            )
        is_computed = prompt in ("synthesised", "per-task")
        if is_computed and self.sides != "query" and not trains_both:
            raise InputError(
                f"--prompt {prompt} --sides {self.sides}: only queries have computed prompts, and "
                "passages keep the vectors of the backbone: give --sides query"
            )
        if is_computed and self.position_offset:
            raise InputError(
                f"--prompt {prompt} --position-offset: a text starts at its usual position after a "
                "computed prompt: leave it out"
            )
        names = {
            "batch",
            "negatives_from",
            "draw_positive",
            "draw_negatives",
            "temperature",
            "seed",
            "sides",
            "loss",
            "contrastive_weight",
            "learn_temperature",
            "temperature_lr",
            "projection",
            "dropout",
        }
        values = {name: getattr(self, name) for name in names}
        if self.learn_temperature and self.temperature_lr is None:
            values["temperature_lr"] = TEMPERATURE_LR
        values["negatives_per_query"] = self.negatives_per_query
        mining = {name: getattr(self, name) for name in ("negatives", "negatives_per_query", "refresh_epochs")}
        categories = self.categories(mining | ({"negatives": None} if self.negatives == NO_NEGATIVES else {}))
        if categories is not None:
            values["negatives_per_query"] = 0
        elif self.negatives_per_query is None:
            has_mined = self.negatives != NO_NEGATIVES or any(parse_set(text).negatives for text in self.also_train)
            values["negatives_per_query"] = 1 if has_mined else 0
        topics = self.topic_options(prompt, self.prompt_hidden, None if categories is None else categories.weight)
        if prompt != "none":
            synthesis = None
            if is_computed:
                synthesis = self.synthesis(saved) if prompt == "synthesised" else self.per_task()
            length, dropout = (self.length, PROMPT_DROPOUT) if synthesis is None else (synthesis.length, 0.0)
            values |= {
                "parametrisation": PARAMETRISATIONS[prompt],
                "length": LENGTH if length is None else length,
                "prompt_dropout": dropout if self.prompt_dropout is None else self.prompt_dropout,
                "position_offset": self.position_offset,
                "synthesis": synthesis,
                "topics": topics,
            }
        return TuneOptions(method=METHODS[self.train], lora=self.lora(self.train), categories=categories, **values)

    def flops(self, pooling: str, steps: int) -> FlopsOptions | None:
        """Returns the options of the regulariser; None for dense vectors.

        Args:
            pooling: The pooling of the encoder.
            steps: Steps of the training run.

        Raises:
            InputError: If they are given for dense vectors, or are out of range.
        """
        values = {name: getattr(self, name) for name in ("flops_queries", "flops_passages", "flops_warm_up")}
        if pooling != SPLADE:
            for name, value in values.items():
                if value is not None:
                    raise InputError(
                        f"--{name.replace('_', '-')} {value}: regularises sparse vectors, and --pooling "
                        f"is {pooling}: give --pooling splade, or leave it out"
                    )
            return None
        defaults = MARGIN_MSE_WEIGHTS if self.loss == "margin-mse" else SOFTMAX_WEIGHTS
        if self.sides == "query":
            if self.flops_passages is not None:
                raise InputError(
                    f"--flops-passages {self.flops_passages} --sides query: vectors of passages are "
                    "stored, and no regulariser changes them: leave it out"
                )
            defaults = (defaults[0], 0.0)
        weights = zip((self.flops_queries, self.flops_passages), defaults, strict=True)
        queries, passages = (default if value is None else value for value, default in weights)
        share = WARM_UP if self.flops_warm_up is None else self.flops_warm_up
        if not 0 <= share <= 1:
            raise InputError(f"--flops-warm-up {share}: expected a fraction of the steps")
        return FlopsOptions(queries=queries, passages=passages, warm_up=max(1, round(share * steps)))

    def length_step(self, noun: str) -> str:
        """Returns how to set a larger length limit for queries or passages."""
        side = {plural: side for side, plural in PLURALS.items()}[noun]
        return f"give a larger --{side}-length under another --task"

    def encoder(self, folder: str) -> EncoderOptions:
        """Returns how texts become vectors.

        Texts of sparse vectors have at most 256 tokens, unless the folder is a SPLADE model, whose lengths apply.

        Args:
            folder: The folder of the backbone.
        """
        names = EncoderOptions.__dataclass_fields__
        encoder = EncoderOptions(**{name: getattr(self, name) for name in names if hasattr(self, name)})
        if self.pooling != SPLADE or read_recipe(resolve(folder), EncoderOptions()).is_sparse:
            return encoder
        positions = read_recipe(resolve(folder), encoder).positions or SPLADE_LENGTH
        length = min(SPLADE_LENGTH, positions)
        return replace(
            encoder, query_length=encoder.query_length or length, passage_length=encoder.passage_length or length
        )


@dataclass(frozen=True, kw_only=True)
class TunePrompts(TrainRetriever):
    """--limit N trains on the first N queries of the split."""

    train: Train = "prompts"
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

    def as_train_retriever(self) -> TrainRetriever:
        """Returns the same options under the names of train_retriever.

        Raises:
            InputError: If an option and its other name contradict each other.
        """
        if self.side == "query" and self.untied:
            raise InputError("--side query --untied: only one side has a prompt")
        if self.side == "both" and self.sides == "query":
            raise InputError("--side both and --sides query: give one of them")
        values = {field.name: getattr(self, field.name) for field in fields(TrainRetriever)}
        train = {"prompt": "prompts", "lora": "lora", "finetune": "all", None: None}[self.method]
        sides = "query" if self.side == "query" else "untied" if self.untied else None
        prompt = {"embedding": "matrix", "mlp": "mlp", None: None}[self.parametrisation]
        if (train or self.train) != "prompts":
            prompt = None
        for alias, name, value in (
            ("method", "train", train),
            ("side", "sides", sides),
            ("parametrisation", "prompt", prompt),
        ):
            default = type(self).__dataclass_fields__[name].default
            if value is not None and values[name] not in (default, value):
                alias = "untied" if alias == "side" and self.untied else alias
                raise InputError(f"--{alias} and --{name} {values[name]}: give one of them")
            values[name] = value or values[name]
        return TrainRetriever(**values)
