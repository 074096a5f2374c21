"""What `tune_prompts` is told, opened and checked: before anything is trained, and without Ray."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jobs.training import Contrastive, check_name, count_steps

from indexing.artifact import Artifact
from indexing.encoders import EncoderSpec
from indexing.models import model_folder
from indexing.negatives import mined_corpus, training_data
from indexing.queries import Queries
from indexing.store import Store
from indexing.tuning import TuneMaker
from retriever.dual import TuneOptions
from retriever.errors import InputError
from retriever.options import EncoderOptions
from retriever.prompts import check_backbone, load_prompt
from retriever.training import HOW, LoopOptions


@dataclass(frozen=True, kw_only=True)
class TunePrompts(Contrastive):
    """--limit N takes the first N queries of the split."""

    task: str
    """The task's name: what comes of it is prompts/TASK, or models/TASK with --method finetune."""
    backbone: str
    """A Hugging Face name, a folder, or models/NAME of the store."""
    method: Literal["prompt", "finetune"] = "prompt"
    side: Literal["query", "both"] = "both"
    """query: passages are encoded by the backbone as it is, so that an index of it serves the task."""
    untied: bool = False
    """A prompt for queries and another one for passages."""
    length: int = 32
    """Of a prompt, in tokens."""
    init: str | None = None
    """Begin from prompts/NAME, of the same backbone and length (such as pretrain_rip --train prompts makes)."""
    parametrisation: Literal["embedding", "mlp"] = "embedding"
    prompt_dropout: float = 0.1
    negatives: str | None = None
    """May be left out where the store has one only, as --queries may."""
    queries: str | None = None
    split: str = "train"
    dev_split: str | None = None
    """Judge the model by this split (MRR@10) while it trains, and keep the best."""
    dev_limit: int | None = 500
    dev_passages: int = 2000
    """The dev split's questions are looked for in so many passages: those that answer them, and others at random."""
    epochs: float = 1.0
    steps: int | None = None
    """Instead of --epochs."""
    refresh_epochs: float | None = None
    """Mine negatives anew by the model as it is, each time so many epochs are done (ANCE); the mined ones are for the
    time before. Known answers are not looked for in their texts."""
    refresh_depth: int = 100
    """Negatives of each query that are mined then, to draw from."""
    batch: int = 32
    """Queries a step, over all workers."""
    negatives_per_query: int = 1
    lr: float | None = None
    """Default: 7e-3 for prompts (DPTDR), 2e-5 for fine-tuning."""
    warm_up: float = 0.1
    weight_decay: float | None = None
    """Default: 0 for prompts, 0.01 for fine-tuning."""
    temperature: float | None = None
    """Divides similarities; default: 1, or 0.05 where vectors have length 1."""
    pooling: Literal["cls", "mean", "last"] | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    title: Literal["space", "newline", "sep", "none"] = "space"
    query_length: int | None = None
    passage_length: int | None = None
    evaluate_every: int = 100
    """Steps."""
    patience: int = 0
    """Evaluations without a better one before training ends; 0: never."""


@dataclass(frozen=True)
class Opened:
    """What the options name, opened and checked."""

    queries: int
    spec: EncoderSpec
    maker: TuneMaker
    loop: LoopOptions
    inputs: dict[str, Artifact]
    config: dict[str, Any]


def open_all(store: Store, options: TunePrompts) -> Opened:
    """Raises InputError for whatever is missing, does not fit or cannot be trained with."""
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
        raise InputError(f"--patience {options.patience}: expected --dev-split too, by which the best is known, and "
                         "--evaluate-every")  # fmt: skip
    if options.dev_passages < 1 or (options.dev_limit is not None and options.dev_limit < 1):
        raise InputError(f"--dev-limit {options.dev_limit} --dev-passages {options.dev_passages}: expected 1 at least")
    sides: Any = "query" if options.side == "query" else "untied" if options.untied else "tied"
    shared = {"batch", "negatives_per_query", "temperature", "seed", "method"}
    prompt = {"length", "parametrisation", "prompt_dropout"} if options.method == "prompt" else set()
    tuning = TuneOptions(sides=sides, **{name: getattr(options, name) for name in shared | prompt})
    refresh = options.refresh_epochs
    if options.refresh_depth < 1 or (refresh is not None and not (refresh > 0 and math.isfinite(refresh))):
        raise InputError(f"--refresh-epochs {refresh} --refresh-depth {options.refresh_depth}: expected more than 0, "
                         "and 1 at least")  # fmt: skip
    refresh_every = math.ceil((refresh or 0) * len(data.queries) / options.batch)
    loop = LoopOptions(
        steps=count_steps(options.steps, options.epochs, len(data.queries), options.batch),
        lr=options.lr if options.lr is not None else (7e-3 if frozen else 2e-5),
        seed=options.seed, warm_up=options.warm_up,
        weight_decay=options.weight_decay if options.weight_decay is not None else (0.0 if frozen else 0.01),
        grad_cache=options.grad_cache, zero=options.zero, offload=options.offload,
        checkpoint_every=options.checkpoint_every, patience=options.patience,
        evaluate_every=options.evaluate_every if options.dev_split else 0, refresh_every=refresh_every,
    )  # fmt: skip
    start = None if options.init is None else options.init.removeprefix("prompts/")
    if start is not None and not frozen:
        raise InputError(f"--init {options.init} --method finetune: a prompt is nothing to begin fine-tuning from")
    begun = {} if start is None else {"init": store.open("prompts", start)}
    for artifact in begun.values():
        check_backbone(load_prompt(model_folder(artifact)), described)
    maker = TuneMaker(
        store=store, backbone=spec, described=described, tuning=tuning, corpus=corpus,
        queries=queries.artifact.key.partition("/")[2], negatives=negatives.key.partition("/")[2],
        split=options.split, limit=options.limit, dev_split=options.dev_split, dev_limit=options.dev_limit,
        dev_passages=options.dev_passages, checkpointing=options.checkpointing, start=start,
        refresh_depth=options.refresh_depth if refresh_every else 0,
    )  # fmt: skip
    dev = {"split": options.dev_split, "limit": options.dev_limit, "passages": options.dev_passages}
    config = {
        "backbone": described, "tuning": asdict(tuning),
        "loop": {name: value for name, value in asdict(loop).items() if name not in HOW},
        "split": options.split, "limit": options.limit, "dev": dev if options.dev_split else None,
        "refresh_depth": maker.refresh_depth, "cpus": options.cpus, "dtype": options.dtype,
    }  # fmt: skip
    inputs = {"corpus": corpus.generations[-1], "queries": queries.artifact, "negatives": negatives,
              **spec.inputs(), **begun}  # fmt: skip
    return Opened(len(data.queries), spec, maker, loop, inputs, config)
