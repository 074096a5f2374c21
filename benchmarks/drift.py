"""Measures how similar vectors are that one encoder gives in other circumstances, and those of an encoder that moved.

    python benchmarks/drift.py --json results/drift.json

The stored vectors are float16, encoded in one call. Sets of 8 passages are encoded again, as a job or a server does:
with the same dtype, with others, and by models with one change each. A set's similarity is that of its worst passage.
The seconds are the CPU time of encoding one set.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.files import read_documents, write_json
from benchmarks.common.program import ROOT, Parser
from riptide.indexing.embeddings.drift import CANARIES, EXPECTED_SIMILARITY, MIN_SIMILARITY, min_similarity
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.options import EncoderOptions

Change = Callable[[Path], None]


def set_config(**values: Any) -> Change:
    """Returns a change of a model's configuration."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")

    return change


def keep_case(folder: Path) -> None:
    """Makes the tokenizer keep upper case, as if a library ignored this setting."""
    tokenizer, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    for file, name in ((tokenizer, "lowercase"), (settings, "do_lower_case")):
        text = file.read_text(encoding="utf-8")
        changed = re.sub(rf'"{name}"\s*:\s*true', f'"{name}": false', text)
        assert changed != text, file
        file.write_text(changed, encoding="utf-8")


def add_noise(share: float) -> Change:
    """Returns a change that adds noise to every weight matrix: a share of its standard deviation."""

    def change(folder: Path) -> None:
        generator, file = torch.Generator().manual_seed(0), folder / "model.safetensors"
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.is_floating_point() and weight.dim() == 2:
                weights[name] = weight + share * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, file, {"format": "pt"})

    return change


CHANGES: dict[str, tuple[Change | None, dict[str, Any]]] = {
    "GELU by tanh": (set_config(hidden_act="gelu_new"), {}),
    "layer_norm_eps 1e-5 instead of 1e-12": (set_config(layer_norm_eps=1e-5), {}),
    "weights with 1% noise": (add_noise(0.01), {}),
    "weights with 5% noise": (add_noise(0.05), {}),
    "weights with 10% noise": (add_noise(0.1), {}),
    "weights with 20% noise": (add_noise(0.2), {}),
    "tokenizer keeps upper case": (keep_case, {}),
    "prefix `passage: `": (None, {"passage_prefix": "passage: "}),
    "without titles": (None, {"title": "none"}),
    "at most 128 tokens": (None, {"passage_length": 128}),
    "ReLU instead of GELU": (set_config(hidden_act="relu"), {}),
    "pooling cls": (None, {"pooling": "cls"}),
}


def compare(stored: np.ndarray, encode: Callable[[slice], np.ndarray]) -> dict[str, float]:
    """Encodes passages again in sets; returns the smallest similarity, its median over the sets, and shares of sets."""
    sets = [slice(start, start + CANARIES) for start in range(0, len(stored), CANARIES)]
    smallest = [min_similarity(stored[some].astype(np.float64), encode(some).astype(np.float64)) for some in sets]
    return {
        "smallest": min(smallest),
        "median_of_sets": statistics.median(smallest),
        "refused": statistics.mean(each < MIN_SIMILARITY for each in smallest),
        "refused_or_warned": statistics.mean(each < EXPECTED_SIMILARITY for each in smallest),
    }


def encoding(encoder: Encoder, passages: list[dict[str, Any]]) -> Callable[[slice], np.ndarray]:
    """Returns a function that encodes a slice of the passages."""
    texts = encoder.compose([each["title"] for each in passages], [each["text"] for each in passages])
    return lambda some: encoder.encode(texts[some], side="passage")


def main() -> None:
    """Reads the options, compares, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", ROOT / "examples/squad/corpus.jsonl.gz", "BEIR corpus")
    parser.add("--model", "all-MiniLM-L6-v2", "encoder of the BERT family")
    parser.add("--count", 512, "number of passages, spread over the corpus")
    parser.add("--threads", 1, "CPU threads")
    parser.add("--json", "results/drift.json", "output file")
    options = parser.parse_args()
    documents = list(read_documents(options.data))
    passages = documents[:: len(documents) // options.count][: options.count]
    base = EncoderOptions(dtype="float32", compile="never")
    figures: dict[str, dict[str, float]] = {}
    stored: dict[str, np.ndarray] = {}
    encoders: dict[str, Callable[[slice], np.ndarray]] = {}
    for dtype in ("float32", "bfloat16", "int8"):
        encoder = Encoder(options.model, replace(base, dtype=dtype), threads=options.threads)
        encoders[f"riptide, {dtype}"] = encode = encoding(encoder, passages)
        stored[dtype] = encode(slice(None)).astype(np.float16)
        seconds = []
        for start in range(0, options.count, CANARIES):
            started = time.process_time()
            encode(slice(start, start + CANARIES))
            seconds.append(time.process_time() - started)
        print(f"{encoder.numerics}: {statistics.median(seconds):.3f} s of CPU time for {CANARIES} passages", flush=True)
        figures[f"seconds, {dtype}"] = {"median": statistics.median(seconds), "most": max(seconds)}
    from sentence_transformers import SentenceTransformer

    texts = [f"{each['title']} {each['text']}" if each["title"] else each["text"] for each in passages]
    torch.set_num_threads(options.threads)
    for dtype in ("float32", "bfloat16"):
        peer = SentenceTransformer(str(find_model_folder(options.model)), device="cpu").to(getattr(torch, dtype))
        encoders[f"sentence-transformers, {dtype}"] = lambda some, peer=peer: (  # type: ignore[misc]
            peer.encode(texts[some], convert_to_tensor=True).float().numpy()
        )
    for of, vectors in stored.items():
        for name, encode in encoders.items():
            if of == "float32" or name in (f"riptide, {of}", "riptide, float32"):
                figures[f"{of} stored, {name} again"] = compare(vectors, encode)
                print(of, name, figures[f"{of} stored, {name} again"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (change, settings) in CHANGES.items():
            copy = Path(shutil.copytree(find_model_folder(options.model), Path(folder) / "model", dirs_exist_ok=True))
            if change is not None:
                change(copy)
            encode = encoding(Encoder(str(copy), replace(base, **settings), threads=options.threads), passages)
            figures[name] = compare(stored["float32"], encode)
            print(name, figures[name], flush=True)
    write_json(options.json, {"options": vars(options), "figures": figures})


if __name__ == "__main__":
    main()
