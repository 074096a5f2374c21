"""Correctness in bf16 and timings on a GPU, each against its peer there; without one, a toy run on the CPU.

    python benchmarks/gpu.py --json results/gpu.json

One call takes less than ten minutes. Peers: sentence-transformers for the encoder, plain torch for exact search.
Weights are random (no download), of BERT-base's shape on a GPU and a tiny one without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from indexing.exact import exact_search
from retriever.encoder import Encoder, EncoderOptions

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense FLOP/s, from the makers' data sheets
PAIRS = 5


def save_model(folder: Path, large: bool) -> None:
    """A randomly initialised BERT with a word-piece vocabulary, in transformers' layout."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(5_000))]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(folder)
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    shape = {} if large else tiny
    BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)


def passages(count: int) -> list[str]:
    """Seeded texts of 20 to 300 words."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 300, count)
    return [" ".join(f"w{n}" for n in random.integers(0, 5_000, length)) for length in lengths]


def pairs(ours: Callable[[], object], peer: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each and the median ratio (peer / ours), alternating, after one call of each."""
    seconds: list[tuple[float, float]] = []
    for number in range(PAIRS + 1):
        row = []
        for function in (ours, peer):
            started = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            row.append(time.perf_counter() - started)
        if number:
            seconds.append((row[0], row[1]))
    ours_s, peer_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {"ours_s": ours_s, "peer_s": peer_s, "ratio": statistics.median(p / o for o, p in seconds)}


def encoder_figures(device: str, count: int) -> dict[str, object]:
    """bf16 against float32 vectors, and the time against sentence-transformers in bf16."""
    from sentence_transformers import SentenceTransformer

    texts = passages(count)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), large=device == "cuda")
        ours = Encoder(folder, EncoderOptions(pooling="mean", normalize=True, dtype="bfloat16"), device=device)
        precise = Encoder(
            folder, EncoderOptions(pooling="mean", normalize=True, dtype="float32", compile="never"), device=device
        )
        sample = texts[:256]
        cosine = (ours.encode(sample, side="passage") * precise.encode(sample, side="passage")).sum(axis=1)
        peer = SentenceTransformer(folder, device=device, model_kwargs={"dtype": torch.bfloat16})
        found: dict[str, object] = dict(
            pairs(
                lambda: ours.encode(texts, side="passage"),
                lambda: peer.encode(texts, batch_size=32 if device == "cpu" else 256, normalize_embeddings=True),
            )
        )
        tokens = int(ours.tokenize(texts, side="passage").lengths.sum())
        parameters = sum(p.numel() for p in precise._eager.parameters()) - 5_005 * ours.dim
    flops = 2.0 * parameters * tokens
    rate = tokens / float(found["ours_s"])  # type: ignore[arg-type]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    peak = next((value for key, value in PEAK_BF16.items() if key in name), None)
    share = flops / float(found["ours_s"]) / peak if peak else None  # type: ignore[arg-type]
    found |= {"tokens": tokens, "tokens_per_s": rate, "share_of_peak": share}
    return found | {"lowest_cosine_to_float32": float(cosine.min())}


def search_figures(device: str, count: int, queries: int, dim: int = 768) -> dict[str, object]:
    """Exact top 200 against a plain torch product and topk in blocks, float16 vectors from the host for both."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((count, dim), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    stored = vectors.astype(np.float16)
    asked = vectors[random.integers(0, count, queries)] + 0.02 * random.standard_normal((queries, dim), np.float32)
    block = 100_000

    def peer() -> np.ndarray:
        right = torch.from_numpy(asked).to(device)
        best_scores, best_rows = [], []
        for start in range(0, count, block):
            left = torch.from_numpy(stored[start : start + block]).to(device).float()
            scores, rows = (right @ left.T).topk(min(200, len(left)), dim=1)
            best_scores.append(scores)
            best_rows.append(rows + start)
        order = torch.cat(best_scores, 1).topk(200, dim=1).indices
        return torch.cat(best_rows, 1).gather(1, order).cpu().numpy()

    def ours() -> np.ndarray:
        return exact_search(asked, [(0, stored)], 200, device=device).rows

    found = pairs(ours, peer)
    recall = np.mean([len(np.intersect1d(a, b)) / 200 for a, b in zip(ours(), peer(), strict=True)])
    return {**found, "vectors": count, "queries": queries, "agreement_with_peer": float(recall)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="results/gpu.json")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    figures = {
        "device": torch.cuda.get_device_name() if gpu else "cpu, toy size",
        "encoder": encoder_figures(device, 20_000 if gpu else 300),
        "exact_search": search_figures(device, 4_000_000 if gpu else 20_000, 4_096 if gpu else 128),
    }
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
