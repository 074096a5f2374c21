"""Options of the estimates that --plan prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from riptide.base.option_fields import option


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the estimates of a plan."""

    GROUP: ClassVar = "estimates of --plan"

    cluster: str | None = option(None, metavar="FILE")
    """With --plan: estimate time and price for the machines of this YAML file, or of one of jobs/clusters: a100x8,
    h100x8, cpu32 or arm. Copy one, and edit its prices. Default: this machine."""
    calibrate: bool = False
    """With --plan: measure this machine first, in at most 30 seconds, and keep the figures for later plans. Other
    programs make it too slow, of which a warning tells."""
    expect: dict[str, str] = field(default_factory=dict)
    """With --plan: estimate for data of these sizes, without reading the store or any file. Pairs of a name and a
    number: passages, passage_tokens (mean, default 140), passage_bytes (mean, default 650), queries, query_tokens
    (mean, default 12), dimensions (of embeddings of an unknown encoder, default 768)."""

    @property
    def is_used(self) -> bool:
        """Whether one of the options is set."""
        return self.cluster is not None or self.calibrate or bool(self.expect)
