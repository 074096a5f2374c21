"""Compares the cost of a training step: deep prompts with fine-tuning, and fine-tuning with sentence-transformers.

    python benchmarks/training.py --pairs 3                 # the shape of RoBERTa-base, random weights
    python benchmarks/training.py --layers 2 --hidden 64    # toy size, to check that it runs

A step has 32 queries of 32 tokens and 64 passages of 128 (a positive and a mined negative per query). All runs use
bfloat16 if the device supports it, AdamW, and the same texts. Each run is a separate process, so that its peak memory
is measured separately. Runs alternate, so that a slow period of the machine affects all of them; ratios are medians
over the rounds. The peer is the trainer of sentence-transformers (it needs the packages datasets and accelerate), or
its model and loss in a plain loop. The module paths of sentence-transformers are deprecated ones, because older
versions, which a GPU machine may have, know no others.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from riptide.retriever.forward.numerics import choose_device, choose_dtype

QUERIES, QUERY_TOKENS, PASSAGE_TOKENS, WORDS = 32, 32, 128, 5_000
RUNS = (
    "finetune",
    "prompt-32",
    "prompt-128",
    "sentence-transformers",
    "sentence-transformers-no-attention-dropout",
    "sentence-transformers-loop",
)


def save_backbone(folder: Path, layers: int, hidden: int) -> Path:
    """Saves a RoBERTa with random weights and a whole-word tokenizer; returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    pieces = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>"}
    tokens = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50_265,
        max_position_embeddings=514,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // min(64, hidden // 2),
        intermediate_size=4 * hidden,
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def random_texts(count: int, tokens: int, seed: int) -> list[str]:
    """Returns random texts of exactly `tokens` tokens, special tokens included."""
    random = np.random.default_rng(seed)
    return [" ".join(f"w{n}" for n in random.integers(WORDS, size=tokens - 2)) for _ in range(count)]


def texts_of(steps: int) -> tuple[list[str], list[str]]:
    """Returns the queries of some steps, and their passages: a positive and a negative of each query in turn."""
    count = steps * QUERIES
    return random_texts(count, QUERY_TOKENS, 1), random_texts(2 * count, PASSAGE_TOKENS, 2)


def step_seconds(step: Callable[[int], object], steps: int) -> list[float]:
    """Returns the seconds of each step. step: a function of its number."""
    seconds = []
    for number in range(steps):
        started = time.perf_counter()
        step(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def train_with_riptide(folder: Path, method: str, length: int, steps: int) -> list[float]:
    """Returns the seconds of each step of riptide's training loop. method: "prompt" or "finetune"."""
    from riptide.retriever.objectives.tune_options import TuneOptions
    from riptide.retriever.options import EncoderOptions
    from riptide.retriever.options.loop import LoopOptions
    from riptide.retriever.systems.dual import DualEncoderSystem
    from riptide.retriever.training.loop import Trainer
    from riptide.retriever.training.training_data import TrainingData

    queries, passages = texts_of(steps)
    data = TrainingData(
        queries,
        [np.array([2 * number]) for number in range(len(queries))],
        [np.array([2 * number + 1]) for number in range(len(queries))],
        len(passages),
        lambda rows: ([""] * len(rows), [passages[row] for row in rows]),
    )
    device = choose_device(None)
    encoder = EncoderOptions(pooling="cls", query_length=QUERY_TOKENS, passage_length=PASSAGE_TOKENS)
    dtype = choose_dtype("auto", device)
    tuning = TuneOptions(method=method, length=length, batch=QUERIES, negatives_per_query=1)  # type: ignore[arg-type]
    system = DualEncoderSystem(folder, encoder, tuning, data, device=device, dtype=dtype)
    trainer = Trainer(system, LoopOptions(steps=steps, lr=1e-5), device=device, dtype=dtype)
    system.module.train()
    return step_seconds(trainer.step, steps)


def train_with_peer(folder: Path, steps: int, attention_dropout: bool) -> list[float]:
    """Returns the seconds of each step of sentence-transformers' trainer with MultipleNegativesRankingLoss.

    attention_dropout: whether attention weights are dropped out, as the backbone's configuration has it.
    """
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import TrainerCallback

    device = choose_device(None)
    model, loss = open_peer(folder, device, {} if attention_dropout else {"attention_probs_dropout_prob": 0.0})
    queries, passages = texts_of(steps)
    rows = Dataset.from_dict({"anchor": queries, "positive": passages[::2], "negative": passages[1::2]})
    times: list[float] = []  # the start of the first step, and the end of each step

    class Clock(TrainerCallback):
        """Notes the times of the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not times:
                times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=QUERIES,
            learning_rate=1e-5,
            report_to="none",
            bf16=choose_dtype("auto", device) == torch.bfloat16,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=device.type == "cpu",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=rows, callbacks=[Clock()], loss=loss
        )
        trainer.train()
    return list(np.diff(times))


def train_peer_in_a_loop(folder: Path, steps: int) -> list[float]:
    """Returns the seconds of each step of sentence-transformers' model and loss in a loop without its trainer.

    The loop does the same as the trainer in a step: tokenise, forward under autocast, backward, clip, AdamW.
    """
    device = choose_device(None)
    model, loss = open_peer(folder, device, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokenize = getattr(model, "preprocess", None) or model.tokenize  # the method's name depends on the version
    queries, passages = texts_of(steps)
    positives, negatives = passages[::2], passages[1::2]
    labels = torch.arange(QUERIES, device=device)
    uses_bfloat16 = choose_dtype("auto", device) == torch.bfloat16
    model.train()

    def step(number: int) -> None:
        step_rows = slice(number * QUERIES, (number + 1) * QUERIES)
        features = [
            {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
            for inputs in map(tokenize, (queries[step_rows], positives[step_rows], negatives[step_rows]))
        ]
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16):
            value = loss(features, labels)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step_seconds(step, steps)


def open_peer(folder: Path, device: torch.device, config: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a model of sentence-transformers and its loss; config: values in place of those of config.json."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from sentence_transformers.util import dot_score

    transformer = Transformer(str(folder), max_seq_length=PASSAGE_TOKENS, config_kwargs=config)
    # The name of the method depends on the version.
    hidden_size = getattr(transformer, "get_embedding_dimension", None) or transformer.get_word_embedding_dimension
    model = SentenceTransformer(modules=[transformer, Pooling(int(hidden_size()), "cls")], device=str(device))
    return model, MultipleNegativesRankingLoss(model, scale=1.0, similarity_fct=dot_score)


def measure(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Trains one of RUNS in this process.

    Returns:
        "seconds": median of a step, without the first two; "peak": largest memory in bytes.
    """
    torch.set_num_threads(min(torch.get_num_threads(), 16))
    if name == "sentence-transformers-loop":
        seconds = train_peer_in_a_loop(folder, steps)
    elif name.startswith("sentence-transformers"):
        seconds = train_with_peer(folder, steps, attention_dropout=name == "sentence-transformers")
    else:
        method, _, length = name.partition("-")
        seconds = train_with_riptide(folder, method, int(length or 32), steps)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": statistics.median(seconds[2:]), "peak": float(peak)}


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures; or trains once (--only)."""
    parser = Parser(__doc__)
    parser.add("--layers", 12, "layers of the backbone")
    parser.add("--hidden", 768, "hidden size of the backbone")
    parser.add("--steps", 6, "steps per run, at least 3; the first two are not counted")
    parser.add("--pairs", 3, "number of rounds over all runs")
    parser.add("--runs", list(RUNS), "what is trained (default: all)", choices=RUNS)
    parser.add("--json", None, "write the figures to this file (default: they are only printed)")
    parser.add("--only", None, argparse.SUPPRESS)
    parser.add("--folder", None, argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, Path(options.folder), options.steps)))
        return
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in options.runs}
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(Path(folder), options.layers, options.hidden)
        for _ in range(options.pairs):
            for name in options.runs:
                command = [sys.executable, __file__, "--only", name, "--folder", folder, "--steps", str(options.steps)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                figures[name].append(json.loads(output.splitlines()[-1]))
                seconds, peak = figures[name][-1]["seconds"], figures[name][-1]["peak"]
                print(f"{name:44} {seconds:7.2f} s per step, peak {peak / 2**30:6.2f} GiB", flush=True)
    ratios = {}
    for name in RUNS[1:]:
        if name in figures and "finetune" in figures:
            for kind in ("seconds", "peak"):
                pairs = zip(figures[name], figures["finetune"], strict=True)
                ratios[f"{name} / finetune, {kind}"] = statistics.median(a[kind] / b[kind] for a, b in pairs)
    for name, ratio in ratios.items():
        print(f"{name:60} {ratio:.3f}")
    if options.json:
        write_json(options.json, {"figures": figures, "ratios": ratios})


if __name__ == "__main__":
    main()
