"""Measures prompts that are computed from each query (HYPER), or for each topic, beside fixed ones, served together.

    python benchmarks/query_prompts.py --json results/query_prompts.json

The prompts are random, and the backbone is all-MiniLM-L6-v2. There are three figures:

traffic   queries/s with batches of queries, each of a random task: no prompts, fixed prompts alone, and half of the
          tasks with computed prompts, for both mixes. With --topics, also as many tasks with prompts of topics, alone
          and together with all others. The kinds alternate in one process.
lengths   the time to encode such a batch for one task, by the length of its prompt (HYPER, Fig. 6).
vectors   the largest difference between vectors of a mixed batch and of single-task calls.

Needs torch, transformers, numpy and safetensors. Ratios compare with another kind in the same round; medians of rounds
are reported, as JSON and as tables in Markdown.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.common.files import read_texts, write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.tables import markdown_table
from benchmarks.common.timing import in_turns, ratio
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.synthesis import Mix, SynthesisOptions
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.synthesiser import Synthesiser
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.topics.model import TopicModel
from riptide.retriever.topics.saved import SavedTopics
from riptide.retriever.topics.words import topic_words

MIXES: tuple[Mix, ...] = get_args(Mix)


def add_inputs(parser: Parser) -> None:
    """Adds the options for the backbone and the file of the queries."""
    parser.add("--model", MINILM, "backbone")
    parser.add("--queries", str(ROOT / "examples/squad/queries.jsonl.gz"), "file of the queries, compressed BEIR")


def fixed_prompt(encoder: Encoder, length: int, seed: int) -> TaskPrompt:
    """Returns a random prompt for queries."""
    shape = encoder._shape
    assert shape is not None
    torch.manual_seed(seed)
    matrix = 0.3 * torch.randn(shape.layers, 2, shape.heads, length, shape.head_dim)
    return TaskPrompt(backbone_of(encoder.config), encoder.options, matrix, None)


def computed_prompt(encoder: Encoder, length: int, mix: Mix, seed: int) -> TaskPrompt:
    """Returns a random synthesiser of the paper's sizes."""
    shape = encoder._shape
    assert shape is not None
    torch.manual_seed(seed)
    width = encoder._eager.backbone.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    module = Synthesiser(shape, width, SynthesisOptions(length=length, mix=mix))
    saved = SavedSynthesis.from_module(module)
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, synthesis=saved)


def random_topic_model(
    vocabulary: tuple[str, ...], num_topics: int, num_words: int, random: np.random.Generator
) -> TopicModel:
    """Returns random topics over a vocabulary, each with one path and its most probable words."""
    probabilities = random.dirichlet(np.full(len(vocabulary), 0.1), num_topics)
    log_words = np.log(probabilities + 1e-6).astype(np.float32)
    return TopicModel(
        vocabulary,
        words=tuple(tuple(vocabulary[word] for word in np.argsort(-row)[:num_words]) for row in log_words),
        path_topics=np.arange(num_topics),
        log_prior=np.full(num_topics, -np.log(num_topics), np.float32),
        log_words=log_words,
    )


def topic_prompt(encoder: Encoder, model: TopicModel, length: int, seed: int) -> TaskPrompt:
    """Returns a task with a random prompt for each topic, of which the first one has the seed."""
    matrices = [fixed_prompt(encoder, length, seed + topic).query for topic in range(model.num_topics)]
    saved = SavedTopics(model, torch.stack([matrix for matrix in matrices if matrix is not None]), "prior")
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, topics=saved)


def put_topic_tasks(encoder: Encoder, count: int, length: int, num_topics: int, texts: Sequence[str]) -> list[str]:
    """Adds tasks with prompts of random topics over the words of some texts, and returns their names."""
    vocabulary = tuple(sorted({word for text in texts for word in topic_words(text)}))
    random = np.random.default_rng(0)
    for number in range(count):
        model = random_topic_model(vocabulary, num_topics, length, random)
        encoder.put_task(f"topics{number}", topic_prompt(encoder, model, length, 1_000 * (number + 1)))
    return [f"topics{number}" for number in range(count)]


def put_tasks(encoder: Encoder, count: int, length: int) -> dict[str, list[str]]:
    """Adds the tasks of all kinds of traffic; returns the names of the tasks of each kind with prompts."""
    for number in range(count):
        encoder.put_task(f"fixed{number}", fixed_prompt(encoder, length, number))
    for mix, number in itertools.product(MIXES, range(count // 2)):
        encoder.put_task(f"{mix}{number}", computed_prompt(encoder, length, mix, number))
    fixed = [f"fixed{number}" for number in range(count)]
    half = fixed[: count - count // 2]
    return {"fixed": fixed} | {f"half {mix}": [*half, *(f"{mix}{n}" for n in range(count // 2))] for mix in MIXES}


def time_traffic(
    encoder: Encoder, batches: Sequence[Sequence[str]], tasks: Mapping[str, Sequence[str] | None], **limits: Any
) -> dict[str, list[float]]:
    """Returns the seconds of each kind of traffic in each round.

    Args:
        encoder: The encoder with the tasks.
        batches: The queries.
        tasks: The tasks of each kind, of which each query gets a random one; None: no task.
        limits: `rounds` and `deadline` of `in_turns`.
    """
    random, functions = np.random.default_rng(0), {}
    for kind, names in tasks.items():
        tasks_of_batches = [
            names and [names[n] for n in random.integers(0, len(names), len(batch))] for batch in batches
        ]
        functions[kind] = functools.partial(encode_all, encoder, batches, tasks_of_batches)
    return in_turns(functions, **limits)


def encode_all(encoder: Encoder, batches: Sequence[Sequence[str]], tasks: Iterable[Any]) -> None:
    """Encodes batches of queries, each with a task, the tasks of its queries, or None."""
    for batch, task in zip(batches, tasks, strict=True):
        encoder.encode(batch, task=task)


def measure_traffic(
    encoder: Encoder, batches: Sequence[Sequence[str]], tasks: Mapping[str, Sequence[str]], rounds: int, deadline: float
) -> dict[str, dict[str, float]]:
    """Returns queries/s of each kind of traffic, and its throughput as a share of that without and of fixed prompts."""
    seconds = time_traffic(encoder, batches, {"none": None, **tasks}, rounds=rounds, deadline=deadline)
    return {
        kind: {
            "queries_per_s": sum(map(len, batches)) / statistics.median(of_rounds),
            "share_of_none": ratio(seconds, "none", kind),
            "share_of_fixed": ratio(seconds, "fixed", kind),
            "rounds": len(of_rounds),
        }
        for kind, of_rounds in seconds.items()
    }


def measure_lengths(
    encoder: Encoder, batches: Sequence[Sequence[str]], lengths: Sequence[int], rounds: int, deadline: float
) -> dict[str, dict[str, float]]:
    """Returns the time of a batch of one task by length and kind: seconds, and ratios to no prompt and to a fixed one.

    The keys are "none" and "KIND LENGTH".
    """
    prompts = {f"fixed {length}": fixed_prompt(encoder, length, length) for length in lengths}
    for mix, length in itertools.product(MIXES, lengths):
        prompts[f"{mix} {length}"] = computed_prompt(encoder, length, mix, length)
    for name, prompt in prompts.items():
        encoder.put_task(name, prompt)

    functions = {
        name or "none": functools.partial(encode_all, encoder, batches, [name] * len(batches))
        for name in (None, *prompts)
    }
    seconds = in_turns(functions, rounds, deadline)
    for name in prompts:
        encoder.drop_task(name)
    return {
        name: {
            "batch_s": statistics.median(of_rounds) / len(batches),
            "times_none": ratio(seconds, name, "none"),
            "times_fixed": ratio(seconds, name, "none" if name == "none" else f"fixed {name.split()[1]}"),
            "rounds": len(of_rounds),
        }
        for name, of_rounds in seconds.items()
    }


def largest_difference(encoder: Encoder, texts: Sequence[str], tasks: Sequence[str] | None = None) -> float:
    """Returns the largest difference between vectors of one mixed call and of single-task calls.

    The tasks take turns over the texts. None: some fixed and computed ones of `put_tasks`.
    """
    if tasks is None:
        tasks = [task for kind in ("fixed", "topics", *MIXES) for task in encoder.tasks if task.startswith(kind)]
        tasks = tasks[:: max(1, len(tasks) // 16)]
    names = [tasks[row % len(tasks)] for row in range(len(texts))]
    mixed = encoder.encode(texts, task=names)
    single = np.empty_like(mixed)
    for task in set(names):
        rows = [row for row, name in enumerate(names) if name == task]
        single[rows] = encoder.encode([texts[row] for row in rows], task=task)
    return float(np.abs(mixed - single).max())


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the CPU with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def tables(document: Mapping[str, Any]) -> str:
    """Returns the figures as tables in Markdown."""
    options, lengths = document["options"], document["lengths"]
    traffic = [
        (kind, f"{each['queries_per_s']:,.0f}", f"{each['share_of_none']:.2f}", f"{each['share_of_fixed']:.2f}")
        for kind, each in document["traffic"].items()
    ]

    def cell(name: str) -> str:
        return f"{1000 * lengths[name]['batch_s']:.1f} ms ({lengths[name]['times_fixed']:.2f})"

    times = [
        (length, cell("none"), *(cell(f"{kind} {length}") for kind in ("fixed", *MIXES)))
        for length in options["lengths"]
    ]
    title = f"{options['tasks']} tasks, prompts of {options['length']} tokens"
    differences = ", ".join(f"{value:.1e} in {name}" for name, value in document["largest_difference"].items())
    return f"""{document["device"]}; {document["numerics"]}; {options["threads"]} threads

{markdown_table((title, "queries/s", "of no prompts", "of fixed"), traffic)}

{markdown_table(("tokens", "none", "fixed", *MIXES), times)}

Time of a batch of {options["batch"]} queries; in brackets: times that of a fixed prompt.
Largest difference between vectors of a mixed batch and of single-task calls: {differences}
"""


def main() -> None:
    """Reads the options, measures, prints the tables and writes the figures."""
    parser = Parser(__doc__)
    add_inputs(parser)
    parser.add("--count", 640, "number of queries")
    parser.add("--batch", 32, "queries of a batch")
    parser.add("--tasks", 100, "number of tasks")
    parser.add("--length", 20, "tokens of the prompts of traffic")
    parser.add("--lengths", [5, 20, 100], "lengths")
    parser.add("--topics", None, "also tasks with prompts of N topics (default: none)", type=int)
    parser.add("--rounds", 7, "number of rounds")
    parser.add("--seconds", 3600, "no round starts after this", type=float)
    parser.add("--dtype", "auto", "auto, float32 or bfloat16")
    parser.add("--compile", "auto", "auto or never")
    parser.add("--device", None, "cpu or cuda (default: cuda if there is one)")
    parser.add("--threads", os.cpu_count() or 1, "CPU threads (default: all cores)")
    parser.add("--json", "results/query_prompts.json", "output file")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    texts = read_texts(options.queries, options.count)
    batches = [texts[start : start + options.batch] for start in range(0, len(texts), options.batch)]

    def start(dtype: str, compile: str) -> tuple[Encoder, dict[str, list[str]]]:
        settings = EncoderOptions(dtype=dtype, compile=compile, pooling="mean", normalize=True)  # type: ignore[arg-type]
        encoder = Encoder(options.model, settings, device=options.device, threads=options.threads, tasks={})
        tasks = put_tasks(encoder, options.tasks, options.length)
        if options.topics:
            tasks["topics"] = put_topic_tasks(encoder, options.tasks, options.length, options.topics, texts)
            tasks["all kinds"] = list(dict.fromkeys(name for of_kind in tasks.values() for name in of_kind))
        return encoder, tasks

    encoder, _ = start("float32", "never")
    differences = {"float32": largest_difference(encoder, texts[:128])}
    encoder, tasks = start(options.dtype, options.compile)
    differences[str(encoder.dtype).removeprefix("torch.")] = largest_difference(encoder, texts[:128])
    document: dict[str, Any] = {
        "options": vars(options),
        "device": device_name(encoder.device),
        "numerics": encoder.numerics,
        "largest_difference": differences,
        "traffic": measure_traffic(encoder, batches, tasks, options.rounds, deadline),
        "lengths": measure_lengths(encoder, batches, options.lengths, options.rounds, deadline),
    }
    write_json(options.json, document)
    print(tables(document), end="")


if __name__ == "__main__":
    main()
