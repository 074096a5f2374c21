"""RIP against plain masked language modelling of as many tokens, on a small backbone that is made first.

    python benchmarks/pretraining_quality.py --store S --general FILE.jsonl.gz … --folder W --json results/rip.json

The backbone: BERT of 4 layers of 256, random, masked language modelling on the general corpora (BEIR's corpus files).
From it, on S's corpus, the same number of steps of RIP and of masked words, a batch of each holding as many tokens.
Judged without further training on S's test split: MRR@10 among all passages by cosine, l_align of questions and their
passages and l_uniform of passages, on vectors of length 1 and on raw ones. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from small_backbone import make, pretrain  # noqa: E402

PAIRS = 2_000  # questions that l_align is measured on, and passages for l_uniform


def tokens_of_a_passage(store: str, backbone: str, objective: str, length: int) -> float:
    """How many tokens, without padding, one passage brings to a batch: the mean of 512."""
    from indexing.corpus import Corpus
    from indexing.store import Store
    from retriever.rip import RipData, RipOptions, RipSystem, eligible

    corpus = Corpus.open(Store(store))
    options = RipOptions(steps=1, batch=512, objective=objective, max_length=length, pooling="mean")  # type: ignore[arg-type]
    rows = np.random.default_rng(0).choice(corpus.num_rows, 600, replace=False)
    texts = {row: passage.text for row, passage in zip(sorted(rows), corpus.passages(np.sort(rows)), strict=True)}
    rows = np.array([row for row in sorted(rows) if eligible([texts[row]], options)[0]])
    data = RipData(corpus.num_rows, lambda wanted: [texts[row] for row in wanted], rows)
    batch = RipSystem(Path(backbone), options, data, device=torch.device("cpu")).batch(0, 0, 1)
    return sum(int(chunk.inputs[1].sum()) for chunk in batch.chunks) / options.batch


def judge(store: str, folder: str, name: str, length: int, asked: str | None) -> dict[str, float]:
    """Zero-shot MRR@10 on the test split, l_align and l_uniform."""
    from jobs import encode_corpus, evaluate, search

    from indexing.corpus import Corpus
    from indexing.measures.vectors import alignment, uniformity
    from indexing.queries import Queries
    from indexing.store import Store
    from retriever.encoder import Encoder, EncoderOptions

    lengths: dict[str, Any] = {"pooling": "mean", "normalize": True, "query_length": 64, "passage_length": length}
    encode_corpus.main(encode_corpus.EncodeCorpus(store=store, encoder=folder, name=name, **lengths))
    search.main(
        search.Search(store=store, source=f"exact:{name}", queries=asked, split="test", k=100, name=f"{name}-test")
    )
    opened = Store(store)
    queries, corpus = Queries.open(opened, asked), Corpus.open(opened)
    qrels = queries.qrels("test")
    ids = queries.split("test").ids
    measured = evaluate.measure_of(opened, queries, qrels, ids, ["RR@10", "R@100"])(
        evaluate.load(opened, f"{name}-test", queries, "test")
    )
    figures = {metric: float(values.mean()) for metric, values in measured.items()}
    texts = dict(zip(*queries.split("test"), strict=True))
    pairs = list(dict(zip(qrels["query_id"].to_pylist(), qrels["corpus_id"].to_pylist(), strict=True)).items())[:PAIRS]
    passages = corpus.passages(corpus.rows_of([passage for _, passage in pairs]))
    some = np.sort(np.random.default_rng(0).choice(corpus.num_rows, PAIRS, replace=False))
    others = corpus.passages(some)
    for kind, normalize in (("unit", True), ("raw", False)):
        encoder = Encoder(folder, EncoderOptions(**{**lengths, "normalize": normalize}))
        one = encoder.encode([texts[query] for query, _ in pairs], side="query")
        other = encoder.encode([passage.text for passage in passages], side="passage")
        spread = encoder.encode([passage.text for passage in others], side="passage")
        figures |= {f"l_align {kind}": alignment(one, other), f"l_uniform {kind}": uniformity(spread)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="the corpus and the questions to be judged by")
    parser.add_argument("--queries", help="may be left out where the store has one set only")
    parser.add_argument("--general", nargs="+", required=True, help="BEIR corpus.jsonl.gz files")
    parser.add_argument("--folder", required=True, help="where the backbone is made")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--general-steps", type=int, default=8_000)
    parser.add_argument("--general-batch", type=int, default=32)
    parser.add_argument("--general-lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=300, help="of RIP, and of masked words")
    parser.add_argument("--batch", type=int, default=256, help="passages a step of RIP")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--cpus", type=int, default=2, help="threads of training")
    parser.add_argument("--json", default="results/pretraining_quality.json")
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
    rip_tokens = tokens_of_a_passage(options.store, backbone, "rip", 64)
    mlm_batch = round(options.batch * rip_tokens / tokens_of_a_passage(options.store, backbone, "mlm", 128))
    rip = pretrain(
        options.store, backbone, "small-rip", "rip", options.steps, options.batch, 64, options.lr, options.cpus
    )
    mlm = pretrain(options.store, backbone, "small-mlm", "mlm", options.steps, mlm_batch, 128, options.lr, options.cpus)
    document: dict[str, Any] = {"options": vars(options), "tokens": options.steps * options.batch * rip_tokens}
    for name, model in {"small": backbone, "small-mlm": mlm, "small-rip": rip}.items():
        document[name] = judge(options.store, model, name, 128, options.queries)
        print(f"{name:10} {'  '.join(f'{metric} {value:.4f}' for metric, value in document[name].items())}", flush=True)
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
