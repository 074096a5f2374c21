"""Descriptions of machines: this one, or those of a YAML file with throughputs and prices.

title: 8 x A100
nodes: 1
cores: 96                       # of a node, as all figures below
memory_gib: 1152
disk_gib: 8000
gpus: 8
gpu_memory_gib: 80
price: {per_hour: 14.75, currency: USD, source: "EC2 Capacity Blocks", date: 2024-12-01}
throughput:
  forward_tflops: {value: 125, source: "40% of the peak"}
  …
"""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.base.yaml_files import read_yaml
from riptide.process.memory import format_bytes

GIB = 1 << 30
CLUSTERS = Path(__file__).resolve().parents[1] / "clusters"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rate(_Strict):
    """A throughput, and where the figure is from."""

    value: Positive
    source: str = Field(min_length=1)


class Throughput(_Strict):
    """The throughputs of a node.

    Attributes:
        forward_tflops: Forward passes of a backbone, in 10^12 floating-point operations per second: of one GPU, or of
            all cores of a node without GPUs.
        training_tflops: Forward and backward passes, in the same units.
        exact_gflops: Comparisons of vectors in an index or by exact search, in 10^9 operations per second of a core.
        tokens_per_s: Tokens per second and core that a tokenizer makes.
        parse_mb_per_s: Raw text per second and core that an import reads and writes, in MB.
        lucene_mb_per_s: Text per second and core that BM25 indexes, in MB.
        disk_mb_per_s: Bytes per second of a node that a store takes and gives, in MB.
    """

    forward_tflops: Rate
    training_tflops: Rate
    exact_gflops: Rate
    tokens_per_s: Rate
    parse_mb_per_s: Rate
    lucene_mb_per_s: Rate
    disk_mb_per_s: Rate


class Price(_Strict):
    """The price of a node, which the user edits.

    Attributes:
        per_hour: Of one node.
        currency: Its currency.
        source: Whose price it is.
        date: The day on which it was looked up.
        per_million_writes, per_million_reads: Of requests to an object store.
    """

    per_hour: NotNegative
    currency: str
    source: str = Field(min_length=1)
    date: datetime.date
    per_million_writes: NotNegative = 0.0
    per_million_reads: NotNegative = 0.0


class Machine(_Strict):
    """Equal nodes. Attributes: see the docstring of the module. `price` is None for this machine."""

    title: str
    nodes: int = Field(ge=1)
    cores: int = Field(ge=1)
    memory_gib: Positive
    disk_gib: Positive
    gpus: int = Field(0, ge=0)
    gpu_memory_gib: NotNegative = 0.0
    price: Price | None = None
    throughput: Throughput

    @property
    def devices(self) -> int:
        """The number of devices that run backbones: all GPUs, or all nodes if they have none."""
        return self.nodes * (self.gpus or 1)

    def describe(self) -> str:
        """Returns a description of the nodes in one line."""
        gpus = f", {self.gpus} GPUs of {self.gpu_memory_gib:g} GiB" if self.gpus else ""
        nodes = f"{self.nodes:,} nodes, each with " if self.nodes > 1 else ""
        memory = format_bytes(int(self.memory_gib * GIB))
        return f"{self.title}: {nodes}{self.cores} cores, {memory} of memory{gpus}"


def read_cluster(name: str) -> Machine:
    """Reads a file that describes a cluster.

    Args:
        name: The file, or the name of one in jobs/clusters, without .yaml.

    Raises:
        InputError: If the file cannot be read, lacks a figure or a price, or has an unknown key or a bad figure.
    """
    path = CLUSTERS / f"{name}.yaml" if (CLUSTERS / f"{name}.yaml").is_file() else expand_home(name)
    known = ", ".join(sorted(each.stem for each in CLUSTERS.glob("*.yaml")))
    content = read_yaml(str(path), f"{Parameter('cluster')} expects the YAML file of a cluster, or one of {known}")
    try:
        machine = Machine.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{path}: {_describe(error)}") from None
    if machine.price is None:
        raise InputError(
            f"{path}: found no price; expected `price: {{per_hour: X, currency: USD, source: TEXT, "
            "date: YYYY-MM-DD}}`, 0 for your own machines"
        )
    if machine.gpus and not machine.gpu_memory_gib:
        raise InputError(f"{path}: gpus: {machine.gpus} without gpu_memory_gib: expected the memory of a GPU in GiB")
    return machine


def _describe(error: ValidationError) -> str:
    """Returns the first mistake of a file in one line."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"])) or "the file"
    if first["type"] == "missing":
        return f"{key}: missing; expected it, as in the files of jobs/clusters"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; known are {', '.join(_known_keys(first['loc']))}"
    return f"{key}: found {first['input']!r}; {first['msg'][:1].lower()}{first['msg'][1:]}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys that are allowed where an unknown key was found."""
    inner: dict[str, type[BaseModel]] = {"throughput": Throughput, "price": Price}
    if len(location) > 2:
        return list(Rate.model_fields)
    model: type[BaseModel] = inner.get(str(location[0]), Machine) if len(location) == 2 else Machine
    return [*model.model_fields]


def local_hardware(folder: Path) -> dict[str, float]:
    """Returns cores, memory and free disk of this machine, as fields of a Machine.

    Args:
        folder: The folder in which the store is, or will be.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "memory_gib": memory / GIB, "disk_gib": max(shutil.disk_usage(folder).free, 1) / GIB}
