"""Makes a small BERT that has seen no query and no pair: masked words on passages alone, for experiments on quality.

    python benchmarks/small_backbone.py --general ../shared/data/{squad,arxiv}/corpus.jsonl.gz --folder W --out B

A published model has often been trained on the queries of public data (all-MiniLM-L6-v2 has seen those of SQuAD), so
differences between training methods say little. This one starts from random weights. It is written as float16, 3.6 MB
with its tokenizer, which `encode_corpus` and all training jobs open. An interrupted run resumes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import read_documents, write_documents
from benchmarks.common.program import Parser

VOCABULARY = 8_192  # word pieces, lower case


def merge(files: list[str], folder: Path) -> Path:
    """Writes the passages of all files as one BEIR corpus, whose ids are file and line; returns its folder."""
    target = folder / "general"
    documents = (
        {"_id": f"{number}-{place}", "text": document["text"]}
        for number, file in enumerate(files)
        for place, document in enumerate(read_documents(Path(file)))
    )
    write_documents(target / "corpus.jsonl", documents)
    return target


def save_random(folder: Path, corpus: Path, layers: int, hidden: int) -> Path:
    """Saves a BERT with random weights and without dropout, and a tokenizer that is trained on the corpus."""
    from tokenizers import BertWordPieceTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    if not (folder / "config.json").exists():
        with open(corpus / "corpus.jsonl", encoding="utf-8") as lines:
            pieces = BertWordPieceTokenizer()
            pieces.train_from_iterator((json.loads(line)["text"] for line in lines), vocab_size=VOCABULARY)
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


def pretrain(
    store: str, backbone: str, name: str, objective: str, steps: int, batch: int, length: int, lr: float, cpus: int
) -> str:
    """Returns the folder of a model, which is trained unless it is there."""
    from jobs import pretrain_rip
    from jobs.common.options import build_options
    from jobs.training.options import PretrainRip

    from indexing.store.models import resolve_model
    from indexing.store.store import Store

    pretrain_rip.main(
        build_options(
            PretrainRip,
            {
                "store": store,
                "backbone": backbone,
                "name": name,
                "objective": objective,
                "steps": steps,
                "batch": batch,
                "max_length": length,
                "lr": lr,
                "pooling": "mean",
                "checkpoint_every": 500,
                "cpus": cpus,
            },
        )
    )
    return resolve_model(Store(store), f"models/{name}")


def make(
    general: list[str], folder: Path, *, layers: int, hidden: int, steps: int, batch: int, lr: float, cpus: int
) -> str:
    """Returns the folder of a model that is trained on masked words of the passages, unless it is there."""
    from jobs import import_corpus

    from indexing.store.store import Store

    store = str(folder / "store")
    if not Store(store).names("corpus"):
        import_corpus.main(import_corpus.ImportCorpus(store=store, source=str(merge(general, folder))))
    start = save_random(folder / "random", folder / "general", layers, hidden)
    return pretrain(store, str(start), "small", "mlm", steps, batch, 128, lr, cpus)


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
    parser.add("--folder", None, "where it is trained", required=True)
    parser.add("--out", None, "the folder of the model in float16", required=True)
    parser.add("--layers", 3, "layers of the backbone")
    parser.add("--hidden", 128, "hidden size of the backbone")
    parser.add("--steps", 6_000, "steps of training")
    parser.add("--batch", 32, "passages per step")
    parser.add("--lr", 1e-3, "peak learning rate")
    parser.add("--cpus", 2, "threads of training")
    options = parser.parse_args()
    model = make(
        options.general,
        Path(options.folder),
        layers=options.layers,
        hidden=options.hidden,
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        cpus=options.cpus,
    )
    save_half(model, Path(options.out))


if __name__ == "__main__":
    main()
