"""Measures GTR's two-stage recipe at small scale: random T5 encoders and a cut MiniLM, zero-shot on three sets.

    python benchmarks/gtr_recipe.py --data ../shared/data --folder W --json results/gtr.json

Stage 1 trains on pairs without mined negatives: reuters (title, body), medquad (question, answer), and two sentences of
each SQuAD passage, which needs no queries; with --more-pairs, arXiv's pairs (title, abstract) are added, which resemble
the pairs of PubMedQA and SciFact. Stage 2 trains on SQuAD's queries with one hard negative of BM25 each, on 100% and on
10% of the queries. All runs of a stage take the same number of pairs. Each model is measured without training, after
stage 1 alone (pt), after stage 2 alone (ft), and after both, on SQuAD's test split and, without any training on them,
on SciFact, PubMedQA and Climate-FEVER: nDCG@10, R@100, and the median length of the first ten passages. BM25 is
measured on the same sets. The size axis has random T5 encoders (t5-2x128, t5-4x256) and MiniLM with its first 2 or
all 6 layers.

This tests the recipe, not the paper's claim, which is about pretrained T5. MiniLM was trained on SQuAD's queries and on
pairs like those of the other sets (its model card), so its figures are not zero-shot; they compare sizes.

Every step runs through the jobs, so an interrupted run resumes; the JSON file is written after each cell.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_documents, write_json, write_qrels
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM

VOCABULARY = 8_192  # pieces of the Unigram tokenizer
PAIRS = ("reuters", "medquad")  # sets whose judged pairs stage 1 takes
MORE_PAIRS = ("arxiv",)
ZERO_SHOT = ("scifact", "pubmedqa", "climate-fever-sent")
MODELS = ("t5-2x128", "t5-4x256", "minilm-2", "minilm-6")
_CELL = re.compile(r"(?P<stage1>ptx?|)-?(?P<stage2>ft(10|100)|)")


class Cell(NamedTuple):
    """A model with the stages that it is trained in.

    stage1: "": none; "pt": on the pairs; "ptx": also on arXiv's. stage2: "", or the percentage of the training queries.
    """

    model: str
    stage1: str
    stage2: str

    @property
    def name(self) -> str:
        stages = [self.stage1, f"ft{self.stage2}" if self.stage2 else ""]
        return "-".join([self.model, *filter(None, stages)])


def cells(models: Iterable[str], arms: Iterable[str]) -> Iterator[Cell]:
    """Yields the cells of an experiment."""
    for model in models:
        for arm in arms:
            stages = _CELL.fullmatch("" if arm == "none" else arm)
            assert stages is not None, arm
            yield Cell(model, stages["stage1"], stages["stage2"].removeprefix("ft"))


def write_passage_pairs(corpus: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Writes pairs of sentences of each passage as a BEIR folder: one is a query, the other its passage.

    Args:
        corpus: A corpus.jsonl.gz.
        folder: The folder to write to.
        options: The options of the benchmark: draws, unit and seed.
    """
    from retriever.options.pretraining import RipOptions
    from retriever.systems.rip import eligible, pair_of

    if (folder / "qrels" / "train.tsv").exists():  # written last
        return folder
    rip = RipOptions(steps=1, unit=options.unit, max_length=options.length, seed=options.seed, pooling="mean")
    texts = [document["text"] for document in read_documents(corpus)]
    rows = np.flatnonzero(eligible(texts, rip))
    pairs = {
        (int(row), draw): pair_of(texts[row], rip, draw, int(row)) for draw in range(options.draws) for row in rows
    }
    numbered = [(f"{row}-{draw}", pair) for (row, draw), pair in pairs.items()]
    write_documents(
        folder / "corpus.jsonl", ({"_id": f"p{name}", "title": "", "text": pair[1]} for name, pair in numbered)
    )
    write_documents(folder / "queries.jsonl", ({"_id": f"q{name}", "text": pair[0]} for name, pair in numbered))
    write_qrels(folder / "qrels" / "train.tsv", (Judgement(f"q{name}", f"p{name}") for name, _ in numbered))
    return folder


def write_share(data: Path, folder: Path, percentage: int, options: argparse.Namespace) -> Path:
    """Writes a share of SQuAD's training queries as a BEIR query set. A smaller share is part of a larger one."""
    if (folder / "qrels" / "train.tsv").exists():
        return folder
    judgements = read_qrels(data / "qrels" / "train.tsv")
    queries = sorted({judgement.query for judgement in judgements})
    order = np.random.default_rng(options.seed).permutation(len(queries))[: options.queries]
    in_share = {queries[place] for place in order[: max(1, len(order) * percentage // 100)]}
    write_documents(
        folder / "queries.jsonl",
        (document for document in read_documents(data / "queries.jsonl.gz") if document["_id"] in in_share),
    )
    write_qrels(
        folder / "qrels" / "train.tsv",
        (Judgement(judgement.query, judgement.passage) for judgement in judgements if judgement.query in in_share),
    )
    return folder


def save_tokenizer(folder: Path, texts: Iterable[str], length: int) -> int:
    """Trains a Unigram tokenizer with T5's special tokens, which ends each text with </s>; returns its size."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.Unigram())
    pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    special = ["<pad>", "</s>", "<unk>"]
    pieces.train_from_iterator(
        texts,
        trainers.UnigramTrainer(vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    pieces.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", pieces.token_to_id("</s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_random_t5(folder: Path, tokenizer: Path, layers: int, hidden: int, seed: int) -> Path:
    """Saves a T5 encoder with random weights and without dropout, with a copy of the tokenizer."""
    import torch
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    if not (folder / "model.safetensors").exists():
        pieces = AutoTokenizer.from_pretrained(tokenizer)
        shape = T5Config(
            vocab_size=len(pieces),
            d_model=hidden,
            d_kv=64,
            num_heads=hidden // 64,
            d_ff=4 * hidden,
            num_layers=layers,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
        torch.manual_seed(seed)
        pieces.save_pretrained(folder)
        T5EncoderModel(shape).save_pretrained(folder)
    return folder


def save_cut_minilm(folder: Path, layers: int) -> Path:
    """Saves the first layers of MiniLM as a model with its pooling and scaling."""
    import torch

    from retriever.encoding.backbones import load_backbone
    from retriever.encoding.saving import save_encoder
    from retriever.model.files import resolve
    from retriever.model.recipe import read_recipe
    from retriever.options import EncoderOptions

    if not (folder / "modules.json").exists():
        recipe = read_recipe(resolve(MINILM), EncoderOptions())
        save_encoder(folder, recipe, load_backbone(recipe, torch.float32, num_hidden_layers=layers))
    return folder


def save_model(name: str, options: argparse.Namespace) -> Path:
    """Returns the folder of a model before any training, which is written if it does not exist."""
    folder = Path(options.folder) / "models" / name
    if name.startswith("minilm-"):
        return save_cut_minilm(folder, int(name.removeprefix("minilm-")))
    tokenizer = Path(options.folder) / "models" / "tokenizer"
    if not (tokenizer / "tokenizer_config.json").exists():
        files = [Path(options.data) / part / "corpus.jsonl.gz" for part in (*PAIRS, "squad")]
        save_tokenizer(
            tokenizer, (document["text"] for file in files for document in read_documents(file)), options.length
        )
    layers, hidden = name.removeprefix("t5-").split("x")
    return save_random_t5(folder, tokenizer, int(layers), int(hidden), options.seed)


def store_of(name: str, options: argparse.Namespace) -> str:
    return str(Path(options.folder) / "stores" / name)


def import_all(options: argparse.Namespace) -> None:
    """Imports the sets and SQuAD's shares of training queries, and mines hard negatives for these."""
    from jobs import build_bm25, import_corpus, import_queries, mine_negatives
    from jobs.common.options import build

    folder, data = Path(options.folder), Path(options.data)
    sources = {name: data / name for name in (*PAIRS, "squad", *ZERO_SHOT)}
    if any(arm.startswith("ptx") for arm in options.arms):
        sources |= {name: data / name for name in MORE_PAIRS}
    sources["passages"] = write_passage_pairs(data / "squad" / "corpus.jsonl.gz", folder / "passages", options)
    for name, source in sources.items():
        import_corpus.main(import_corpus.ImportCorpus(store=store_of(name, options), source=str(source)))
    squad = store_of("squad", options)
    shares = sorted({cell.stage2 for cell in cells(options.models, options.arms) if cell.stage2}, key=int)
    if shares:
        build_bm25.main(build_bm25.BuildBm25(store=squad))
    for share in shares:
        name = f"squad-{share}"
        source = write_share(data / "squad", folder / name, int(share), options)
        import_queries.main(import_queries.ImportQueries(store=squad, source=str(source), queries=name))
        mine_negatives.main(
            build(
                mine_negatives.MineNegatives,
                {
                    "store": squad,
                    "sources": ("bm25",),
                    "queries": name,
                    "split": "train",
                    "depth": options.depth,
                    "drop_answers": True,
                    "pool_negatives": 8,
                    "name": name,
                },
            )
        )


def train(
    store: str, task: str, backbone: str, options: argparse.Namespace, *, pairs: int, is_random: bool, **sets: Any
) -> str:
    """Returns the folder of a model that is trained by GTR's loss and optimizer, unless the store has it.

    Args:
        store: The store that holds the model.
        task: Name of the model.
        backbone: Folder of the backbone.
        options: The options of the benchmark.
        pairs: Number of pairs.
        is_random: The backbone has random weights, and gets a projection.
        **sets: The training sets, as options of `train_retriever`.
    """
    from jobs import train_retriever
    from jobs.common.options import build
    from jobs.training.options import TrainRetriever

    from indexing.store.models import resolve_model
    from indexing.store.store import Store

    steps = max(1, pairs // options.batch)
    train_retriever.main(
        build(
            TrainRetriever,
            dict(
                store=store,
                task=task,
                backbone=backbone,
                train="all",
                split="train",
                pooling="mean",
                normalize=True,
                loss="symmetric-sum",
                temperature=0.01,
                optimizer="adafactor",
                warm_up=0.1,
                clip=1e6,
                lr=options.lr_random if is_random else options.lr,
                projection=options.projection if is_random else None,
                dropout=False,
                steps=steps,
                batch=options.batch,
                query_length=options.length,
                passage_length=options.length,
                seed=options.seed,
                cpus=options.cpus,
                checkpoint_every=max(1, steps // 10),
                **sets,
            ),
        )
    )
    return resolve_model(Store(store), f"models/{task}")


def train_cell(cell: Cell, options: argparse.Namespace) -> str:
    """Returns the folder of the model of a cell."""
    folder = str(save_model(cell.model, options))
    is_random = cell.model.startswith("t5")  # MiniLM keeps its own vectors, without a projection
    if cell.stage1:
        names = [*PAIRS, *(MORE_PAIRS if cell.stage1 == "ptx" else ())]
        others = tuple(f"queries={name},store={store_of(name, options)}" for name in names)
        folder = train(
            store_of("passages", options),
            f"{cell.model}-{cell.stage1}",
            folder,
            options,
            pairs=options.pairs1,
            is_random=is_random,
            queries="passages",
            negatives="none",
            also_train=others,
        )
        is_random = False
    if cell.stage2:
        folder = train(
            store_of("squad", options),
            cell.name,
            folder,
            options,
            pairs=options.pairs2,
            is_random=is_random,
            queries=f"squad-{cell.stage2}",
            negatives=f"squad-{cell.stage2}",
            negatives_per_query=1,
        )
    return folder


def measure(cell: Cell, folder: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the figures of a model by set, each on its test split."""
    from jobs import encode_corpus

    figures = {}
    for name in options.sets:
        store = store_of(name, options)
        encode_corpus.main(
            encode_corpus.EncodeCorpus(
                store=store,
                encoder=folder,
                name=cell.name,
                query_length=options.length,
                passage_length=options.length,
                pooling="mean",
                normalize=True,
                compile="never",
            )
        )
        figures[name] = measure_source(name, f"exact:{cell.name}", cell.name, options)
    return figures


def measure_bm25(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the figures of BM25 by set."""
    from jobs import build_bm25

    figures = {}
    for name in options.sets:
        build_bm25.main(build_bm25.BuildBm25(store=store_of(name, options)))
        figures[name] = measure_source(name, "bm25", "bm25", options)
    return figures


def measure_source(name: str, source: str, title: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns the figures of a search source on the test split of a set.

    Args:
        name: The set.
        source: The source, as of `search`.
        title: What the run and the file of figures are named by.
        options: The options of the benchmark.
    """
    from jobs import evaluate, search

    store, run = store_of(name, options), f"{title}-test"
    search.main(search.Search(store=store, source=source, queries=name, split="test", k=100, name=run))
    file = Path(options.folder) / "figures" / name / f"{title}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    evaluate.main(
        evaluate.Evaluate(
            store=store,
            run=(run,),
            queries=name,
            split="test",
            metrics=("nDCG@10", "RR@10", "R@100"),
            median_length=10,
            json=str(file),
            overwrite=True,
        )
    )
    document = json.loads(file.read_text())
    return document["mean"][run] | {"median_length": document["median_length"][run]["words"]}


def measure_latency(folder: str, options: argparse.Namespace) -> float:
    """Returns the median time to encode one text of the full length, in milliseconds."""
    from retriever.encoding.encoder import Encoder
    from retriever.options import EncoderOptions

    lengths = {"query_length": options.length, "passage_length": options.length}
    encoder = Encoder(folder, EncoderOptions(**lengths, compile="never"), threads=options.cpus)  # type: ignore[arg-type]
    tokens = encoder.tokenize([" ".join(["word"] * 2 * options.length)], side="query")
    times = []
    for _ in range(60):
        started = time.perf_counter()
        encoder.forward(tokens)
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[10:])


def count_parameters(folder: str) -> int:
    """Returns the number of parameters of a model, the projection included."""
    from retriever.model.files import weight_files
    from retriever.model.weights import tensor_shapes

    files = [file for place in (Path(folder), *Path(folder).glob("*_Dense")) for file in weight_files(place)]
    return sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values())


def show(title: str, sets: dict[str, dict[str, float]]) -> None:
    """Prints nDCG@10 of each set."""
    print(
        f"{title:24} nDCG@10 " + "  ".join(f"{name} {values['nDCG@10']:.4f}" for name, values in sets.items()),
        flush=True,
    )


def main() -> None:
    """Reads the options, trains and measures each cell, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the BEIR folders of all sets")
    parser.add_argument("--folder", required=True, help="folder of stores and models")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="t5-LAYERSxHIDDEN and minilm-LAYERS")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["none", "ft10", "ft100", "pt", "pt-ft10", "pt-ft100"],
        help="none, ft10, ft100: stage 2 on 10%% or 100%% of the queries; pt: stage 1; pt-ft10, pt-ft100: both; ptx in "
        "place of pt: with arXiv's pairs (default: %(default)s)",
    )
    parser.add_argument(
        "--sets", nargs="+", default=["squad", *ZERO_SHOT], help="sets to measure on (default: %(default)s)"
    )
    parser.add_argument("--pairs1", type=int, default=256_000, help="pairs of stage 1 (default: %(default)s)")
    parser.add_argument("--pairs2", type=int, default=64_000, help="pairs of stage 2 (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="pairs per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--projection", type=int, default=768, help="numbers of a T5's vector (default: %(default)s)")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="learning rate of a stage over trained weights (default: %(default)s)"
    )
    parser.add_argument(
        "--lr-random",
        type=float,
        default=1e-2,
        help="learning rate of a stage over random weights, as in T5's own pretraining (default: %(default)s)",
    )
    parser.add_argument("--queries", type=int, help="training queries that are 100%% (default: all)")
    parser.add_argument("--depth", type=int, default=50, help="hits of BM25 per query (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=2, help="pairs of each passage (default: %(default)s)")
    parser.add_argument(
        "--unit", default="sentence", choices=["sentence", "span"], help="what a pair consists of (default: sentence)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and shares (default: 0)")
    parser.add_argument("--cpus", type=int, default=2, help="threads of training (default: %(default)s)")
    parser.add_argument("--json", default="results/gtr_recipe.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    if unknown := [arm for arm in options.arms if arm != "none" and not (arm and _CELL.fullmatch(arm))]:
        parser.error(f"--arms {unknown[0]}: expected none, ft10, ft100, pt, ptx, or pt-ft10 and the like")
    file = Path(options.json)
    shown = {name: value for name, value in vars(options).items() if name not in ("models", "arms", "json")}
    document: dict[str, Any] = {"options": shown, "cpu": cpu_name(), "models": {}, "cells": {}}
    if file.exists():
        earlier = json.loads(file.read_text())
        if earlier["options"] != shown:
            parser.error(f"--json {file}: it has figures of other options; name another file, and another --folder")
        document = earlier
    import_all(options)
    if "bm25" not in document["cells"]:
        document["cells"]["bm25"] = {"sets": measure_bm25(options)}
        write_json(file, document)
    show("bm25", document["cells"]["bm25"]["sets"])
    for cell in cells(options.models, options.arms):
        if cell.name not in document["cells"]:
            started = time.perf_counter()
            folder = train_cell(cell, options)
            if cell.model not in document["models"]:
                document["models"][cell.model] = {
                    "parameters": count_parameters(folder),
                    "latency_ms": measure_latency(folder, options),
                }
            sets = measure(cell, folder, options)
            document["cells"][cell.name] = {"sets": sets, "seconds": time.perf_counter() - started}
            write_json(file, document)
        show(cell.name, document["cells"][cell.name]["sets"])


if __name__ == "__main__":
    main()
