"""The work of a job, its time and price on a machine, and warnings about what will hurt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from riptide.jobs.planning.machine import GIB, Machine
from riptide.jobs.planning.requests import NO_REQUESTS, Requests
from riptide.process.memory import format_bytes

FEW_UNITS_PER_DEVICE = 4  # with fewer, the devices that end first wait for a long time
MANY_PARTS = 100_000  # the records of as many parts take minutes to list and to read
LONG_UNIT_S = 3600  # an interrupted job repeats at most this part of its work
LARGE_SHARE = 0.9  # of the memory or of the disk


@dataclass(frozen=True)
class Estimate:
    """What the pending work of a job takes.

    Attributes:
        noun: What its rows are.
        rows: Pending rows.
        parts: Parts that it writes.
        units: Pieces of work that may run at the same time.
        start_s: Seconds until the work begins: imports, and the start of a model.
        serial_s: Seconds of work that one thread does while nothing else runs.
        limit_s: Seconds after which the work ends in any case.
        tokens: Tokens that are computed.
        tokenised: Tokens that are made of texts.
        forward_flops, training_flops: Floating-point operations of backbones, without and with a backward pass.
        exact_flops: Operations to compare vectors.
        core_s: Other seconds of one core.
        parsed_bytes, indexed_bytes: Text that an import parses; text that BM25 indexes.
        devices: Devices that the work uses at most; None: as many as it has units.
        read_bytes, written_bytes: Bytes of the files of parts.
        requests: Requests to an object store.
        memory_bytes: The largest memory of a process.
        mapped_bytes: Bytes of the files that a server maps, and reads before it answers.
        gpu_memory_bytes: The largest memory of a GPU; 0: the work uses no GPU.
        local_bytes: Bytes on the disk of a node, for parts that it fetches from an object store.
        is_sized: Whether the rows are those of existing data; otherwise they are expected.
        has_exact_bytes: Whether the bytes of an existing row are known exactly.
        has_end: Whether the job ends; False: it is a server, whose estimate is that of its start.
    """

    noun: str
    rows: int
    parts: int
    units: int = 1
    start_s: float = 0.0
    serial_s: float = 0.0
    limit_s: float = math.inf
    tokens: float = 0.0
    tokenised: float = 0.0
    forward_flops: float = 0.0
    training_flops: float = 0.0
    exact_flops: float = 0.0
    core_s: float = 0.0
    parsed_bytes: float = 0.0
    indexed_bytes: float = 0.0
    devices: int | None = None
    read_bytes: int = 0
    written_bytes: int = 0
    requests: Requests = NO_REQUESTS
    memory_bytes: int = 0
    mapped_bytes: int = 0
    gpu_memory_bytes: int = 0
    local_bytes: int = 0
    is_sized: bool = True
    has_exact_bytes: bool = True
    has_end: bool = True

    def seconds(self, machine: Machine) -> float:
        """Returns the seconds that the work takes on a machine on which nothing else runs."""
        return self.start_s + self.work_seconds(machine)

    def work_seconds(self, machine: Machine) -> float:
        """Returns the seconds of the work without its start.

        Units have one size, so the devices are busy for as many rounds as the busiest one has units. On a GPU, texts
        are tokenised while another part is computed; on a CPU both take turns.
        """
        rates = machine.throughput
        model = self.forward_flops / (rates.forward_tflops.value * 1e12)
        model += self.training_flops / (rates.training_tflops.value * 1e12)
        model *= _rounds(self.units, min(machine.devices, self.devices or machine.devices))
        cores = _rounds(self.units, machine.nodes) / machine.cores
        tokenising = cores * self.tokenised / rates.tokens_per_s.value
        other = cores * (
            self.core_s
            + self.exact_flops / (rates.exact_gflops.value * 1e9)
            + self.parsed_bytes / (rates.parse_mb_per_s.value * 1e6)
            + self.indexed_bytes / (rates.lucene_mb_per_s.value * 1e6)
        )
        disk = (self.read_bytes + self.written_bytes) / (rates.disk_mb_per_s.value * 1e6)
        disk /= machine.nodes if self.has_end else 1  # each node of a service reads the files that it serves
        work = (max(model, tokenising) if machine.gpus else model + tokenising) + other + disk + self.serial_s
        return min(work, self.limit_s)

    def price(self, machine: Machine) -> float | None:
        """Returns the price of the nodes for the time, and of the requests; None without a price."""
        if (price := machine.price) is None:
            return None
        hours = self.seconds(machine) / 3600
        requests = self.requests.writes * price.per_million_writes + self.requests.reads * price.per_million_reads
        return machine.nodes * hours * price.per_hour + requests / 1e6

    def describe_cost(self, machine: Machine) -> str:
        """Returns the time and the price on a machine as text."""
        price = "" if machine.price is None else f", {self.price(machine):,.2f} {machine.price.currency}"
        return f"{format_seconds(self.seconds(machine))}{price}"

    def lines(self, machine: Machine, *, is_remote: bool) -> list[str]:
        """Returns lines about the work, its memory, time and price on a machine, and warnings.

        Args:
            machine: The machine.
            is_remote: Whether the store is in an object store.
        """
        flops = self.forward_flops + self.training_flops
        of_backbone = f"; {self.tokens:,.0f} tokens, {format_flops(flops)}" if flops else ""
        about = "" if self.is_sized else "about "
        roughly = "" if self.is_sized and self.has_exact_bytes else "about "
        in_parts = f" in {self.parts:,} {'parts' if self.parts != 1 else 'part'}" if self.parts else ""
        writes = f", writes {roughly}{format_bytes(self.written_bytes)} ({self.written_bytes:,} bytes)"
        lines = [
            f"work     {about}{self.rows:,} {self.noun}{in_parts}{of_backbone}",
            f"files    reads {roughly}{format_bytes(self.read_bytes)}{writes if self.has_end else ''}",
        ]
        if is_remote:
            lines.append(f"requests {self.requests.writes:,} writes, {self.requests.reads:,} reads and lists, about")
        gpu = f", {format_bytes(self.gpu_memory_bytes)} on a GPU" if machine.gpus and self.gpu_memory_bytes else ""
        disk = self.local_bytes if is_remote else self.written_bytes
        mapped = f", and {format_bytes(self.mapped_bytes)} of mapped files" if self.mapped_bytes else ""
        lines.append(
            f"memory   about {format_bytes(self.memory_bytes)} for a process{mapped}{gpu}; "
            f"disk {format_bytes(disk)} on a node"
        )
        most = "at most " if self.start_s + self.limit_s <= self.seconds(machine) else ""
        title = "time    " if self.has_end else "start   "
        lines.append(f"{title} about {most}{format_seconds(self.seconds(machine))} on {machine.describe()}")
        if (price := machine.price) is not None:
            cost = self.price(machine) if self.has_end else machine.nodes * price.per_hour
            total = f"{cost:,.2f} {price.currency}{'' if self.has_end else ' an hour'}"
            lines.append(f"price    about {total} ({price.source}, {price.date}: edit yours)")
        return [*lines, *self.warnings(machine, is_remote=is_remote)]

    def warnings(self, machine: Machine, *, is_remote: bool) -> list[str]:
        """Returns a line per problem that the work will meet on a machine."""
        problems = []
        memory = machine.memory_gib * GIB
        if self.mapped_bytes and self.memory_bytes + self.mapped_bytes > LARGE_SHARE * memory >= self.memory_bytes:
            problems.append(
                f"{format_bytes(self.mapped_bytes)} of mapped files do not fit into the memory of a node, "
                f"{format_bytes(int(memory))}, so searches read the disk: use larger nodes, or more row ranges"
            )
        if self.memory_bytes > LARGE_SHARE * memory:
            problems.append(
                f"a process takes about {format_bytes(self.memory_bytes)} of memory, and a node has "
                f"{format_bytes(int(memory))}: use nodes with more memory, or more shards"
            )
        gpu_memory = machine.gpu_memory_gib * GIB
        if machine.gpus and self.gpu_memory_bytes > LARGE_SHARE * gpu_memory:
            problems.append(
                f"the model takes about {format_bytes(self.gpu_memory_bytes)} on a GPU, and a GPU has "
                f"{format_bytes(int(gpu_memory))}: use a smaller batch, activation checkpointing or larger GPUs"
            )
        disk = self.local_bytes if is_remote else self.written_bytes
        if disk > LARGE_SHARE * machine.disk_gib * GIB:
            problems.append(
                f"a node needs about {format_bytes(disk)} of disk, and has "
                f"{format_bytes(int(machine.disk_gib * GIB))} free"
            )
        if self.forward_flops + self.training_flops and not machine.gpus and self.work_seconds(machine) > 86_400:
            problems.append(
                f"without a GPU the backbone takes {format_seconds(self.work_seconds(machine))}: use GPUs "
                "(jobs/clusters has examples), more nodes, or a smaller backbone"
            )
        if (
            self.tokens
            and self.devices is None
            and machine.devices > 1
            and self.units < FEW_UNITS_PER_DEVICE * machine.devices
        ):
            problems.append(
                f"{self.units:,} units of work for {machine.devices} devices: some of them will wait; import with a "
                "smaller part_size"
            )
        if self.parts > MANY_PARTS:
            problems.append(f"{self.parts:,} parts take long to list: import with a larger part_size")
        if self.units and (longest := self.work_seconds(machine) * machine.devices / self.units) > LONG_UNIT_S:
            problems.append(
                f"a part takes about {format_seconds(longest)}, which a lost worker repeats: import with a smaller "
                "part_size"
            )
        return [f"warning: {problem}" for problem in problems]


def _rounds(units: int, workers: int) -> float:
    """Returns the share of the work of all units that the busiest of some workers does."""
    return math.ceil(units / workers) / units if units > 0 else 0.0


NOTHING = Estimate("rows", 0, 0, units=0)
"""The estimate of a job that has nothing to do."""

# Fields that are added in a sum; of LARGEST the largest counts, as the jobs run one after the other.
ADDED = (
    *("rows", "parts", "start_s", "serial_s", "limit_s", "tokens", "tokenised", "forward_flops", "training_flops"),
    *("exact_flops", "core_s", "parsed_bytes", "indexed_bytes", "read_bytes", "written_bytes", "local_bytes"),
)
LARGEST = ("memory_bytes", "gpu_memory_bytes")


def sum_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the estimate of jobs of one kind that run one after the other, such as the runs of a sweep."""
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in estimates) for name in ADDED}
    largest = {name: max(getattr(each, name) for each in estimates) for name in LARGEST}
    requests = sum((each.requests for each in estimates), NO_REQUESTS)
    return replace(estimates[0], **sums, **largest, requests=requests)


def total_line(planned: Sequence[tuple[Estimate, Machine]], num_unknown: int) -> str:
    """Returns a line with the time and price of all jobs of a chain.

    Args:
        planned: The estimate of each job, and its machine.
        num_unknown: Number of further jobs whose estimate is unknown.
    """
    seconds = sum(each.seconds(machine) for each, machine in planned)
    prices = [price for each, machine in planned if (price := each.price(machine)) is not None]
    written = format_bytes(sum(each.written_bytes for each, _ in planned))
    machine = planned[0][1]
    cost = f", {sum(prices):,.2f} {machine.price.currency}" if machine.price is not None else ""
    unknown = f"; and {num_unknown} {'steps' if num_unknown > 1 else 'step'} of unknown time" if num_unknown else ""
    return f"estimate {format_seconds(seconds)}{cost}, {written} written, on {machine.describe()}{unknown}"


def format_flops(flops: float) -> str:
    """Formats a number of floating-point operations, for example 3.1 PFLOP."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12)):
        if flops >= size:
            return f"{flops / size:,.1f} {unit}"
    return f"{flops / 1e9:,.1f} GFLOP"


def format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 10 * 86_400 else f"{seconds / 86_400:,.0f} days"
