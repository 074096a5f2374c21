"""Compares RIP with masked language modelling (MLM) over equally many tokens, on a small backbone trained first.

    python benchmarks/pretraining_quality.py --store S --general FILE.jsonl.gz … --folder W --json results/rip.json

The backbone is a BERT with 4 layers of width 256. It starts from random weights and is trained by MLM on the general
corpora (BEIR corpus files). From it, two models are trained on the corpus of the store with the same number of steps,
one by RIP and one by MLM; their batches hold the same number of tokens. The backbone and both models are measured
without further training on the test split: MRR@10 among all passages by cosine, l_align of queries and their passages,
and l_uniform of passages, on vectors of length 1 and on raw vectors. Existing models are not trained again, so an
interrupted run resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.small_backbone import make, pretrain

PAIRS = 2_000  # queries for which l_align is measured, and passages for which l_uniform is


def tokens_per_passage(store: str, backbone: str, objective: str, length: int) -> float:
    """Returns the mean number of tokens, without padding, that a passage brings to a batch.

    Args:
        store: The store; 512 random passages of its corpus are counted.
        backbone: Folder of the backbone.
        objective: "rip" or "mlm".
        length: Maximum number of tokens of a sentence ("rip") or passage ("mlm").
    """
    from indexing.corpus.corpus import Corpus
    from indexing.store.store import Store
    from retriever.options.pretraining import RipOptions
    from retriever.systems.rip import RipData, RipSystem, are_eligible

    corpus = Corpus.open(Store(store))
    options = RipOptions(steps=1, batch=512, objective=objective, max_length=length, pooling="mean")  # type: ignore[arg-type]
    rows = np.random.default_rng(0).choice(corpus.num_rows, 600, replace=False)
    texts = {row: passage.text for row, passage in zip(sorted(rows), corpus.passages(np.sort(rows)), strict=True)}
    rows = np.array([row for row in sorted(rows) if are_eligible([texts[row]], options)[0]])
    data = RipData(corpus.num_rows, lambda numbers: [texts[row] for row in numbers], rows)
    batch = RipSystem(Path(backbone), options, data, device=torch.device("cpu")).batch(0, 0, 1)
    return sum(int(chunk.inputs[1].sum()) for chunk in batch.chunks) / options.batch


def measure(store_url: str, folder: str, name: str, length: int, query_set: str | None) -> dict[str, float]:
    """Returns MRR@10 and R@100 on the test split, l_align and l_uniform, without further training.

    Args:
        store_url: The store, which gets the embeddings and the run.
        folder: The model.
        name: Name of the embeddings; the run is NAME-test.
        length: Maximum number of tokens of a passage.
        query_set: Name of the query set; None: the only one of the store.
    """
    from jobs import encode_corpus, search
    from jobs.common.options import build_options
    from jobs.evaluation.measures import make_run_measure
    from jobs.evaluation.runs import read_run_table

    from indexing.corpus.corpus import Corpus
    from indexing.corpus.queries import Queries
    from indexing.measures.vectors import alignment, uniformity
    from indexing.store.store import Store
    from retriever.encoding.encoder import Encoder
    from retriever.options import EncoderOptions

    lengths: dict[str, Any] = {"pooling": "mean", "normalize": True, "query_length": 64, "passage_length": length}
    run = f"{name}-test"
    encode_corpus.main(
        build_options(encode_corpus.EncodeCorpus, {"store": store_url, "encoder": folder, "name": name, **lengths})
    )
    search.main(
        search.SearchJob(store=store_url, source=f"exact:{name}", queries=query_set, split="test", k=100, name=run)
    )
    store = Store(store_url)
    queries, corpus = Queries.open(store, query_set), Corpus.open(store)
    qrels, split = queries.qrels("test"), queries.split("test")
    metrics_of = make_run_measure(store, queries, qrels, split.ids, ["RR@10", "R@100"])
    values_by_metric = metrics_of(read_run_table(store, run, queries, "test"))
    figures = {metric: float(values.mean()) for metric, values in values_by_metric.items()}
    texts = dict(zip(*split, strict=True))
    pairs = list(dict(zip(qrels["query_id"].to_pylist(), qrels["corpus_id"].to_pylist(), strict=True)).items())[:PAIRS]
    positives = corpus.passages(corpus.rows_of([passage for _, passage in pairs]))
    random_rows = np.sort(np.random.default_rng(0).choice(corpus.num_rows, PAIRS, replace=False))
    random_passages = corpus.passages(random_rows)
    for kind, normalize in (("unit", True), ("raw", False)):
        encoder = Encoder(folder, EncoderOptions(**{**lengths, "normalize": normalize}))
        query_vectors = encoder.encode([texts[query] for query, _ in pairs], side="query")
        positive_vectors = encoder.encode([passage.text for passage in positives], side="passage")
        random_vectors = encoder.encode([passage.text for passage in random_passages], side="passage")
        figures[f"l_align {kind}"] = alignment(query_vectors, positive_vectors)
        figures[f"l_uniform {kind}"] = uniformity(random_vectors)
    return figures


def main() -> None:
    """Reads the options, trains the models that are missing, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with the corpus and the queries", required=True)
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--general", None, "BEIR files on which the backbone is trained", required=True, nargs="+")
    parser.add("--folder", None, "folder in which the backbone is trained", required=True)
    parser.add("--layers", 4, "layers of the backbone")
    parser.add("--hidden", 256, "hidden size of the backbone")
    parser.add("--general-steps", 8_000, "training steps of the backbone")
    parser.add("--general-batch", 32, "passages per step of the backbone")
    parser.add("--general-lr", 1e-3, "peak learning rate of the backbone")
    parser.add("--steps", 300, "steps of RIP, and of MLM")
    parser.add("--batch", 256, "passages per step of RIP")
    parser.add("--lr", 3e-4, "peak learning rate of RIP and MLM")
    parser.add("--cpus", 2, "threads of training")
    parser.add("--json", "results/pretraining_quality.json", "output file")
    options = parser.parse_args()
    backbone = make(
        options.general,
        Path(options.folder),
        layers=options.layers,
        hidden=options.hidden,
        steps=options.general_steps,
        batch=options.general_batch,
        lr=options.general_lr,
        cpus=options.cpus,
    )
    rip_tokens = tokens_per_passage(options.store, backbone, "rip", 64)
    mlm_batch = round(options.batch * rip_tokens / tokens_per_passage(options.store, backbone, "mlm", 128))
    rip = pretrain(
        options.store, backbone, "small-rip", "rip", options.steps, options.batch, 64, options.lr, options.cpus
    )
    mlm = pretrain(options.store, backbone, "small-mlm", "mlm", options.steps, mlm_batch, 128, options.lr, options.cpus)
    document: dict[str, Any] = {"options": vars(options), "tokens": options.steps * options.batch * rip_tokens}
    for name, model in {"small": backbone, "small-mlm": mlm, "small-rip": rip}.items():
        document[name] = measure(options.store, model, name, 128, options.queries)
        print(f"{name:10} {'  '.join(f'{metric} {value:.4f}' for metric, value in document[name].items())}", flush=True)
    write_json(options.json, document)


if __name__ == "__main__":
    main()
