"""Measures this machine in at most 30 seconds, and keeps the result for later plans.

The probe of a model encodes texts with the encoder itself, and trains its backbone on random tokens for some steps, so
the products have the shapes of the model. Other figures are those of one core.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.storage.cache import node_cache
from riptide.jobs.planning.backbone_sizes import TRAINED, Backbone
from riptide.jobs.planning.machine import Machine, Rate, Throughput, local_hardware
from riptide.process import native
from riptide.retriever.options import EncoderOptions

BUDGET_S = 30.0  # longest time of a probe
LARGEST_WEIGHTS = 3 << 30  # bytes of weights that load and run within the budget
BUSY_SHARE = 0.25  # of the cores that other programs use, from which on a probe warns
_WORDS = "the passage of a query names a river, its length, and the city at which it ends"
_PROBE_BYTES = 64 << 20  # bytes that are written and read to measure the disk
_TRAINING_SHAPE = 16, 128  # texts and tokens of a training step

# Figures without a calibration, of a core of an EPYC with AVX-512 BF16: docs/measurements/plans.md. Model rates are of
# MiniLM in bfloat16, and of BERT-base on an H200.
_SOURCE = "measured on another machine, an EPYC with AVX-512 BF16"
_CORE_TFLOPS = {"forward_tflops": 0.36, "training_tflops": 0.2}
_GPU_TFLOPS = {"forward_tflops": 200.0, "training_tflops": 120.0}
_PER_CORE = {
    "exact_gflops": 150.0,
    "tokens_per_s": 500_000.0,
    "parse_mb_per_s": 12.0,
    "lucene_mb_per_s": 8.0,
    "disk_mb_per_s": 400.0,
}


class ModelRates(BaseModel):
    """The measured rates of a shape of model, in 10^12 operations per second."""

    model_config = ConfigDict(extra="forbid")

    forward_tflops: float
    training_tflops: float


class Calibration(BaseModel):
    """The measured figures of a machine.

    Attributes:
        cpu: Its CPU, cores and GPUs, as `machine_key` names them.
        date: The day of the last probe.
        busy_cores: Cores that other programs used during the last probe.
        models: The rates of models by `shape_key`.
        rates: Further throughputs by their name in `Throughput`.
    """

    model_config = ConfigDict(extra="forbid")

    cpu: str
    date: datetime.date
    busy_cores: float
    models: dict[str, ModelRates] = Field(default_factory=dict)
    rates: dict[str, float] = Field(default_factory=dict)


def calibration_file() -> Path:
    """Returns the file of this machine's figures, in the cache of this node (RIPTIDE_CACHE)."""
    return node_cache().folder / "calibration.json"


def machine_key(gpus: int) -> str:
    """Returns the CPU, cores and GPUs of this machine."""
    return f"{native.cpu_info()[1]}, {len(os.sched_getaffinity(0))} cores, {gpus} GPUs"


def shape_key(backbone: Backbone, dtype: str) -> str:
    """Returns the name of a shape of model and the dtype of its products: their rate depends on them."""
    return f"{backbone.layers} layers of {backbone.width}, {dtype}"


def read_calibration(gpus: int) -> Calibration | None:
    """Returns the figures of this machine; None if there are none, or those of another machine or version."""
    try:
        calibration = Calibration.model_validate_json(calibration_file().read_bytes())
    except (OSError, ValidationError):
        return None
    return calibration if calibration.cpu == machine_key(gpus) else None


def this_machine(folder: Path, gpus: int, backbone: Backbone | None = None, dtype: str = "auto") -> Machine:
    """Describes this machine with its calibrated rates, or with those of another machine.

    Args:
        folder: The folder of the store, whose disk counts.
        gpus: The number of GPUs.
        backbone: The model that the work runs; its measured rates count.
        dtype: The dtype of its products.
    """
    hardware = local_hardware(folder)
    existing = read_calibration(gpus)
    model = existing.models.get(shape_key(backbone, dtype)) if existing is not None and backbone is not None else None
    factor = 1 if gpus else hardware["cores"]
    figures = {name: factor * value for name, value in (_GPU_TFLOPS if gpus else _CORE_TFLOPS).items()} | _PER_CORE
    measured = ({} if existing is None else existing.rates) | ({} if model is None else model.model_dump())
    source = "measured here" if existing is None else f"measured here on {existing.date}"
    rates = {
        name: Rate(value=measured.get(name, value), source=source if name in measured else _SOURCE)
        for name, value in figures.items()
    }
    is_calibrated = existing is not None and (backbone is None or model is not None)
    note = f"calibrated {existing.date}" if existing is not None and is_calibrated else "not calibrated"
    return Machine(
        title=f"this machine ({note})",
        nodes=1,
        cores=int(hardware["cores"]),
        memory_gib=hardware["memory_gib"],
        disk_gib=hardware["disk_gib"],
        gpus=gpus,
        gpu_memory_gib=_gpu_memory_gib() if gpus else 0.0,
        throughput=Throughput(**rates),
    )


def busy_cores(seconds: float = 0.5) -> float:
    """Returns how many cores programs use now, by the times of the system; 0.0 if it does not report them."""
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return (1 - (after[0] - before[0]) / (after[1] - before[1])) * (os.cpu_count() or 1)


def describe_load(busy: float, cores: int) -> str:
    """Returns a warning about a probe on a busy machine; "" if at most a quarter of its cores is in use."""
    if busy <= BUSY_SHARE * cores:
        return ""
    return (
        f"warning: {Parameter('calibrate')}: other programs use {busy:.1f} of {cores} cores, so the figures may be too "
        "low for an idle machine: repeat it when they have ended"
    )


def calibrate(
    folder: Path, backbone: Backbone, options: EncoderOptions, gpus: int, store: Path, *, seconds: float = BUDGET_S
) -> Calibration:
    """Measures this machine with a model, and keeps the result.

    Args:
        folder: The folder of the model.
        backbone: Its size.
        options: The options of the encoder.
        gpus: The number of GPUs.
        store: The folder of the store, whose disk is measured.
        seconds: The longest time of the probe, without the imports of libraries.

    Raises:
        InputError: If the model is too large for a probe of 30 seconds.
    """
    if 4 * backbone.parameters > LARGEST_WEIGHTS and not gpus:
        raise InputError(
            f"{Parameter('calibrate')}: {folder} has {backbone.parameters / 1e9:.1f} billion weights, too many "
            f"for a probe of {BUDGET_S:.0f} s without a GPU: use a description of the machine ({Parameter('cluster')})"
        )
    busy = busy_cores()
    existing = read_calibration(gpus)
    rates, tokens_per_s = _measure_model(folder, backbone, options, seconds / 6)
    calibration = Calibration(
        cpu=machine_key(gpus),
        date=datetime.date.today(),
        busy_cores=busy,
        models={} if existing is None else dict(existing.models),
        rates={
            "tokens_per_s": tokens_per_s,
            "exact_gflops": _measure_products(seconds / 30),
            "disk_mb_per_s": _measure_disk(store),
        },
    )
    calibration.models[shape_key(backbone, options.dtype)] = rates
    file = calibration_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}-{os.getpid()}")
    partial.write_text(calibration.model_dump_json(indent=1), encoding="utf-8")
    partial.replace(file)
    return calibration


def _measure_model(
    folder: Path, backbone: Backbone, options: EncoderOptions, seconds: float
) -> tuple[ModelRates, float]:
    """Returns the rates of a model, and the tokens per second of one core that its tokenizer makes."""
    from riptide.retriever.encoding.encoder import Encoder

    encoder = Encoder(str(folder), options, device=None)
    texts = [f"{number} {' '.join([_WORDS] * (1 + number % 11))}" for number in range(1024)]
    tokens_per_s = _rate(lambda: float(encoder.tokenize(texts, side="passage").lengths.sum()), seconds / 10)

    def encode(count: int) -> float:
        """Encodes the first texts and returns the operations."""
        some = encoder.tokenize(texts[:count], side="passage")
        encoder.forward(some, side="passage")
        total = int(some.lengths.sum())
        return backbone.flops(total, total / count)

    encode(128)  # compiles the products
    forward = _rate(lambda: encode(256), seconds, on_gpu=encoder.device.type == "cuda")
    training = _measure_training(folder, backbone, options, seconds)
    cores = len(os.sched_getaffinity(0))
    return ModelRates(forward_tflops=forward / 1e12, training_tflops=training / 1e12), tokens_per_s / cores


def _measure_training(folder: Path, backbone: Backbone, options: EncoderOptions, seconds: float) -> float:
    """Returns the operations per second of forward and backward passes over all weights."""
    import torch

    from riptide.retriever.encoding.backbones import open_pooled
    from riptide.retriever.forward.numerics import choose_device, choose_dtype
    from riptide.retriever.model.model_folder import find_model_folder
    from riptide.retriever.model.recipe import read_recipe

    device = choose_device(None, "auto")
    dtype = choose_dtype("auto", device)
    recipe = read_recipe(find_model_folder(folder), options)
    model: Any = open_pooled(recipe, torch.float32).backbone.to(device).train()
    count, length = _TRAINING_SHAPE
    length = min(length, recipe.max_positions or length)
    ids = torch.randint(backbone.words // 2, backbone.words, (count, length), device=device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        output.float().square().mean().backward()
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return backbone.flops(count * length, length, TRAINED)

    step()
    return _rate(step, seconds, on_gpu=device.type == "cuda")


def _measure_products(seconds: float) -> float:
    """Returns 10^9 operations per second of one core that compares vectors."""
    import numpy as np

    from riptide.indexing.exact import exact_search

    vectors = np.random.default_rng(0).standard_normal((100_000, 384), np.float32).astype(np.float16)
    queries = vectors[:256].astype(np.float32)
    exact_search(queries, [(0, vectors)], 100)

    def search() -> float:
        exact_search(queries, [(0, vectors)], 100)
        return 2.0 * len(vectors) * queries.size

    return _rate(search, seconds) / 1e9 / len(os.sched_getaffinity(0))


def _measure_disk(folder: Path) -> float:
    """Returns the MB per second that are written to the disk of a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    block = os.urandom(1 << 20)
    started = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return _PROBE_BYTES / 1e6 / (time.perf_counter() - started)


def _rate(run: Callable[[], float], seconds: float, *, on_gpu: bool = False) -> float:
    """Returns the amount per second that `run` returns, called for some seconds.

    On the CPU, the seconds are those of an idle machine: the CPU time of this process divided by its cores. So other
    programs lower the figure by what they take from caches and memory, and not by what they take of the cores.
    """
    amount, started, used = 0.0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        amount += run()
    if on_gpu:
        return amount / (time.perf_counter() - started)
    return amount / ((time.process_time() - used) / len(os.sched_getaffinity(0)))


def _cpu_times() -> tuple[float, float] | None:
    """Returns the idle and the total time of all cores, in ticks; None if the system does not report them."""
    try:
        fields: Sequence[str] = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return None
    times = [*map(int, fields)]
    return float(times[3] + times[4]), float(sum(times))


def _gpu_memory_gib() -> float:
    """Returns the memory of the first GPU in GiB."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) / (1 << 30)
