"""Correctness in bf16 and timings on a GPU, each against its peer there; without one, a toy run on the CPU.

    python benchmarks/gpu.py --json results/gpu.json

One call takes less than ten minutes. Peers: sentence-transformers for the encoder and its trainer, plain torch for
exact search, a call for each task for mixed batches. Weights are random (no download), of BERT-base's and
RoBERTa-base's shape on a GPU and tiny ones without; RIP and prompts on SQuAD take all-MiniLM-L6-v2 where that is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from indexing.exact import exact_search
from retriever.dual import DevSet, DualSystem, TuneOptions
from retriever.encoder import Encoder, EncoderOptions
from retriever.errors import InputError
from retriever.files import resolve
from retriever.numerics import choose_dtype
from retriever.prompts import TaskPrompt, backbone_of
from retriever.reranker_data import TrainingData
from retriever.rip import RipData, RipOptions, RipSystem, eligible
from retriever.system import System
from retriever.training import LoopOptions, Trainer

ROOT = Path(__file__).resolve().parents[1]
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense FLOP/s, from the makers' data sheets
PAIRS = 5


def save_model(folder: Path, large: bool) -> Path:
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
    return folder


def peak(device: str) -> float | None:
    """The chip's dense bfloat16 rate in FLOP/s, where it is known."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return next((value for key, value in PEAK_BF16.items() if key in name), None)


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
        parameters = sum(p.numel() for p in peer.parameters()) - 5_005 * ours.dim
    flops = 2.0 * parameters * tokens
    rate = tokens / float(found["ours_s"])  # type: ignore[arg-type]
    most = peak(device)
    share = flops / float(found["ours_s"]) / most if most else None  # type: ignore[arg-type]
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


def task_figures(device: str, tasks: int, queries: int) -> dict[str, object]:
    """Queries of many tasks in one call: seconds against one task's, and against a call for each; equality in bf16."""
    random = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in random.integers(0, 5_000, random.integers(4, 16))) for _ in range(queries)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), large=device == "cuda")
        options = EncoderOptions(pooling="mean", normalize=True, dtype="bfloat16")
        encoder = Encoder(folder, options, device=device, tasks={})
        shape = encoder._shape
        assert shape is not None
        torch.manual_seed(0)
        for number in range(tasks):
            matrix = 0.3 * torch.randn(shape.layers, 2, shape.heads, 32, shape.head_dim)
            prompt = TaskPrompt(backbone_of(encoder.config), options, matrix, None)
            encoder.put_task(f"t{number}", prompt)
        found: dict[str, object] = {"tasks": tasks, "queries": queries}
        for many in (10, 100, 1_000):
            if many > tasks:
                continue
            names = [f"t{n}" for n in random.integers(0, many, queries)]
            by_task = {name: np.flatnonzero([other == name for other in names]) for name in set(names)}

            def alone(names: list[str] = names, by_task: dict[str, np.ndarray] = by_task) -> np.ndarray:
                vectors = np.empty((len(names), encoder.dim), np.float32)
                for name, rows in by_task.items():
                    vectors[rows] = encoder.encode([texts[row] for row in rows], task=name)
                return vectors

            def mixed(names: list[str] = names) -> np.ndarray:
                return encoder.encode(texts, task=names)

            one = pairs(mixed, lambda: encoder.encode(texts, task="t0"))
            each = pairs(mixed, alone)
            found[f"{many} tasks"] = {
                "mixed_s": one["ours_s"], "share_of_one_task's_throughput": one["ratio"],
                "a_call_for_each / mixed": each["ratio"],
                "largest_difference": float(np.abs(mixed() - alone()).max()),
            }  # fmt: skip
    return found


def training_figures(gpu: bool) -> dict[str, object]:
    """benchmarks/training.py's: prompts against fine-tuning against sentence-transformers' trainer."""
    sizes = (
        ["--steps", "12", "--pairs", "1"]
        if gpu
        else ["--layers", "2", "--hidden", "64", "--steps", "3", "--pairs", "1"]
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "training.json")
        command = [sys.executable, str(ROOT / "benchmarks/training.py"), *sizes, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(file.read_text()))


def trained(
    system: System, steps: int, lr: float, device: str, dtype: torch.dtype, products: float
) -> dict[str, object]:
    """Steps of a system: loss of the first and last, tokens/s after the first two, share of the chip's peak.

    products: how many matrix products there are of each of the backbone's weights and each token, on the way and back.
    """
    trainer = Trainer(system, LoopOptions(steps=steps, lr=lr), device=torch.device(device), dtype=dtype)
    system.module.train()
    losses, seconds, tokens = [], [], []
    for number in range(steps):
        counted = sum(chunk.tokens for chunk in system.batch(number, 0, 1).chunks)
        started = time.perf_counter()
        losses.append(trainer.step(number))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tokens.append(counted)
    system.module.eval()
    rate = sum(tokens[2:]) / sum(seconds[2:])
    weights = sum(p.numel() for name, p in system.module.named_parameters() if "encoder" in name)
    most = peak(device)
    return {
        "loss": [losses[0], losses[-1]], "tokens_per_s": rate, "padding_included": True,
        "share_of_peak": 2 * products * weights * rate / most if most else None,
    }  # fmt: skip


def squad() -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    """The sample in examples/squad: passages, questions, and each split's question -> passage."""
    folder = ROOT / "examples/squad"

    def texts(name: str) -> dict[str, str]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
            return {row["_id"]: row["text"] for row in map(json.loads, lines)}

    splits = {
        split: dict(line.split("\t")[:2] for line in (folder / f"qrels/{split}.tsv").read_text().splitlines()[1:])
        for split in ("train", "test")
    }
    return texts("corpus.jsonl.gz"), texts("queries.jsonl.gz"), splits


def squad_figures(device: str, batch: int, steps: int) -> dict[str, object]:
    """RIP and prompt tuning on SQuAD's sample: rates, losses, and test MRR@10 among its passages before and after."""
    corpus, questions, splits = squad()
    place = {name: row for row, name in enumerate(corpus)}
    texts = list(corpus.values())
    dtype = choose_dtype("auto", torch.device(device))
    with tempfile.TemporaryDirectory() as random:
        try:
            folder, name = resolve("sentence-transformers/all-MiniLM-L6-v2"), "all-MiniLM-L6-v2"
        except InputError:
            folder, name = save_model(Path(random), large=device == "cuda"), "random weights"
        rip = RipOptions(steps=steps, batch=batch, max_length=64, pooling="mean")
        able = np.flatnonzero(eligible(texts, rip))
        data = RipData(len(texts), lambda rows: [texts[row] for row in rows], able)
        pretraining = RipSystem(folder, rip, data, device=torch.device(device), dtype=dtype)
        found: dict[str, object] = {"backbone": name, "batch": batch, "steps": steps}
        found["rip"] = trained(pretraining, steps, 1e-4, device, dtype, 3)
        del pretraining
        asked = list(splits["train"])
        training = TrainingData(
            [questions[query] for query in asked],
            [np.array([place[splits["train"][query]]]) for query in asked],
            [np.array([], np.int64)] * len(asked),
            len(texts),
            lambda rows: ([""] * len(rows), [texts[row] for row in rows]),
        )
        judged = list(splits["test"])[: 2_000 if device == "cuda" else 100]
        dev = DevSet(
            [questions[query] for query in judged],
            [np.array([place[splits["test"][query]]]) for query in judged],
            texts,
        )
        options = TuneOptions(length=32, batch=batch, negatives_per_query=0)
        encoder = EncoderOptions(pooling="mean", normalize=True, query_length=32, passage_length=128)
        tuning = DualSystem(folder, encoder, options, training, device=torch.device(device), dtype=dtype)
        before = dev.mrr(tuning)
        figures = trained(tuning, steps, 1e-2, device, dtype, 2)
        found["prompt tuning"] = {**figures, "mrr@10": [before, dev.mrr(tuning)]}
    return found


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
        "mixed_tasks": task_figures(device, 1_000 if gpu else 10, 20_000 if gpu else 64),
        "training": training_figures(gpu),
        "squad": squad_figures(device, 256 if gpu else 8, 100 if gpu else 4),
    }
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
