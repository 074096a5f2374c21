"""Measures correctness in bfloat16 and speed on a GPU, each against a peer; without a GPU, toy sizes on the CPU.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --out results/gpu.json
    python benchmarks/gpu.py --out results/gpu.json --only exact-search encoder --again

Needs torch, transformers, numpy, safetensors and sentence-transformers, and no network. Each measurement is a separate
process with a time limit. The output file is written after each measurement; a failure is recorded in one line, and the
other measurements still run. The same command resumes with the measurements that are missing, were skipped or have
failed. The exit status is 1 if a measurement failed.

Peers: sentence-transformers for the encoder and for training, plain torch for exact search. Weights are random (no
download), with the shape of BERT-base and RoBERTa-base on a GPU and tiny shapes without one.
"""

from __future__ import annotations

import argparse
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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import read_json, write_documents, write_json
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.timing import in_turns, ratio

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
    seconds = in_turns({"ours": ours, "peer": peer}, ROUNDS, setting.deadline)
    ours_s, peer_s = (statistics.median(seconds[name]) for name in ("ours", "peer"))
    return {
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ratio": ratio(seconds, "peer", "ours"),
        "rounds": len(seconds["ours"]),
    }


def run_benchmark(name: str, *arguments: object) -> dict[str, Any]:
    """Runs another benchmark of this folder and returns its figures.

    Raises:
        RuntimeError: If it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *map(str, arguments), "--json", str(file)]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            sys.stderr.write(result.stderr)
            last_line = result.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(last_line or f"benchmarks/{name}.py ended with {result.returncode}")
        return dict(json.loads(file.read_text(encoding="utf-8")))


def measure_encoder(setting: Setting) -> dict[str, Any]:
    """Returns the figures of benchmarks/encode.py: tokens/s and cosines to float32 beside sentence-transformers."""
    count, batch = (4_000, 256) if setting.gpu else (50, 32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = ({"_id": str(number), "text": text} for number, text in enumerate(passages(count * (ROUNDS + 1))))
        write_documents(folder / "corpus.jsonl", documents)
        inputs = ["--model", save_model(folder / "model", large=setting.gpu), "--data", folder / "corpus.jsonl"]
        sizes = ["--count", count, "--rounds", ROUNDS, "--batch", batch]
        return run_benchmark("encode", *inputs, *sizes, "--dtype", "bfloat16", "--no-start-up")


def measure_search(setting: Setting, dim: int = 768) -> dict[str, Any]:
    """Compares exact search (top 200) with a matrix product and topk of plain torch, in blocks.

    Both read float16 vectors from host memory.
    """
    from riptide.indexing.exact import exact_search

    count, num_queries, block = (4_000_000, 4_096, 100_000) if setting.gpu else (20_000, 128, 100_000)
    torch.manual_seed(0)
    vectors = np.empty((count, dim), np.float16)
    for start in range(0, count, block):
        rows = torch.randn(min(block, count - start), dim, device=setting.device)
        vectors[start : start + block] = torch.nn.functional.normalize(rows).half().cpu().numpy()
    chosen = vectors[torch.randint(count, (num_queries,)).numpy()].astype(np.float32)
    queries = chosen + 0.02 * torch.randn(num_queries, dim).numpy()

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


def write_inputs(folder: Path, count: int, setting: Setting) -> list[object]:
    """Writes a backbone and short random queries, and returns them as options of a benchmark of prompts."""
    random = np.random.default_rng(0)
    texts = (" ".join(f"w{n}" for n in random.integers(0, 5_000, random.integers(4, 16))) for _ in range(count))
    write_documents(folder / "queries.jsonl", ({"text": text} for text in texts))
    model = save_model(folder / "model", large=setting.gpu)
    return ["--model", model, "--queries", folder / "queries.jsonl"]


def measure_tasks(setting: Setting) -> dict[str, Any]:
    """Returns the figures of benchmarks/many_tasks.py: the traffic of up to 1,000 tasks beside that of one."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder), 640, setting)
        return run_benchmark("many_tasks", *inputs, "--tasks", 1_000 if setting.gpu else 10, "--rounds", ROUNDS)


def measure_query_prompts(setting: Setting) -> dict[str, Any]:
    """Returns the figures of benchmarks/query_prompts.py: computed prompts beside fixed ones."""
    toy = ["--tasks", 4, "--length", 3, "--lengths", 2, 5, "--rounds", 1]
    count, sizes = (4_096, ["--batch", 256]) if setting.gpu else (32, toy)
    with tempfile.TemporaryDirectory() as folder:
        options = [*write_inputs(Path(folder), count, setting), "--count", count, *sizes]
        options += ["--dtype", "bfloat16", "--device", setting.device, "--seconds", max(1.0, setting.left_s)]
        document = run_benchmark("query_prompts", *options)
    return {name: document[name] for name in ("numerics", "largest_difference", "traffic", "lengths")}


def measure_training(setting: Setting, runs: Sequence[str], needed: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the figures of benchmarks/training.py.

    Args:
        setting: Device and deadline.
        runs: The runs to measure, as its --runs.
        needed: Packages without which the measurement is skipped.

    Raises:
        SkippedError: If a needed package is missing.
    """
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        raise SkippedError(f"{', '.join(missing)} not installed; the trainer of sentence-transformers needs it")
    sizes = ["--steps", 12] if setting.gpu else ["--layers", 2, "--hidden", 64, "--steps", 3]
    return run_benchmark("training", *sizes, "--pairs", 1, "--runs", *runs)


TRAINER = ("finetune", "sentence-transformers", "sentence-transformers-no-attention-dropout")
MEASUREMENTS: dict[str, Measurement] = {
    "exact-search": Measurement("exact top 200 of 4,096 queries over 4 million vectors, against torch", measure_search),
    "encoder": Measurement(
        "tokens/s and cosines to float32 of the encoder, beside sentence-transformers", measure_encoder
    ),
    "many-tasks": Measurement("queries of up to 1,000 tasks in one batch, against those of one task", measure_tasks),
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
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return record
    return {"status": "failed", "error": f"its process ended with status {status}, without figures"}


def command_of(name: str, seconds: float, file: Path) -> list[str]:
    """Returns the command that runs a measurement in its own process."""
    return [sys.executable, __file__, "--here", name, "--seconds", str(seconds), "--out", str(file)]


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
        document: dict[str, Any] = read_json(path)
        before = {name: document[name] for name in machine}
        document["measurements"].items()
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, zlib.error):
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
    parser = Parser(__doc__)
    names = list(MEASUREMENTS)
    parser.add("--only", names, "measurements to run", choices=names, metavar="NAME", nargs="+")
    parser.add("--list", False, "print the measurements, one line each, and exit")
    parser.add("--out", ROOT / "results/gpu.json", "the output file; an existing one is continued")
    parser.add("--again", False, "repeat measurements that are already in the file")
    parser.add(
        "--seconds",
        LIMIT_S,
        "time limit of a measurement in seconds, after three quarters of which no round starts",
    )
    parser.add("--here", None, argparse.SUPPRESS, choices=names)
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: expected a number above 0")
    if options.list:
        print("\n".join(f"{name:18} {measurement.about}" for name, measurement in MEASUREMENTS.items()))
        return 0
    if options.here:
        write_json(options.out, measure_here(options.here, options.seconds))
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
        write_json(options.out, document)
        text = record.get("error") or record.get("reason") or json.dumps(record.get("figures"))
        print(f"{name}: {record['status']} in {record['seconds']:.1f} s: {text}", flush=True)
        if record["status"] == "failed":
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command repeats them", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
