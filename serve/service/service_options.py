"""Options of a service, in one process and on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter
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
    certify: float = option(0.0, share=True)
    """Share, below 1, of the searches in an index that are searched again exactly, in idle time, to estimate their
    recall; 0: none. The estimates are in /v1/info, in the metrics and on the page."""
    certify_recall: float | None = option(None, share=True)
    """With --certify: recall below which a line is logged and riptide_recall_below_target is 1, if the whole interval
    of an estimate is below it. Default: none."""
    certify_raise: int | None = option(None, minimum=1)
    """With --certify-recall: maximum nprobe (of HNSW: ef_search) to which the server raises that of an index, by half
    at a time, for a task and mode whose recall is below that target. Searches get slower. Default: none is raised."""
    compile: Literal["auto", "never"] = "never"
    """auto: compile the encoder if that helps (not BERT-family models on CPU); adds half a minute to the start."""

    examples: str | None = option(None, metavar="FILE")
    """Queries that the page offers to try: a text file with one per line, or queries/NAME of the store, of which it
    takes six. Everyone who may search sees them. Default: none."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that its field does not allow, and for an option that needs another one."""
        super().__post_init__()
        if self.certify_recall is not None and not self.certify:
            raise InputError(
                f"{Parameter('certify_recall', self.certify_recall)}: no search is certified; give "
                f"{Parameter('certify')} too, a share of the searches such as 0.01"
            )
        if self.certify_raise is not None and self.certify_recall is None:
            raise InputError(
                f"{Parameter('certify_raise', self.certify_raise)}: there is no recall to reach; give "
                f"{Parameter('certify_recall')} too, such as 0.95"
            )
