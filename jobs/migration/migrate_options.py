"""Options of `migrate`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.migration.rank_metrics import RankMetric
from riptide.indexing.migration.requirements import Requirement
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import Common
from riptide.retriever.options import EncoderOptions

MAX_HARD = 1_000  # first hits of a query whose passages are encoded
_GATE_OPTIONS = ("to_embeddings", "switch")
_FORECAST_OPTIONS = ("metric", "sample", "hard", "seed", "cluster", "save_map", "json", "html", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Migrate(Common):
    HELP_FIRST: ClassVar = ("encoders", "queries", "forecast", "gate", "output")
    GROUP: ClassVar = "encoders"
    READS: ClassVar = {"embeddings": "embeddings", "to": "models", "task": "tasks", "to_embeddings": "embeddings"}

    to: str | None = None
    """The new encoder: a Hugging Face name, a folder, or models/NAME of the store. It may have other dimensions."""
    task: str | None = None
    """A tuned task in place of an encoder; its own options apply. With --require, it may be a model of queries alone
    over the existing embeddings, such as one of --save-map."""
    embeddings: str | None = None
    """The existing embeddings, of the old encoder; default: those of the live release, or the only ones."""
    to_embeddings: str | None = None
    """With --require: the embeddings that the new encoder has made; default: the only ones with its settings."""
    QUERIES: ClassVar = Heading("queries")
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "dev"
    """The split of the queries that measure; all, with --require overlap@K alone: every query, judged or not."""
    FORECAST: ClassVar = Heading("forecast")
    metric: str = "nDCG@10"
    """The metric of the forecast: nDCG@K, R@K or RR@K."""
    sample: int = option(2_000, minimum=100)
    """Random passages that both encoders encode. More make the maps and the estimate of unknown passages better."""
    hard: int = option(20, minimum=1)
    """First hits of the old and of the mapped search of each query that are encoded too, because they may displace
    relevant passages; at most 1,000."""
    seed: int = option(0, minimum=0)
    """Seed of the random passages and of the held-out part of the maps."""
    cluster: str | None = option(None, metavar="FILE")
    """Also estimate time and price of a whole new encoding on the machines of this YAML file, or of one of
    jobs/clusters: a100x8, h100x8, cpu32 or arm, as `encode-corpus --plan` does. Default: the time here alone, at the
    rate of the sample."""
    save_map: str | None = option(None, metavar="NAME")
    """Save the new encoder with the map that has the most common neighbours as models/NAME. It encodes queries for the
    existing embeddings: `search` and `evaluate` take it as --task NAME, and with --require and --switch, --task NAME
    serves it. Default: save none."""
    GATE: ClassVar = Heading("gate")
    require: tuple[str, ...] = option((), metavar="'METRIC >= NUMBER'")
    """Compare complete embeddings instead, and end with status 1 unless the lower end of the 95% interval is at least
    the number: 'nDCG@10 >= -0.005' is the difference, new minus old, of judged queries, for any metric of evaluate;
    'overlap@10 >= 0.8' is the share of the first 10 hits in common, also for queries without judgements."""
    switch: bool = False
    """With --require: if all requirements are met, make a release with the new embeddings live."""
    OUTPUT: ClassVar = Heading("output")
    json: str | None = option(None, metavar="FILE")
    """Output file for the values of a forecast; default: results/migration-OLD-NEW-SPLIT-DIGITS.json; of a method of
    Python: no file."""
    html: str | None = option(None, metavar="FILE")
    """Output file for a page with the forecast. Default: no page."""
    overwrite: bool = False
    """Replace the files of --json and --html. A repeated forecast differs in its times."""
    limit: int | None = option(None, minimum=1)
    """Use the first N queries of the split."""
    vectors: EncoderOptions = field(default_factory=EncoderOptions)

    def __post_init__(self) -> None:
        """Raises InputError if options do not fit each other."""
        super().__post_init__()
        RankMetric.parse(self.metric)
        if self.hard > MAX_HARD:
            raise InputError(f"{Parameter('hard', self.hard)}: expected 1 to {MAX_HARD:,}")
        names = _GATE_OPTIONS if not self.requirements else _FORECAST_OPTIONS
        extra = [each for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]
        if extra and not self.requirements:
            raise InputError(f"{Parameter(extra[0].name)} without {Parameter('require')}: is an option of the gate")
        if extra:
            raise InputError(
                f"{Parameter(extra[0].name)} with {Parameter('require')}: is an option of the forecast; leave out one "
                "of them"
            )

    @property
    def requirements(self) -> list[Requirement]:
        """The requirements of the gate. Raises InputError for one that cannot be parsed."""
        return [Requirement.parse(text) for text in self.require]
