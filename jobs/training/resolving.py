"""Converts options of train_retriever to those of the library; resolves defaults, refuses options without effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import option_name
from riptide.base.wording import Parameter
from riptide.indexing.training.training_sets import NO_NEGATIVES, parse_training_set
from riptide.jobs.common.flat_options import describe_type, options_by_name
from riptide.jobs.training.training_options import Train, TrainRetriever
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.model.modules import SPLADE
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.objectives.pair_losses import TEMPERATURE_LR
from riptide.retriever.objectives.tune_options import JOINT_POSITIONS, PlannedRun, TermOptions, TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.options.tuning import COMPUTED, PROMPT_LR, Method, NetworkPrompt
from riptide.retriever.systems.lora import import_peft

# The name in an artifact's configuration of each value of --train; `--prompt matrix` is named "embedding" there.
METHODS: dict[Train, Method] = {"prompts": "prompt", "lora": "lora", "all": "finetune"}
LEARNING_RATES: dict[Train, float] = {"prompts": 7e-3, "lora": 4e-4, "all": 2e-5}
WARM_UPS = (0.1, 0.04)  # fractions of the steps for dense and for sparse vectors (naver/splade: 6,000 of 150,000)
SPLADE_LENGTH = 256  # maximum number of tokens of a text in naver/splade's configuration


def tune_options(options: TrainRetriever, saved_options: SynthesisOptions | None = None) -> TuneOptions:
    """Returns the options of the trained weights and the batches, without those of optional loss terms.

    Prompts of tasks are those of one task.

    Args:
        options: The options of the job.
        saved_options: The options of the computed prompts of --init; None: there are none.

    Raises:
        InputError: If options contradict each other.
    """
    prompt = options.prompt_kind
    check_prompt(options)
    refuse_unused(options)
    values = {**vars(options.weights), **vars(options.batch), **vars(options.losses)}
    if options.losses.learn_temperature and options.losses.temperature_lr is None:
        values["temperature_lr"] = TEMPERATURE_LR
    terms = (options.terms.categories,) if options.positives == "categories" else ()
    if options.batch.negatives_per_query is None:
        has_mined = options.negatives != NO_NEGATIVES or any(
            parse_training_set(text).negatives for text in options.also_train
        )
        values["negatives_per_query"] = 1 if has_mined and not terms else 0
    if prompt != "none":
        values |= {name: value for name, value in vars(options.prompts).items() if value is not None}
        values |= {"parametrisation": "embedding" if prompt == "matrix" else prompt, "topics": topic_options(options)}
        values["joint_prompt"] = options.trains_prompt_with_weights and prompt == "matrix"
    if prompt in COMPUTED:
        synthesis = synthesis_options(options, saved_options)
        values |= {"synthesis": synthesis, "length": synthesis.length}
        values.setdefault("prompt_dropout", 0.0)
    if options.train == "lora":
        import_peft()
        values["lora"] = options.lora
    return TuneOptions(method=METHODS[options.train], terms=terms, seed=options.loop.seed, **values)


def check_prompt(options: TrainRetriever) -> None:
    """Raises InputError if the kind of prompt does not fit the other options."""
    train, sides, prompt = options.train, options.weights.sides, options.prompt_kind
    trains_none = f"{'LoRA' if train == 'lora' else 'fine-tuning'} trains no prompt"
    trains_both = options.trains_prompt_with_weights
    if (train == "prompts") != (prompt != "none") and not trains_both:
        expected = (
            f"{Parameter('prompt', describe_type(Literal['matrix', NetworkPrompt]))}"
            if train == "prompts"
            else f"{Parameter('prompt', 'none')}: {trains_none}, except {Parameter('train', 'all')} "
            f"{Parameter('sides', 'untied')} {Parameter('prompt', 'synthesised')}, or {Parameter('train', 'all')} "
            f"{Parameter('sides', 'tied')} {Parameter('prompt', 'topics')} or matrix"
        )
        raise InputError(f"{Parameter('train', train)} {Parameter('prompt', prompt)}: expected {expected}")
    if options.prompts.position_offset and train != "prompts":
        reason = JOINT_POSITIONS if trains_both else f"{trains_none} after which a text could start"
        chosen = f"{Parameter('prompt', prompt)} " if trains_both else ""
        raise InputError(f"{Parameter('train', train)} {chosen}{Parameter('position_offset')}: {reason}")
    if options.weights.projection is not None and (train != "all" or sides == "query"):
        raise InputError(
            f"{Parameter('projection', options.weights.projection)} {Parameter('train', train)} "
            f"{Parameter('sides', sides)}: the new layer is trained with all weights, and changes the vectors of both "
            f"sides: expected {Parameter('train', 'all')}, and not {Parameter('sides', 'query')}"
        )
    if options.embeddings is not None and sides != "query":
        raise InputError(
            f"{Parameter('embeddings', options.embeddings)} {Parameter('sides', sides)}: stored vectors of passages "
            f"are for {Parameter('sides', 'query')}, which trains queries only"
        )
    if prompt == "topics" and sides != "tied":
        raise InputError(
            f"{Parameter('prompt', 'topics')} {Parameter('sides', sides)}: queries and passages share the prompts "
            f"of topics: give {Parameter('sides', 'tied')}"
        )
    if prompt in COMPUTED and sides != "query" and not trains_both:
        raise InputError(
            f"{Parameter('prompt', prompt)} {Parameter('sides', sides)}: only queries have computed prompts, and "
            f"passages keep the vectors of the backbone: give {Parameter('sides', 'query')}"
        )
    if prompt in COMPUTED and options.prompts.position_offset:
        raise InputError(
            f"{Parameter('prompt', prompt)} {Parameter('position_offset')}: a text starts at its usual position after "
            "a computed prompt: leave it out"
        )


@dataclass(frozen=True)
class MethodGroup:
    """A training method, with the options that only this method uses.

    Attributes:
        options: Their names.
        is_used: Whether the method is used.
        what: What they are for.
        switch: The option that switches the method on.
    """

    options: tuple[str, ...]
    is_used: bool
    what: str
    switch: str


def _method_groups(options: TrainRetriever) -> Iterator[MethodGroup]:
    """Yields the methods whose options are refused if the method is not used."""
    prompt, by_categories = options.prompt_kind, options.positives == "categories"
    topic_loss = ("topic_sample", "topic_margin", "topic_loss")
    yield MethodGroup(
        _options_of_field("lora"), options.train == "lora", "a LoRA adapter", f"{Parameter('train', 'lora')}"
    )
    yield MethodGroup(
        _options_of_field("terms", "categories"),
        by_categories,
        "positives with a common category, which the metadata of passages must name",
        f"{Parameter('positives', 'categories')}",
    )
    yield MethodGroup(
        ("topics", *_options_of_field("topic_prompts")),
        prompt == "topics",
        "prompts of topics",
        f"{Parameter('prompt', 'topics')}",
    )
    yield MethodGroup(
        topic_loss,
        by_categories,
        "the loss of topics, which needs categories",
        f"{Parameter('positives', 'categories')}",
    )
    yield MethodGroup(
        ("prompt_bottleneck",),
        prompt in COMPUTED,
        "prompts that are computed from each query",
        f"{Parameter('prompt', 'synthesised')}",
    )
    yield MethodGroup(
        ("prompt_hidden",),
        prompt in ("synthesised", "topics"),
        "prompts that are computed from each query or of topics",
        f"{Parameter('prompt', 'synthesised')} or topics",
    )
    yield MethodGroup(
        tuple(
            name
            for name in (*_options_of_field("basic_prompts"), *_options_of_field("terms", "divergence"))
            if name != "prompt_bottleneck"
        ),
        prompt == "synthesised",
        "prompts that are computed from each query",
        f"{Parameter('prompt', 'synthesised')}",
    )


def _options_of_field(*path: str) -> tuple[str, ...]:
    return tuple(name for name, each in options_by_name(TrainRetriever).items() if each.path[: len(path)] == path)


def refuse_unused(options: TrainRetriever) -> None:
    """Raises InputError if an option is set that has an effect only with a method that is not used."""
    for method in _method_groups(options):
        if not method.is_used:
            refuse_options(options, method.options, f"is for {method.what}: give {method.switch}, or leave it out")
    no_loss = Parameter("category_weight", 0) if options.topic_prompts.loss else Parameter("topic_loss", False)
    if not options.topic_prompts.loss or not options.terms.categories.weight:
        refuse_options(
            options, ("topic_sample", "topic_margin"), f"there is no loss of topics with {no_loss}: leave it out"
        )
    if options.positives == "categories":
        mined = ("negatives_per_query", "refresh_epochs") + (
            ("negatives",) if options.negatives != NO_NEGATIVES else ()
        )
        refuse_options(
            options,
            [name for name in mined if options_by_name(TrainRetriever)[name].value(options)],
            f"is for mined negatives, and with {Parameter('positives', 'categories')} the negatives are the passages "
            "of the batch without a common category: leave it out",
        )


def refuse_options(options: TrainRetriever, names: Iterable[str], reason: str) -> None:
    """Raises InputError if one of the named options differs from its default. reason: the end of the message."""
    for name in names:
        declared = options_by_name(type(options))[name]
        value = declared.value(options)
        if value != declared.default:
            raise InputError(f"{Parameter(name, ' '.join(value) if isinstance(value, tuple) else value)}: {reason}")


def topic_options(options: TrainRetriever) -> TopicOptions | None:
    """Returns the options of topic prompts, or None for other prompts."""
    if options.prompt_kind != "topics":
        return None
    values = {**vars(options.topic_prompts), "loss": options.topic_prompts.loss and options.positives == "categories"}
    return TopicOptions(**values if options.prompt_hidden is None else {**values, "hidden": options.prompt_hidden})


def synthesis_options(options: TrainRetriever, saved_options: SynthesisOptions | None = None) -> SynthesisOptions:
    """Returns the options of prompts that are computed per query, or of prompts per task as if there were one task.

    Args:
        options: The options of the job.
        saved_options: The options of the synthesiser that training continues from; None: it starts from random values.

    Raises:
        InputError: If an option is another one than that of the synthesiser that training continues from.
    """
    sizes = {**vars(options.basic_prompts), "length": options.prompts.length, "hidden": options.prompt_hidden}
    values: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if options.prompt_kind == "per-task":
        values |= {"prompts": 1, "hidden": 1, "mix": "after", "attention": "uniform"}
    if saved_options is None or options.prompt_kind == "per-task":
        return SynthesisOptions(**values)
    for name, value in values.items():
        if value != getattr(saved_options, name):
            saved = Parameter(option_name(type(saved_options), name), getattr(saved_options, name))
            raise InputError(
                f"{Parameter('init', options.init)}: its prompts have {saved}, and {value} is given: leave it out"
            )
    return saved_options


def with_terms(options: TrainRetriever, tuning: TuneOptions, pooling: str, tasks: int) -> TuneOptions:
    """Adds the options of all used loss terms to the options of the trained weights; needs no training data.

    Args:
        options: The options of the job.
        tuning: The options of the trained weights.
        pooling: The pooling of the backbone.
        tasks: The number of tasks of the training sets.

    Raises:
        InputError: If an option of a term does not fit the others, or has no effect.
    """
    run = PlannedRun(
        tuning=tuning,
        pooling=pooling,
        max_minutes=options.loop.max_minutes,
        by_category=options.positives == "categories",
        mixes_tasks=tasks > 1 and options.batches == "mixed",
    )
    groups: list[TermOptions] = list(vars(options.terms).values())
    return replace(tuning, terms=tuple(each for group in groups if (each := group.resolve(run)) is not None))


def encoder_options(options: TrainRetriever, folder: str) -> EncoderOptions:
    """Returns the options that turn texts into vectors: pooling, length limits and dtype.

    Texts of sparse vectors have at most 256 tokens, unless the folder is a SPLADE model, whose lengths apply.

    Args:
        options: The options of the job.
        folder: The folder of the backbone.
    """
    encoder = EncoderOptions(**vars(options.texts), dtype=options.dtype)
    if encoder.pooling != SPLADE or read_recipe(find_model_folder(folder), EncoderOptions()).is_sparse:
        return encoder
    length = min(SPLADE_LENGTH, read_recipe(find_model_folder(folder), encoder).max_positions or SPLADE_LENGTH)
    return replace(
        encoder, query_length=encoder.query_length or length, passage_length=encoder.passage_length or length
    )


def loop_options(options: TrainRetriever, tuning: TuneOptions, pooling: str, queries: int) -> LoopOptions:
    """Returns the options of the training loop with resolved defaults.

    Args:
        options: The options of the job.
        tuning: The options of the trained weights.
        pooling: The pooling of the encoder.
        queries: The number of training queries.
    """
    is_network = tuning.synthesis is not None or tuning.topics is not None
    is_frozen = options.train != "all"
    refresh = (options.refresh_epochs or 0) * queries / tuning.batch
    return options.loop_options(
        options.count_steps(queries, tuning.batch),
        lr=PROMPT_LR if is_frozen and is_network else LEARNING_RATES[options.train],
        warm_up=WARM_UPS[pooling == SPLADE],
        weight_decay=0.0 if is_frozen else 0.01,
        refresh_every=math.ceil(refresh),
    )
