"""Prepares the experiments arms/gtr-*.yaml: models before training, pairs of sentences, and shares of SQuAD's queries.

    python benchmarks/gtr_setup.py --data ../shared/data --folder S --queries 16000 --models t5-2x128

S/models/t5-LAYERSxHIDDEN is a T5 encoder with random weights; S/models/minilm-LAYERS has the first layers of MiniLM.
S/raw/passages has two sentences of each passage of SQuAD, of which one is a query; S/raw/squad-100 and squad-10 are all
and a tenth of --queries training queries. Prints the parameters of each model and the median time of one text of 64
tokens.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.files import Judgement, judgements_of, read_documents, read_qrels, write_data_set
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from riptide.retriever.systems.rip import RipOptions, are_eligible, draw_pair

VOCABULARY = 8_192  # pieces of the Unigram tokenizer
LENGTH = 64  # tokens of a text
TOKENIZER_SETS = ("reuters", "medquad", "squad")
DRAWS = 2  # pairs of each passage
SHARES = (10, 100)  # percent of the training queries


def write_passage_pairs(corpus: Path, folder: Path) -> None:
    """Writes pairs of sentences of each passage of a corpus.jsonl.gz as a BEIR folder, unless it is written."""
    if folder.exists():
        return
    rip = RipOptions(steps=1, unit="sentence", max_length=LENGTH, seed=0, pooling="mean")
    texts = [document["text"] for document in read_documents(corpus)]
    rows = np.flatnonzero(are_eligible(texts, rip))
    pairs = {f"{row}-{draw}": draw_pair(texts[row], rip, draw, int(row)) for draw in range(DRAWS) for row in rows}
    passages = ({"_id": f"p{name}", "title": "", "text": pair[1]} for name, pair in pairs.items())
    queries = ({"_id": f"q{name}", "text": pair[0]} for name, pair in pairs.items())
    write_data_set(folder, queries, {"train": [Judgement(f"q{name}", f"p{name}") for name in pairs]}, passages)


def write_share(data: Path, folder: Path, percentage: int, count: int) -> None:
    """Writes a share of `count` training queries as a BEIR query set. A smaller share is part of a larger one."""
    if folder.exists():
        return
    judgements = read_qrels(data / "qrels" / "train.tsv")
    queries = sorted({judgement.query for judgement in judgements})
    order = np.random.default_rng(0).permutation(len(queries))[:count]
    ids = {queries[place] for place in order[: max(1, len(order) * percentage // 100)]}
    of_share = [Judgement(judgement.query, judgement.passage) for judgement in judgements_of(ids, judgements)]
    write_data_set(folder, read_documents(data / "queries.jsonl.gz", ids), {"train": of_share})


def save_tokenizer(folder: Path, files: list[Path]) -> None:
    """Trains a Unigram tokenizer with T5's special tokens, which ends each text with </s>, unless it is saved."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer_config.json").exists():
        return
    texts = (document["text"] for file in files for document in read_documents(file))
    pieces = Tokenizer(models.Unigram())
    pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    pieces.train_from_iterator(texts, trainer)
    ends = [("</s>", pieces.token_to_id("</s>"))]
    pieces.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=LENGTH
    ).save_pretrained(folder)


def save_random_t5(folder: Path, tokenizer: Path, layers: int, hidden: int) -> None:
    """Saves a T5 encoder with random weights and without dropout, with a copy of the tokenizer."""
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

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
    torch.manual_seed(0)
    pieces.save_pretrained(folder)
    T5EncoderModel(shape).save_pretrained(folder)


def save_cut_minilm(folder: Path, layers: int) -> None:
    """Saves the first layers of MiniLM as a model with its pooling and scaling."""
    from riptide.retriever.encoding.backbones import load_backbone
    from riptide.retriever.encoding.saving import save_encoder
    from riptide.retriever.model.model_folder import find_model_folder
    from riptide.retriever.model.recipe import read_recipe
    from riptide.retriever.options import EncoderOptions

    recipe = read_recipe(find_model_folder(MINILM), EncoderOptions())
    save_encoder(folder, recipe, load_backbone(recipe, torch.float32, num_hidden_layers=layers))


def describe(folder: Path) -> dict[str, float]:
    """Returns the number of parameters of a model, and the median time of one text of LENGTH tokens."""
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.model.model_folder import weight_files
    from riptide.retriever.model.weights import tensor_shapes
    from riptide.retriever.options import EncoderOptions

    shapes = (shape for file in weight_files(folder) for shape in tensor_shapes(file).values())
    options = EncoderOptions(query_length=LENGTH, passage_length=LENGTH, pooling="mean", compile="never")
    encoder = Encoder(str(folder), options)
    tokens = encoder.tokenize([" ".join(["word"] * 2 * LENGTH)], side="query")
    times = []
    for _ in range(60):
        started = time.perf_counter()
        encoder.forward(tokens)
        times.append(time.perf_counter() - started)
    return {"parameters": sum(map(math.prod, shapes)), "latency_ms": 1000 * statistics.median(times[10:])}


def main() -> None:
    """Reads the options and writes what is missing."""
    parser = Parser(__doc__)
    parser.add("--data", None, "folder with the BEIR folders of all sets", type=Path, required=True)
    parser.add("--folder", None, "folder of stores and models", type=Path, required=True)
    parser.add("--models", None, "t5-LAYERSxHIDDEN and minilm-LAYERS", required=True, nargs="+")
    parser.add("--queries", None, "training queries of squad-100", type=int, required=True)
    options = parser.parse_args()
    raw, models = options.folder / "raw", options.folder / "models"
    write_passage_pairs(options.data / "squad" / "corpus.jsonl.gz", raw / "passages")
    for share in SHARES:
        write_share(options.data / "squad", raw / f"squad-{share}", share, options.queries)
    for name in options.models:
        kind, _, shape = name.partition("-")
        if not (models / name / "model.safetensors").exists():
            if kind == "minilm":
                save_cut_minilm(models / name, int(shape))
            else:
                save_tokenizer(
                    models / "tokenizer", [options.data / each / "corpus.jsonl.gz" for each in TOKENIZER_SETS]
                )
                save_random_t5(models / name, models / "tokenizer", *map(int, shape.split("x")))
        print(json.dumps({"model": name} | describe(models / name)), flush=True)


if __name__ == "__main__":
    main()
