r"""Train a cross-encoder from a backbone on mined negatives; killed and started again, it goes on from its checkpoint.

    python jobs/train_reranker.py --store data/squad --split train --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --name minilm-reranker
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from jobs.cli import human, run, say
from jobs.training import Training, check_name, count_steps

from indexing.artifact import Artifact
from indexing.models import resolve_model
from indexing.negatives import mined_corpus, training_data
from indexing.queries import Queries
from indexing.reranking import CrossMaker
from indexing.store import Store
from retriever.files import describe_backbone, resolve, weight_files
from retriever.reranker_training import CrossOptions, check_length
from retriever.training import HOW, LoopOptions


@dataclass(frozen=True, kw_only=True)
class TrainReranker(Training):
    """--limit N takes the first N queries of the split."""

    negatives: str | None = None
    """May be left out where the store has one only, as --queries may."""
    queries: str | None = None
    split: str = "train"
    backbone: str
    """A Hugging Face name, a folder, or models/NAME of the store."""
    name: str | None = None
    """The model's name; default: the last piece of the backbone's, and -reranker."""
    epochs: float = 1.0
    steps: int | None = None
    """Instead of --epochs."""
    batch: int = 32
    """Queries a step, over all workers."""
    negatives_per_query: int = 4
    lr: float = 2e-5
    max_length: int = 256
    """Tokens of question and passage together."""
    loss: Literal["bce", "listwise"] = "bce"
    """listwise ranks as well; its scores are no probabilities."""
    title: Literal["space", "newline", "sep", "none"] = "space"


@dataclass(frozen=True)
class Opened:
    """What the options name, opened and checked."""

    asked: int
    """Queries of the split; `queries` of them were mined for and have a positive."""
    queries: int
    weights: int
    """Bytes of the backbone's."""
    maker: CrossMaker
    loop: LoopOptions
    inputs: dict[str, Artifact]
    config: dict[str, Any]


def main(options: TrainReranker) -> None:
    store = Store(options.store).require()
    opened = open_all(store, options)
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-reranker"
    check_name("models", name)
    if options.plan:
        return plan(options, opened)
    name = name if options.limit is None else f"{name}-limit{options.limit}"
    noted = {"queries": opened.queries, "asked": opened.asked}
    model = options.make(store, "models", name, inputs=opened.inputs, config=opened.config,
                         prepare=lambda: (opened.maker, opened.loop, noted))  # fmt: skip
    notes = model.notes
    say(f"{model.url}: {notes['steps']:,} steps over {notes['queries']:,} of {notes['asked']:,} queries, last loss "
        f"{notes['loss']:.4f}, {notes['numerics']}")  # fmt: skip
    options.draw(model)
    return None


def open_all(store: Store, options: TrainReranker) -> Opened:
    """Raises InputError for whatever is missing, does not fit or cannot be trained with."""
    options.check("query")
    negatives = store.open("negatives", store.only("negatives", options.negatives))
    queries = Queries.open(store, options.queries)
    corpus = mined_corpus(store, negatives)
    data = training_data(corpus, queries, options.split, negatives, options.limit)
    cross = CrossOptions(**{name: getattr(options, name) for name in CrossOptions.__dataclass_fields__})
    steps = count_steps(options.steps, options.epochs, len(data.queries), options.batch)
    loop = LoopOptions(steps=steps, lr=options.lr, seed=options.seed, zero=options.zero, offload=options.offload,
                       checkpoint_every=options.checkpoint_every)  # fmt: skip
    folder = resolve(resolve_model(store, options.backbone))
    described = describe_backbone(folder)
    check_length(folder, cross.max_length)
    inputs = {"corpus": corpus.generations[-1], "queries": queries.artifact, "negatives": negatives}
    if options.backbone.startswith("models/"):
        inputs["backbone"] = store.open(*options.backbone.split("/", 1))
    maker = CrossMaker(
        store=store, backbone=options.backbone, described=described, options=cross, corpus=corpus,
        queries=queries.artifact.key.partition("/")[2], negatives=negatives.key.partition("/")[2],
        split=options.split, limit=options.limit, checkpointing=options.checkpointing,
    )  # fmt: skip
    config = {
        "backbone": described, "training": asdict(cross),
        "loop": {name: value for name, value in asdict(loop).items() if name not in HOW},
        "split": options.split, "limit": options.limit, "cpus": options.cpus, "dtype": options.dtype,
    }  # fmt: skip
    asked = len(queries.split(options.split, options.limit).ids)
    weights = sum(file.stat().st_size for file in weight_files(folder))
    return Opened(asked, len(data.queries), weights, maker, loop, inputs, config)


def plan(options: TrainReranker, opened: Opened) -> None:
    """What a training reads and writes; the time only a first run can tell."""
    steps, weights = opened.loop.steps, opened.weights
    pairs = steps * options.batch * (1 + options.negatives_per_query)
    mined = opened.inputs["negatives"].key
    say(f"queries   {opened.queries:,} of the {opened.asked:,} of {options.split}, with negatives in {mined}")
    say(f"steps     {steps:,} of {options.batch} queries on {options.workers} workers")
    say(f"pairs     {pairs:,}, at most {pairs * options.max_length:,} tokens there and back")
    say(f"memory    about {human(4 * weights)} a worker, and a batch's intermediate values")
    say(f"writes    {human(weights)}, and a checkpoint of {human(3 * weights)} every {options.checkpoint_every} steps")


if __name__ == "__main__":
    run(main, TrainReranker)
