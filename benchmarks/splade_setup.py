"""Prepares the training of `arms/splade.yaml` in a store S: pairs of texts from its corpus, and backbones with a head.

    python benchmarks/splade_setup.py --store S
    python benchmarks/experiment.py --arms benchmarks/arms/splade.yaml --store S

S-splade/pairs is a store with pairs that need no queries: the title of a passage finds its text, and a sentence of it
finds the other sentences. S-splade/small and S-splade/minilm are masked language models: the backbone of examples/ with
the head that it was trained with, and MiniLM, whose weights have no head, with a fresh one: the identity, then the word
embeddings, transposed. A constant is subtracted from the bias of every word, so that a passage of the corpus has about
--words non-zero words. The softmax of masked language modelling does not depend on it, and without it all words are
above zero: 7,000 of 8,192, and 30,500 of 30,522. An interrupted run resumes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.files import Judgement, write_data_set
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide import Store
from riptide.retriever.model.failures import without_loading_report
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.systems.sentences import split_sentences

BACKBONES = {"small": str(ROOT / "examples/backbone"), "minilm": MINILM}
LENGTH = 128  # tokens of a passage


def import_pairs(store: Store, folder: Path, seed: int) -> None:
    """Makes the store of pairs of each passage, unless it is complete: title and text; a sentence and the others."""
    corpus, random = store.corpus(), np.random.default_rng(seed)
    pairs: dict[str, tuple[str, str]] = {}
    for passage in corpus.passages(np.arange(corpus.num_rows)):
        if passage.title.strip() and passage.text.strip():
            pairs[f"title-{passage.row}"] = passage.title, passage.text
        sentences = split_sentences(passage.text, "en")
        if len(sentences) >= 3:
            number = int(random.integers(len(sentences)))
            rest = " ".join(sentences[:number] + sentences[number + 1 :])
            pairs[f"sentence-{passage.row}"] = sentences[number], rest
    source = folder / "raw" / "pairs"
    if not source.exists():
        passages = ({"_id": name, "title": "", "text": text} for name, (_, text) in pairs.items())
        queries = ({"_id": name, "text": query} for name, (query, _) in pairs.items())
        write_data_set(source, queries, {"train": [Judgement(name, name) for name in pairs]}, passages)
    Store(folder / "pairs").import_corpus(source)


def set_identity(model: Any) -> None:
    """Sets the layer of a BERT's head before the word embeddings to the identity; its GELU and norm stay."""
    transform = model.cls.predictions.transform
    with torch.no_grad():
        transform.dense.weight.copy_(torch.eye(len(transform.dense.weight)))
        transform.dense.bias.zero_()


def largest_logits(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Returns the largest logit of each word over the tokens of each text, float32 [texts, vocabulary]."""
    rows = []
    for first in range(0, len(texts), 8):
        batch = tokenizer(
            texts[first : first + 8], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
        rows.append(logits.masked_fill(mask[..., None] == 0, -torch.inf).amax(1))
    return torch.cat(rows)


def save_backbone(name: str, folder: Path, store: Store, words: int) -> None:
    """Saves a backbone with a head for which passages of a store have a number of non-zero words on average."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    if (folder / "model.safetensors").exists():
        return
    source = find_model_folder(BACKBONES[name])
    with without_loading_report():  # MiniLM has no head
        model = AutoModelForMaskedLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    if name == "minilm":
        set_identity(model)
    corpus = store.corpus()
    rows = np.random.default_rng(0).choice(corpus.num_rows, min(100, corpus.num_rows), replace=False)
    texts = [f"{passage.title} {passage.text}".strip() for passage in corpus.passages(rows)]
    logits = largest_logits(model, tokenizer, texts).flatten()
    threshold = float(logits.topk(min(len(logits), words * len(texts))).values[-1])
    with torch.no_grad():
        model.cls.predictions.bias -= threshold
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(folder)
    print(f"{folder}: subtracted {threshold:.2f} from the bias: {words:,} non-zero words of a passage", flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--store", None, "folder of a store with a corpus", required=True)
    parser.add("--words", 500, "non-zero words of a passage before training")
    parser.add("--seed", 0, "seed of the choice of sentences")
    options = parser.parse_args()
    folder = Path(f"{options.store.rstrip('/')}-splade")
    store = Store(options.store)
    import_pairs(store, folder, options.seed)
    for name in BACKBONES:
        save_backbone(name, folder / name, store, options.words)


if __name__ == "__main__":
    main()
