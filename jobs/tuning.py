"""What `tune_prompts` is told, opened and checked: before anything is trained, and without Ray."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from jobs.tune_prompts import TunePrompts


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
    if options.min_workers is not None and not 1 <= options.min_workers <= options.workers:
        raise InputError(f"--min-workers {options.min_workers}: expected 1 to --workers {options.workers}")
    if options.workers < 1 or options.cpus < 1 or options.batch < options.workers:
        raise InputError(f"--workers {options.workers} --cpus {options.cpus} --batch {options.batch}: expected 1 at "
                         "least, and a query for each worker")  # fmt: skip
    if options.method == "finetune" and (options.side == "query" or options.untied):
        raise InputError(f"--method finetune --side {options.side}{' --untied' * options.untied}: fine-tuning trains "
                         "one encoder for both sides; train prompts for one side only")  # fmt: skip
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
    elif options.patience:
        raise InputError(f"--patience {options.patience}: expected --dev-split too, by which the best is known")
    if frozen and (options.zero or 0) >= 2:
        raise InputError(f"--zero {options.zero} --method prompt: prompts are small and the backbone does not train: "
                         "give 0 or 1")  # fmt: skip
    sides: Any = "query" if options.side == "query" else "untied" if options.untied else "tied"
    shared = {"batch", "negatives_per_query", "temperature", "seed", "method"}
    prompt = {"length", "parametrisation", "prompt_dropout"} if options.method == "prompt" else set()
    tuning = TuneOptions(sides=sides, **{name: getattr(options, name) for name in shared | prompt})
    epochs = math.ceil(options.epochs * len(data.queries) / options.batch)
    if options.refresh_depth < 1 or (options.refresh_epochs is not None and not options.refresh_epochs > 0):
        raise InputError(f"--refresh-epochs {options.refresh_epochs} --refresh-depth {options.refresh_depth}: expected "
                         "more than 0, and 1 at least")  # fmt: skip
    refresh_every = math.ceil((options.refresh_epochs or 0) * len(data.queries) / options.batch)
    loop = LoopOptions(
        steps=epochs if options.steps is None else options.steps,
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
