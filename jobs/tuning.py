"""Options of `tune_prompts`, checked against the store before any training, and without Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jobs.training import Contrastive, check_name, count_steps

from indexing.artifact import Artifact
from indexing.encoders import EncoderSpec, differences, differing
from indexing.models import model_folder
from indexing.negatives import mined_corpus, training_data
from indexing.queries import Queries
from indexing.store import Store
from indexing.tuning import TuneMaker
from retriever.dual import TuneOptions, offsets_of
from retriever.errors import InputError
from retriever.files import resolve
from retriever.options import EncoderOptions
from retriever.prompts import check_initial_prompt, check_offsets, load_prompt
from retriever.recipe import read_recipe
from retriever.training import LoopOptions


@dataclass(frozen=True, kw_only=True)
class TunePrompts(Contrastive):
    """--limit N trains on the first N queries of the split."""

    task: str
    """Name of the task. The job makes prompts/TASK, or models/TASK with --method finetune."""
    backbone: str
    """Backbone: a Hugging Face name, a folder, or models/NAME of the store."""
    method: Literal["prompt", "finetune"] = "prompt"
    """prompt: train a deep prompt over the frozen backbone; finetune: train all weights of the backbone."""
    side: Literal["query", "both"] = "both"
    """query: passages are encoded by the backbone without a prompt, so an existing index of the backbone serves the
    task; both: both sides have a prompt."""
    untied: bool = False
    """Train one prompt for queries and another one for passages."""
    length: int = 32
    """Length of each prompt, in tokens."""
    init: str | None = None
    """Start from prompts/NAME, of the same backbone and length (`pretrain_rip --train prompts` trains one). It may have
    been trained for vectors of another scale (--normalize)."""
    parametrisation: Literal["embedding", "mlp"] = "embedding"
    """embedding: train the prompt's values; mlp: train a small network that computes them (Li & Liang 2021)."""
    prompt_dropout: float = 0.1
    """Fraction of the prompt's values that are dropped out, with a separate mask for each text."""
    position_offset: bool = False
    """Let the positions of a text start after the prompt, as in the RoBERTa of DPTDR's authors. The prompt's length and
    the maximum length of a text together then need as many positions. It is stored with the prompt."""
    negatives: str | None = None
    """Name of the mined negatives; may be left out if the store has only one."""
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "train"
    """The split to train on."""
    dev_split: str | None = None
    """Measure MRR@10 on this split during training, and keep the best weights."""
    dev_limit: int | None = 500
    """Use the first N queries of the dev split."""
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
    negatives_per_query: int = 1
    """Mined negatives per query and step."""
    draw_positive: Literal["random", "first"] = "random"
    """Which positive a query brings: random, drawn in each epoch; or the first that is judged, in all epochs, as
    DPTDR's authors do with --positive_passage_no_shuffle (without it, they take the next one in each epoch)."""
    draw_negatives: Literal["random", "windows"] = "random"
    """Which mined negatives a query brings: random, drawn again in each epoch; or windows: shuffled once, then the next
    --negatives-per-query ones in each epoch, as DPTDR's authors do, so that all are used before one comes again."""
    lr: float | None = None
    """Peak learning rate; default: 7e-3 for prompts (DPTDR), 2e-5 for fine-tuning, 1e-3 with --optimizer adafactor."""
    warm_up: float = 0.1
    """Fraction of the steps in which the learning rate rises."""
    weight_decay: float | None = None
    """Weight decay; default: 0 for prompts and with --optimizer adafactor, 0.01 for fine-tuning."""
    clip: float = 1.0
    """Scale the gradient down to this norm if its norm is larger. Lower it if the loss rises suddenly."""
    temperature: float | None = None
    """Similarities are divided by this; default: 1, or 0.05 for vectors of length 1."""
    pooling: Literal["cls", "mean", "last"] | None = None
    """Pooling of token vectors; default: the setting in the backbone's folder. This and the next options shape the
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
    """Maximum number of tokens per query, special tokens included; default: the setting in the backbone's folder."""
    passage_length: int | None = None
    """Maximum number of tokens per passage, special tokens included; default: the setting in the backbone's folder."""
    dimension: int | None = None
    """Keep this many leading dimensions of each vector, for Matryoshka models; default: all."""
    append_eos: bool = False
    """End every text with the end-of-sequence token if the tokenizer does not add it."""
    padding_side: Literal["right", "left"] | None = None
    """The side on which batches are padded; default: the tokenizer's."""
    evaluate_every: int = 100
    """Steps between two measurements on the dev split."""
    patience: int = 0
    """Stop after N measurements without an improvement; 0: never."""


@dataclass(frozen=True)
class Opened:
    """Opened and checked artifacts that the options name. queries: the number of training queries."""

    queries: int
    spec: EncoderSpec
    maker: TuneMaker
    loop: LoopOptions
    inputs: dict[str, Artifact]
    config: dict[str, Any]


def open_all(store: Store, options: TunePrompts) -> Opened:
    """Opens and checks the artifacts that the options name.

    Raises:
        InputError: If an artifact is missing, does not fit the others, or cannot be used for training.
    """
    frozen = options.method == "prompt"
    options.check("query", "--method prompt" if frozen else None)
    check_name("models" if options.method == "finetune" else "prompts", options.task)
    if options.method == "finetune" and (options.side == "query" or options.untied):
        raise InputError(f"--method finetune --side {options.side}{' --untied' * options.untied}: fine-tuning trains "
                         "one encoder for both sides; train prompts for one side only")  # fmt: skip
    if options.side == "query" and options.untied:
        raise InputError("--side query --untied: only one side has a prompt")
    names = EncoderOptions.__dataclass_fields__
    encoder = EncoderOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)})
    spec = EncoderSpec(store, options.backbone, encoder)
    described = spec.describe("query")
    negatives = store.open("negatives", store.only("negatives", options.negatives))
    queries = Queries.open(store, options.queries)
    corpus = mined_corpus(store, negatives)
    data = training_data(corpus, queries, options.split, negatives, options.limit)
    if options.dev_split is not None:
        queries.qrels(options.dev_split)
    if options.patience and not (options.dev_split and options.evaluate_every):
        raise InputError(f"--patience {options.patience}: expected --dev-split too, which measures quality, and "
                         "--evaluate-every")  # fmt: skip
    if options.dev_passages < 1 or (options.dev_limit is not None and options.dev_limit < 1):
        raise InputError(f"--dev-limit {options.dev_limit} --dev-passages {options.dev_passages}: expected at least 1")
    sides: Any = "query" if options.side == "query" else "untied" if options.untied else "tied"
    shared = {"batch", "negatives_per_query", "draw_positive", "draw_negatives", "temperature", "seed", "method"}
    if not frozen and options.position_offset:
        raise InputError(
            "--method finetune --position-offset: fine-tuning trains no prompt after which a text could start"
        )
    prompt = {"length", "parametrisation", "prompt_dropout", "position_offset"} if frozen else set()
    tuning = TuneOptions(sides=sides, **{name: getattr(options, name) for name in shared | prompt})
    check_offsets(read_recipe(resolve(spec.folder), encoder), offsets_of(tuning))
    refresh = options.refresh_epochs
    if options.refresh_depth < 1 or (refresh is not None and not (refresh > 0 and math.isfinite(refresh))):
        raise InputError(f"--refresh-epochs {refresh} --refresh-depth {options.refresh_depth}: expected more than 0, "
                         "and at least 1")  # fmt: skip
    refresh_every = math.ceil((refresh or 0) * len(data.queries) / options.batch)
    loop = LoopOptions(
        steps=count_steps(options.steps, options.epochs, len(data.queries), options.batch),
        lr=options.peak_lr(options.lr, 7e-3 if frozen else 2e-5), optimizer=options.optimizer,
        seed=options.seed, warm_up=options.warm_up,
        weight_decay=options.decay(options.weight_decay, 0.0 if frozen else 0.01),
        clip=options.clip, grad_cache=options.grad_cache, zero=options.zero, offload=options.offload,
        checkpoint_every=options.checkpoint_every, patience=options.patience,
        evaluate_every=options.evaluate_every if options.dev_split else 0, refresh_every=refresh_every,
    )  # fmt: skip
    start = None if options.init is None else options.init.removeprefix("prompts/")
    if start is not None and not frozen:
        raise InputError(f"--init {options.init} --method finetune: fine-tuning starts from the backbone alone")
    init_inputs = {} if start is None else {"init": store.open("prompts", start)}
    for artifact in init_inputs.values():
        check_initial_prompt(load_prompt(model_folder(artifact)), described)
    maker = TuneMaker(
        store=store, backbone=spec, described=described, tuning=tuning, corpus=corpus,
        queries=queries.artifact.key.partition("/")[2], negatives=negatives.key.partition("/")[2],
        split=options.split, limit=options.limit, dev_split=options.dev_split, dev_limit=options.dev_limit,
        dev_passages=options.dev_passages, checkpointing=options.checkpointing, start=start,
        refresh_depth=options.refresh_depth if refresh_every else 0,
    )  # fmt: skip
    dev = {"split": options.dev_split, "limit": options.dev_limit, "passages": options.dev_passages}
    config = {
        "backbone": described,
        # position_offset is in the configuration only if it is set, as it is in prompt.json.
        "tuning": {name: value for name, value in asdict(tuning).items() if name != "position_offset" or value},
        "loop": loop.shaping(),
        "split": options.split, "limit": options.limit, "dev": dev if options.dev_split else None,
        "refresh_depth": maker.refresh_depth, "cpus": options.cpus, "dtype": options.dtype,
    }  # fmt: skip
    inputs = {"corpus": corpus.generations[-1], "queries": queries.artifact, "negatives": negatives,
              **spec.inputs(), **init_inputs}  # fmt: skip
    return Opened(len(data.queries), spec, maker, loop, inputs, config)


def serving_warnings(store: Store, options: TunePrompts, opened: Opened) -> list[str]:
    """Returns warnings about artifacts of the same backbone that one server cannot serve together with the new prompt.

    A server has one encoder with one set of settings, so embeddings and prompts that were made with other settings need
    a separate server. Embeddings come first; prompts count where embeddings with the same settings exist.
    """
    if options.method != "prompt":
        return []
    described = opened.spec.describe("passage")
    shared = {name: described[name] for name in ("model_type", "backbone", "weights", "tokenizer")}

    def others(kind: str, key: str) -> dict[str, dict[str, Any]]:
        """Returns the settings of each artifact of a kind that has the same backbone; skips damaged artifacts."""
        known = {}
        for name in store.names(kind):
            with contextlib.suppress(InputError):
                artifact = store.generations(kind, name)[-1] if kind == "embeddings" else store.open(kind, name)
                settings = artifact.config.get(key)
                if isinstance(settings, dict) and settings.items() >= shared.items():
                    known[name] = {**settings, "dtype": described["dtype"]}  # each server chooses its own
        return known

    encoders = others("embeddings", "encoder")
    embeddings = {name: settings for name, settings in encoders.items() if "prompt" not in settings}
    same = [name for name, settings in embeddings.items() if not differing(settings, described)]
    if embeddings and not same:
        name, settings = next(iter(embeddings.items()))
        return [
            f"the prompt cannot be served with embeddings/{name}: it would have {differences(settings, described)}; "
            f"{_remedy(settings, described)}, or encode the corpus with the prompt's settings under another name"
        ]
    return [
        f"one server cannot serve the prompt and prompts/{name}: it would have {differences(settings, described)}; "
        f"{_remedy(settings, described)} to serve both"
        for name, settings in others("prompts", "backbone").items()
        if name != options.task and differing(settings, described)
    ]


def _remedy(settings: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """Returns the options that would give a prompt the settings of an artifact, as a request to the user."""
    flags = []
    for name in differing(settings, described):
        if name == "head":
            flags.append(f"--normalize {'normalize' in settings[name]}")
        elif name == "append_eos":
            flags.append("--append-eos" if settings[name] else "--no-append-eos")
        elif name in TunePrompts.__dataclass_fields__:
            flags.append(f"--{name.replace('_', '-')} {settings[name]!r}")
    return f"give {' '.join(flags)}" if flags else "choose another backbone"
