"""Measures correctness in bfloat16 and speed on a GPU, each against a peer; without a GPU, toy sizes on the CPU.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --out results/gpu.json
    python benchmarks/gpu.py --out results/gpu.json --only exact-search rip --again

Needs torch, transformers, numpy, safetensors and sentence-transformers, and no network. Each measurement is a separate
process with a time limit. The output file is written after each measurement; a failure is recorded in one line, and the
other measurements still run. The same command resumes with the measurements that are missing, were skipped or have
failed. The exit status is 1 if a measurement failed.

Peers: sentence-transformers for the encoder and for training, plain torch for exact search, one call per task for mixed
batches. Weights are random (no download), with the shape of BERT-base and RoBERTa-base on a GPU and tiny shapes without
one; rip and prompt-tuning use all-MiniLM-L6-v2 if it is in the local cache of Hugging Face.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense FLOP/s, from the manufacturer's data sheets
ROUNDS = 5  # rounds of a comparison, after one that is not counted
LIMIT_S = 480.0  # default time limit of a measurement
MEASURING = 0.75  # fraction of the limit after which no round and no step starts
PACKAGES = ("torch", "transformers", "sentence-transformers", "numpy")


@dataclass(frozen=True)
class Setting:
    """The device and the time limit of a measurement.

    Attributes:
        device: "cuda" or "cpu"; on the CPU, sizes are toy sizes.
        deadline: Value of time.monotonic() after which no round and no step starts.
    """

    device: str
    deadline: float

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


class SkippedError(Exception):
    """The measurement needs a package that is not installed."""


@dataclass(frozen=True)
class Measurement:
    """A measurement, and one line that describes it."""

    about: str
    run: Callable[[Setting], dict[str, Any]]


def save_model(folder: Path, large: bool) -> Path:
    """Saves a randomly initialised BERT with a word-piece vocabulary, as transformers opens it; returns the folder."""
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
    """Returns the dense bfloat16 rate of the chip in FLOP/s; None if it is unknown."""
    return next((value for key, value in PEAK_BF16.items() if key in device_name(device)), None)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu, toy size"


def passages(count: int) -> list[str]:
    """Returns texts of 20 to 300 words, the same in every run."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 300, count)
    return [" ".join(f"w{n}" for n in random.integers(0, 5_000, length)) for length in lengths]


def compare(ours: Callable[[], object], peer: Callable[[], object], setting: Setting) -> dict[str, float]:
    """Returns the median seconds of both, the median ratio (peer / ours) and the number of rounds.

    The two alternate for ROUNDS rounds after one that is not counted; fewer, but at least one, if time is short.
    """
    seconds: list[tuple[float, float]] = []
    for number in range(ROUNDS + 1):
        if seconds and setting.left_s < sum(seconds[-1]):
            break
        row = []
        for function in (ours, peer):
            started = time.perf_counter()
            function()
            if setting.gpu:
                torch.cuda.synchronize()
            row.append(time.perf_counter() - started)
        if number:
            seconds.append((row[0], row[1]))
    ours_s, peer_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratio = statistics.median(p / o for o, p in seconds)
    return {"ours_s": ours_s, "peer_s": peer_s, "ratio": ratio, "rounds": len(seconds)}


def measure_vectors(setting: Setting) -> dict[str, Any]:
    """Compares bfloat16 with float32 vectors of the same texts."""
    from retriever.encoding.encoder import Encoder
    from retriever.options import EncoderOptions

    texts = passages(256)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), large=setting.gpu)
        shared = {"pooling": "mean", "normalize": True}
        half = Encoder(folder, EncoderOptions(**shared, dtype="bfloat16"), device=setting.device)
        options = EncoderOptions(**shared, dtype="float32", compile="never")
        precise = Encoder(folder, options, device=setting.device)
        cosine = (half.encode(texts, side="passage") * precise.encode(texts, side="passage")).sum(axis=1)
    return {"texts": len(texts), "lowest_cosine_to_float32": float(cosine.min()), "numerics": half.numerics}


def measure_encoder(setting: Setting) -> dict[str, Any]:
    """Compares the encoder with sentence-transformers, both in bfloat16."""
    from sentence_transformers import SentenceTransformer

    from retriever.encoding.encoder import Encoder
    from retriever.options import EncoderOptions

    texts = passages(20_000 if setting.gpu else 300)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), large=setting.gpu)
        options = EncoderOptions(pooling="mean", normalize=True, dtype="bfloat16")
        ours = Encoder(folder, options, device=setting.device)
        peer = SentenceTransformer(folder, device=setting.device, model_kwargs={"dtype": torch.bfloat16})
        batch = 256 if setting.gpu else 32
        comparison = compare(
            lambda: ours.encode(texts, side="passage"),
            lambda: peer.encode(texts, batch_size=batch, normalize_embeddings=True),
            setting,
        )
        tokens = int(ours.tokenize(texts, side="passage").lengths.sum())
        parameters = sum(p.numel() for p in peer.parameters()) - 5_005 * ours.dim
    most = peak(setting.device)
    share = 2.0 * parameters * tokens / comparison["ours_s"] / most if most else None
    return {**comparison, "tokens": tokens, "tokens_per_s": tokens / comparison["ours_s"], "share_of_peak": share}


def measure_search(setting: Setting, dim: int = 768) -> dict[str, Any]:
    """Compares exact search (top 200) with a matrix product and topk of plain torch, in blocks.

    Both read float16 vectors from host memory.
    """
    from indexing.exact import exact_search

    count, num_queries, block = (4_000_000, 4_096, 100_000) if setting.gpu else (20_000, 128, 100_000)
    random = np.random.default_rng(0)
    vectors = np.empty((count, dim), np.float16)
    for start in range(0, count, block):
        rows = random.standard_normal((min(block, count - start), dim), np.float32)
        vectors[start : start + block] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    noise = 0.02 * random.standard_normal((num_queries, dim), np.float32)
    queries = vectors[random.integers(0, count, num_queries)].astype(np.float32) + noise

    def peer() -> np.ndarray:
        device_queries = torch.from_numpy(queries).to(setting.device)
        best_scores, best_rows = [], []
        for start in range(0, count, block):
            device_vectors = torch.from_numpy(vectors[start : start + block]).to(setting.device).float()
            scores, rows = (device_queries @ device_vectors.T).topk(min(200, len(device_vectors)), dim=1)
            best_scores.append(scores)
            best_rows.append(rows + start)
        order = torch.cat(best_scores, 1).topk(200, dim=1).indices
        return torch.cat(best_rows, 1).gather(1, order).cpu().numpy()

    def ours() -> np.ndarray:
        return exact_search(queries, [(0, vectors)], 200, device=setting.device).rows

    agreement = np.mean([len(np.intersect1d(a, b)) / 200 for a, b in zip(ours(), peer(), strict=True)])
    comparison = compare(ours, peer, setting)
    return {**comparison, "vectors": count, "queries": num_queries, "agreement_with_peer": float(agreement)}


def measure_tasks(setting: Setting, tasks: int) -> dict[str, Any]:
    """Compares encoding queries of many tasks in one call with one task, and with a call per task.

    Also returns the largest difference between vectors of the mixed call and of a call per task, in bfloat16.
    """
    from retriever.encoding.encoder import Encoder
    from retriever.options import EncoderOptions
    from retriever.prompts.prompts import TaskPrompt, backbone_of

    random = np.random.default_rng(0)
    count = 20_000 if setting.gpu else 64
    texts = [" ".join(f"w{n}" for n in random.integers(0, 5_000, random.integers(4, 16))) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), large=setting.gpu)
        options = EncoderOptions(pooling="mean", normalize=True, dtype="bfloat16")
        encoder = Encoder(folder, options, device=setting.device, tasks={})
        shape = encoder._shape
        assert shape is not None
        torch.manual_seed(0)
        for number in range(tasks):
            matrix = 0.3 * torch.randn(shape.layers, 2, shape.heads, 32, shape.head_dim)
            encoder.put_task(f"t{number}", TaskPrompt(backbone_of(encoder.config), options, matrix, None))
        names = [f"t{n}" for n in random.integers(0, tasks, count)]
        by_task = {name: np.flatnonzero([other == name for other in names]) for name in set(names)}

        def one_call_per_task() -> np.ndarray:
            vectors = np.empty((count, encoder.dim), np.float32)
            for name, rows in by_task.items():
                vectors[rows] = encoder.encode([texts[row] for row in rows], task=name)
            return vectors

        def mixed() -> np.ndarray:
            return encoder.encode(texts, task=names)

        difference = float(np.abs(mixed() - one_call_per_task()).max())
        one_task = compare(mixed, lambda: encoder.encode(texts, task="t0"), setting)
        call_per_task = compare(mixed, one_call_per_task, setting)
    return {
        "tasks": tasks,
        "queries": count,
        "mixed_s": one_task["ours_s"],
        "share_of_one_task's_throughput": one_task["ratio"],
        "a_call_for_each / mixed": call_per_task["ratio"],
        "largest_difference": difference,
        "rounds": [one_task["rounds"], call_per_task["rounds"]],
    }


def measure_query_prompts(setting: Setting) -> dict[str, Any]:
    """Returns the figures of benchmarks/query_prompts.py: prompts that are computed from each query, beside fixed ones.

    Raises:
        RuntimeError: If the benchmark fails.
    """
    random = np.random.default_rng(0)
    toy = ["--tasks", "4", "--length", "3", "--lengths", "2", "5", "--rounds", "1"]
    count, sizes = (4_096, ["--batch", "256"]) if setting.gpu else (32, toy)
    with tempfile.TemporaryDirectory() as folder:
        model, file = save_model(Path(folder, "model"), large=setting.gpu), Path(folder, "query_prompts.json")
        with gzip.open(Path(folder, "queries.jsonl.gz"), "wt") as queries:
            for _ in range(count):
                words = [f"w{n}" for n in random.integers(0, 5_000, random.integers(4, 16))]
                queries.write(json.dumps({"text": " ".join(words)}) + "\n")
        command = [
            sys.executable,
            str(ROOT / "benchmarks/query_prompts.py"),
            "--model",
            str(model),
            "--questions",
            str(queries.name),
            "--count",
            str(count),
            *sizes,
            "--dtype",
            "bfloat16",
            "--device",
            setting.device,
            "--seconds",
            str(max(1.0, setting.left_s)),
            "--json",
            str(file),
        ]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            sys.stderr.write(result.stderr)
            raise RuntimeError(last_line(result.stderr) or f"query_prompts.py ended with {result.returncode}")
        document = dict(json.loads(file.read_text()))
    return {name: document[name] for name in ("numerics", "largest_difference", "traffic", "lengths")}


def measure_training(setting: Setting, runs: Sequence[str], needed: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the figures of benchmarks/training.py.

    Args:
        setting: Device and deadline.
        runs: The runs to measure, as its --runs.
        needed: Packages without which the measurement is skipped.

    Raises:
        SkippedError: If a needed package is missing.
        RuntimeError: If a run fails.
    """
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        raise SkippedError(f"{', '.join(missing)} not installed; the trainer of sentence-transformers needs it")
    sizes = ["--steps", "12"] if setting.gpu else ["--layers", "2", "--hidden", "64", "--steps", "3"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "training.json")
        command = [
            sys.executable,
            str(ROOT / "benchmarks/training.py"),
            *sizes,
            "--pairs",
            "1",
            "--json",
            str(file),
            "--runs",
            *runs,
        ]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            sys.stderr.write(result.stderr)
            raise RuntimeError(last_line(result.stderr) or f"benchmarks/training.py ended with {result.returncode}")
        return dict(json.loads(file.read_text()))


def train(system: Any, steps: int, lr: float, setting: Setting, dtype: torch.dtype, products: float) -> dict[str, Any]:
    """Trains a system and measures its speed after the first two steps.

    Args:
        system: A retriever.training.system.System.
        steps: Number of steps; fewer, but at least three, if time is short.
        lr: Learning rate.
        setting: Device and deadline.
        dtype: The dtype of the forward and backward pass.
        products: Matrix products per backbone weight and token, in the forward and backward pass together.

    Returns:
        Number of steps, first and last loss, tokens/s, and the fraction of the device's peak rate.
    """
    from retriever.options.loop import LoopOptions
    from retriever.training.loop import Trainer

    trainer = Trainer(system, LoopOptions(steps=steps, lr=lr), device=torch.device(setting.device), dtype=dtype)
    system.module.train()
    losses, seconds, tokens = [], [], []
    for number in range(steps):
        if number > 2 and setting.left_s < 0:
            break
        num_tokens = sum(chunk.tokens for chunk in system.batch(number, 0, 1).chunks)
        started = time.perf_counter()
        losses.append(trainer.step(number))
        if setting.gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        tokens.append(num_tokens)
    system.module.eval()
    rate = sum(tokens[2:]) / sum(seconds[2:])
    weights = sum(p.numel() for name, p in system.module.named_parameters() if "encoder" in name)
    most = peak(setting.device)
    return {
        "steps": len(losses),
        "loss": [losses[0], losses[-1]],
        "tokens_per_s": rate,
        "padding_included": True,
        "share_of_peak": 2 * products * weights * rate / most if most else None,
    }


def squad() -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    """Reads the sample in examples/squad.

    Returns:
        Texts of passages by id, texts of queries by id, and by split the relevant passage of each query.
    """
    folder = ROOT / "examples/squad"

    def texts(name: str) -> dict[str, str]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
            return {row["_id"]: row["text"] for row in map(json.loads, lines)}

    splits = {
        split: dict(line.split("\t")[:2] for line in (folder / f"qrels/{split}.tsv").read_text().splitlines()[1:])
        for split in ("train", "test")
    }
    return texts("corpus.jsonl.gz"), texts("queries.jsonl.gz"), splits


def find_backbone(random_weights: Path, setting: Setting) -> tuple[Path, str]:
    """Finds the backbone of rip and prompt-tuning.

    Args:
        random_weights: Folder for a model with random weights, which is used if all-MiniLM-L6-v2 is not in the cache.
        setting: Device and deadline.

    Returns:
        Folder and name of the backbone.
    """
    from retriever.errors import InputError
    from retriever.model.files import resolve

    try:
        return Path(resolve("sentence-transformers/all-MiniLM-L6-v2")), "all-MiniLM-L6-v2"
    except InputError:
        return save_model(random_weights, large=setting.gpu), "random weights"


def sizes(setting: Setting) -> tuple[int, int]:
    """Returns the batch size and the number of steps of rip and prompt-tuning."""
    return (256, 100) if setting.gpu else (8, 4)


def measure_rip(setting: Setting) -> dict[str, Any]:
    """Measures RIP on the SQuAD sample.

    Without the packages sentencex and regex, sentences are split at full stops; the figures say which was used.
    """
    from retriever.forward.numerics import choose_dtype
    from retriever.systems import rip

    splitter = "sentencex"
    if importlib.util.find_spec("sentencex") is None or importlib.util.find_spec("regex") is None:
        splitter = "full stops"
        rip.split_sentences = lambda text, _="en": [s.strip() for s in text.split(". ") if len(s.strip()) > 3]
    batch, steps = sizes(setting)
    texts = list(squad()[0].values())
    device = torch.device(setting.device)
    dtype = choose_dtype("auto", device)
    with tempfile.TemporaryDirectory() as random:
        folder, name = find_backbone(Path(random), setting)
        options = rip.RipOptions(steps=steps, batch=batch, max_length=64, pooling="mean")
        rows = np.flatnonzero(rip.eligible(texts, options))
        data = rip.RipData(len(texts), lambda rows: [texts[row] for row in rows], rows)
        system = rip.RipSystem(folder, options, data, device=device, dtype=dtype)
        figures = train(system, steps, 1e-4, setting, dtype, 3)
    return {"backbone": name, "batch": batch, "sentences": splitter, **figures}


def measure_prompts(setting: Setting) -> dict[str, Any]:
    """Measures prompt tuning on the SQuAD sample: speed, losses, and test MRR@10 before and after."""
    from retriever.forward.numerics import choose_dtype
    from retriever.options import EncoderOptions
    from retriever.options.tuning import TuneOptions
    from retriever.systems.dual import DualSystem
    from retriever.training.dev import DevSet
    from retriever.training.reranker_data import TrainingData

    batch, steps = sizes(setting)
    corpus, queries, splits = squad()
    place = {name: row for row, name in enumerate(corpus)}
    texts = list(corpus.values())
    device = torch.device(setting.device)
    dtype = choose_dtype("auto", device)
    ids = list(splits["train"])
    training = TrainingData(
        [queries[query] for query in ids],
        [np.array([place[splits["train"][query]]]) for query in ids],
        [np.array([], np.int64)] * len(ids),
        len(texts),
        lambda rows: ([""] * len(rows), [texts[row] for row in rows]),
    )
    judged = list(splits["test"])[: 2_000 if setting.gpu else 100]
    pool = list(corpus)
    if not setting.gpu:  # the judged passages and a few others: encoding all of them takes minutes
        pool = sorted({*(splits["test"][query] for query in judged), *pool[:50]}, key=lambda name: place[name])
    dev = DevSet(
        [queries[query] for query in judged],
        [np.array([pool.index(splits["test"][query])]) for query in judged],
        [corpus[name] for name in pool],
    )
    with tempfile.TemporaryDirectory() as random:
        folder, name = find_backbone(Path(random), setting)
        options = TuneOptions(length=32, batch=batch, negatives_per_query=0)
        encoder = EncoderOptions(pooling="mean", normalize=True, query_length=32, passage_length=128)
        system = DualSystem(folder, encoder, options, training, device=device, dtype=dtype)
        before = dev.mrr(system)
        figures = train(system, steps, 1e-2, setting, dtype, 2)
        return {"backbone": name, "batch": batch, **figures, "passages": len(pool), "mrr@10": [before, dev.mrr(system)]}


TRAINER = ("finetune", "sentence-transformers", "sentence-transformers-no-attention-dropout")
MEASUREMENTS: dict[str, Measurement] = {
    "exact-search": Measurement("exact top 200 of 4,096 queries over 4 million vectors, against torch", measure_search),
    "vectors": Measurement("lowest cosine between bfloat16 and float32 vectors of the encoder", measure_vectors),
    "encoder": Measurement("tokens/s of the encoder against sentence-transformers, and share of peak", measure_encoder),
    **{
        f"mixed-tasks-{number}": Measurement(
            f"queries of {number:,} tasks in one call, against one task and against a call per task",
            lambda setting, number=number: measure_tasks(setting, number),
        )
        for number in (10, 100, 1_000)
    },
    "query-prompts": Measurement(
        "100 tasks, half of them with prompts computed from each query, and time by length of the prompt",
        measure_query_prompts,
    ),
    "training-prompts": Measurement(
        "seconds and memory of a step: prompts of 32 and 128 tokens against fine-tuning",
        lambda setting: measure_training(setting, ("finetune", "prompt-32", "prompt-128")),
    ),
    "training-loop": Measurement(
        "seconds and memory of a step: fine-tuning against sentence-transformers' model and loss in a plain loop",
        lambda setting: measure_training(setting, ("finetune", "sentence-transformers-loop")),
    ),
    "training-trainer": Measurement(
        "the same against sentence-transformers' trainer; needs datasets and accelerate, otherwise skipped",
        lambda setting: measure_training(setting, TRAINER, ("datasets", "accelerate")),
    ),
    "rip": Measurement("tokens/s, losses and share of peak of RIP on SQuAD's sample", measure_rip),
    "prompt-tuning": Measurement("the same of prompt tuning, and MRR@10 before and after", measure_prompts),
}


def measure_here(name: str, seconds: float) -> dict[str, Any]:
    """Runs a measurement in this process and returns its record. An exception becomes one line of the record."""
    setting = Setting("cuda" if torch.cuda.is_available() else "cpu", time.monotonic() + MEASURING * seconds)
    try:
        return {"status": "done", "figures": MEASUREMENTS[name].run(setting)}
    except SkippedError as reason:
        return {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}


def measure_apart(name: str, seconds: float) -> dict[str, Any]:
    """Runs a measurement in a separate process, which is killed after `seconds`; returns its record."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        variables = {"HF_HUB_OFFLINE": "1", **os.environ}
        process = subprocess.Popen(command_of(name, seconds, file), env=variables, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "error": f"it took longer than {seconds:g} s, its limit (--seconds)"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
                process.wait()
        if file.exists():
            record: dict[str, Any] = json.loads(file.read_text())
            return record
    return {"status": "failed", "error": f"its process ended with status {status}, without figures"}


def command_of(name: str, seconds: float, file: Path) -> list[str]:
    """Returns the command that runs a measurement in its own process."""
    return [sys.executable, __file__, "--here", name, "--seconds", str(seconds), "--out", str(file)]


def last_line(text: str) -> str:
    """Returns the last line of a text."""
    return text.strip().rpartition("\n")[2]


def write(document: Mapping[str, Any], path: Path) -> None:
    """Writes JSON under a temporary name, then renames it: the file is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def read(path: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document to resume, or a new one.

    Args:
        path: The output file.
        machine: Device and versions of this machine.

    Raises:
        SystemExit: If the file comes from another machine or another program.
    """
    if not path.exists():
        return {**machine, "measurements": {}}
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        before = {name: document[name] for name in machine}
        document["measurements"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        sys.exit(f"error: {path}: not a file of this benchmark; give another --out")
    if before != machine:
        sys.exit(
            f"error: {path}: its figures are of {json.dumps(before)}, here is {json.dumps(machine)}; give another --out"
        )
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurements that are missing; returns the exit status.

    Args:
        arguments: The command line; None: that of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help="measurements to run")
    parser.add_argument("--list", action="store_true", help="print the measurements, one line each, and exit")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "results/gpu.json",
        help="the output file; an existing one is continued (default: results/gpu.json)",
    )
    parser.add_argument("--again", action="store_true", help="repeat measurements that are already in the file")
    parser.add_argument(
        "--seconds",
        type=float,
        default=LIMIT_S,
        help="time limit of each measurement in seconds: it starts no round "
        f"and no step after three quarters of it, and is killed at its end (default: {LIMIT_S:g})",
    )
    parser.add_argument("--here", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: expected a number above 0")
    if options.list:
        print("\n".join(f"{name:18} {measurement.about}" for name, measurement in MEASUREMENTS.items()))
        return 0
    if options.here:
        write(measure_here(options.here, options.seconds), options.out)
        return 0
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    document = read(options.out, {"device": device, "versions": versions})
    measurements, failed = document["measurements"], []
    for name in dict.fromkeys(options.only):
        if measurements.get(name, {}).get("status") == "done" and not options.again:
            print(f"{name}: in the file already", flush=True)
            continue
        started = time.perf_counter()
        record = measure_apart(name, options.seconds)
        record["seconds"] = round(time.perf_counter() - started, 1)
        measurements[name] = record
        write(document, options.out)
        text = record.get("error") or record.get("reason") or json.dumps(record.get("figures"))
        print(f"{name}: {record['status']} in {record['seconds']:.1f} s: {text}", flush=True)
        if record["status"] == "failed":
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command repeats them", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
