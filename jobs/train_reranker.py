r"""Train a cross-encoder from a backbone on mined negatives; killed and started again, it goes on from its checkpoint.

    python jobs/train_reranker.py --store data/squad --split train --negatives bm25 \
        --backbone sentence-transformers/all-MiniLM-L6-v2 --name minilm-reranker
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jobs.cli import Stage, human, run, say
from jobs.session import connect
from jobs.training import Workers

from indexing.artifact import Artifact, fingerprint_of
from indexing.corpus import Corpus
from indexing.models import Checkpoints, resolve_model
from indexing.negatives import mined_corpus, training_data
from indexing.queries import Queries
from indexing.reranker_job import Task, train
from indexing.store import Store
from retriever.files import resolve, weight_files
from retriever.reranker_data import TrainingData, TrainingOptions
from retriever.reranker_training import check_length, describe_backbone


@dataclass(frozen=True, kw_only=True)
class TrainReranker(Workers):
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
    """Queries of the split; `data` has those of them that were mined for and have a positive."""
    data: TrainingData
    training: TrainingOptions
    folder: Path
    corpus: Corpus
    inputs: dict[str, Artifact]


def main(options: TrainReranker) -> None:
    store = Store(options.store).require()
    opened = open_all(store, options)
    if options.plan:
        return plan(options, opened)
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-reranker"
    name = name if options.limit is None else f"{name}-limit{options.limit}"
    described = describe_backbone(opened.folder)
    config = {"backbone": described, "training": asdict(opened.training), "split": options.split,
              "limit": options.limit, "workers": options.workers, "cpus": options.cpus}  # fmt: skip
    places = None
    if name not in store.names("models"):
        connect(store)
        places = options.places()
    identity = fingerprint_of([{role: a.fingerprint for role, a in opened.inputs.items()}, config])
    checkpoints = Checkpoints(store, name, identity)
    with store.create("models", name, inputs=opened.inputs, config=config) as draft:
        if not draft.complete:
            assert places is not None
            task = Task(
                store=store, draft=draft, checkpoints=checkpoints, training=opened.training, backbone=options.backbone,
                described=described, corpus=opened.corpus, queries=opened.inputs["queries"].key,
                negatives=opened.inputs["negatives"].key, split=options.split, limit=options.limit, places=places,
                checkpoint_every=options.checkpoint_every,
            )  # fmt: skip
            draft.note(queries=len(opened.data.queries), asked=opened.asked)
            with Stage("train", opened.training.steps, "steps") as stage:
                draft.note(**train(task, stage.count))
    checkpoints.clear()
    model = store.open("models", name)
    notes = model.notes
    say(f"{model.url}: {model.config['training']['steps']:,} steps over {notes['queries']:,} of {notes['asked']:,} "
        f"queries, last loss {notes['loss']:.4f}, {notes['numerics']}")  # fmt: skip
    return None


def open_all(store: Store, options: TrainReranker) -> Opened:
    """Raises InputError for whatever is missing, does not fit or cannot be trained with."""
    options.check_workers("query")
    negatives = store.open("negatives", store.only("negatives", options.negatives))
    queries = Queries.open(store, options.queries)
    corpus = mined_corpus(store, negatives)
    data = training_data(corpus, queries, options.split, negatives, options.limit)
    epochs = math.ceil(options.epochs * len(data.queries) / options.batch)
    steps = epochs if options.steps is None else options.steps
    names = set(TrainingOptions.__dataclass_fields__) - {"steps"}
    training = TrainingOptions(steps=steps, **{name: getattr(options, name) for name in names})
    folder = resolve(resolve_model(store, options.backbone))
    check_length(folder, training.max_length)
    inputs = {"corpus": corpus.generations[-1], "queries": queries.artifact, "negatives": negatives}
    kind, _, own = options.backbone.partition("/")
    if kind == "models" and own:
        inputs["backbone"] = store.open(kind, own)
    return Opened(len(queries.split(options.split, options.limit).ids), data, training, folder, corpus, inputs)


def plan(options: TrainReranker, opened: Opened) -> None:
    """What a training reads and writes; the time only a first run can tell."""
    training = opened.training
    weights = sum(file.stat().st_size for file in weight_files(opened.folder))
    pairs = training.steps * training.batch * (1 + training.negatives_per_query)
    mined = opened.inputs["negatives"].key
    say(f"queries   {len(opened.data.queries):,} of the {opened.asked:,} of {options.split}, with negatives in {mined}")
    say(f"steps     {training.steps:,} of {training.batch} queries on {options.workers} workers")
    say(f"pairs     {pairs:,}, at most {pairs * training.max_length:,} tokens there and back")
    say(f"memory    about {human(4 * weights)} a worker, and a batch's intermediate values")
    say(f"writes    {human(weights)}, and a checkpoint of {human(3 * weights)} every {options.checkpoint_every} steps")


if __name__ == "__main__":
    run(main, TrainReranker)
