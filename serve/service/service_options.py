"""Options of a service, in one process and on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import OptionGroup, option
from riptide.retriever.options import RerankPrecision


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(RerankPrecision, OptionGroup):
    """The queues, the threads, the warm-up and the precision of the re-ranker of a service."""

    GROUP: ClassVar = "processes"

    threads: int | None = option(None, minimum=1)
    """Threads of the encoder and of each search. Default: one for each core; on Ray Serve one for each CPU of a
    replica, and one with --replicas or --row-ranges."""
    batch: int = option(32, minimum=1)
    """Maximum queries per batch."""
    queue: int = option(256, minimum=1)
    """Maximum queries that wait; more get 429."""
    warm_up_s: float = option(300.0, minimum=0)
    """Maximum seconds of the warm-up (reading files, running queries) before a release is ready; 0: no warm-up."""
    compile: Literal["auto", "never"] = "never"
    """auto: compile the encoder if that helps (not BERT-family models on CPU); adds half a minute to the start."""

    examples: str | None = option(None, metavar="FILE")
    """Queries that the page offers to try: a text file with one per line, or queries/NAME of the store, of which it
    takes six. Everyone who may search sees them. Default: none."""
