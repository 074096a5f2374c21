"""Makes a small BERT that has seen no query and no pair: masked words on passages alone, for experiments on quality.

    python benchmarks/small_backbone.py --general ../shared/data/{squad,arxiv}/corpus.jsonl.gz --folder W --out B

A published model has often been trained on the queries of public data (all-MiniLM-L6-v2 has seen those of SQuAD), so
differences between training methods say little. This one starts from random weights. It is written as float16, 3.6 MB
with its tokenizer, which `encode_corpus` and all training jobs open. An interrupted run resumes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.common.files import read_documents, write_documents
from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.store.model_artifacts import resolve_model

VOCABULARY = 8_192  # word pieces, lower case


def save_random(folder: Path, corpus: Path, layers: int, hidden: int) -> Path:
    """Saves a BERT with random weights and without dropout, and a tokenizer that is trained on the corpus."""
    from tokenizers import BertWordPieceTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    if not (folder / "config.json").exists():
        pieces = BertWordPieceTokenizer()
        texts = (document["text"] for document in read_documents(corpus))
        pieces.train_from_iterator(texts, vocab_size=VOCABULARY)
        ends = [(name, pieces.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
        pieces.post_processor = BertProcessing(*ends)
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        pieces.save(str(folder.with_suffix(".json")))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder.with_suffix(".json")), model_max_length=256, **special
        )
        torch.manual_seed(0)
        shape = BertConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
            max_position_embeddings=256,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertForMaskedLM(shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def save_half(model: str, out: Path) -> None:
    """Writes a model's folder with its weights in float16."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    with safe_open(Path(model) / "model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name).to(torch.float16) for name in weights.keys()}  # noqa: SIM118
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--general", None, "BEIR corpus.jsonl.gz files", required=True, nargs="+")
    parser.add("--folder", None, "where it is trained", type=Path, required=True)
    parser.add("--out", None, "the folder of the model in float16", type=Path, required=True)
    parser.add("--layers", 3, "layers of the backbone")
    parser.add("--hidden", 128, "hidden size of the backbone")
    parser.add("--steps", 6_000, "steps of training")
    parser.add("--batch", 32, "passages per step")
    parser.add("--lr", 1e-3, "peak learning rate")
    parser.add("--cpus", 2, "threads of training")
    options = parser.parse_args()
    corpus = options.folder / "general" / "corpus.jsonl"
    store = Store(options.folder / "store")
    if not store.names("corpus"):
        documents = (
            {"_id": f"{number}-{place}", "text": document["text"]}
            for number, file in enumerate(options.general)
            for place, document in enumerate(read_documents(Path(file)))
        )
        write_documents(corpus, documents)
        store.import_corpus(corpus.parent)
    random = save_random(options.folder / "random", corpus, options.layers, options.hidden)
    training = {"steps": options.steps, "batch": options.batch, "lr": options.lr, "cpus": options.cpus}
    masking = {"objective": "mlm", "max_length": 128, "pooling": "mean", "checkpoint_every": 500}
    trained = store.pretrain_rip(str(random), name="small", **masking, **training)
    save_half(resolve_model(store, trained.key), options.out)


if __name__ == "__main__":
    main()
