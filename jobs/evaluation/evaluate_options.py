"""Options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import option
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import EstimatedJob, SizedWorkers
from riptide.jobs.evaluation.measures import METADATA_METRICS

METRICS_HELP = (
    "Metrics; default: nDCG@10 R@100 RR@10, or Acc@1 Acc@10 MRR@100 MAP@10 MAP@50 with --relevance category, which has "
    "Acc@K, MRR@K and MAP@K. Otherwise by their names in ir-measures, such as nDCG@10, AP or R(rel=2)@100; "
    f"{'; '.join(f'{metric.form}: {metric.summary}' for metric in METADATA_METRICS)}."
)


@dataclass(frozen=True, kw_only=True)
class Evaluate(SizedWorkers, EstimatedJob):
    HELP_FIRST: ClassVar = ("what to measure", "queries", "metrics", "output")
    GROUP: ClassVar = "what to measure"
    NAMED_BY: ClassVar = ("task",)
    READS: ClassVar = {"run": "runs", "source": "sources", "embeddings": "embeddings", "task": "tasks"}

    run: tuple[str, ...] = ()
    """Names of runs in the store, or files: of TREC, or of JSON lines, as `riptide search --run FILE.jsonl` writes
    them."""
    source: tuple[str, ...] = ()
    """Search sources, as search --source takes them, such as hybrid or exact:minilm. Each is searched for the queries
    of the split, as deep as the metrics need: --metrics nDCG@10 R@100 makes the run QUERIES-SPLIT-SOURCE-top100, and a
    metric without a cutoff needs 1000 hits. If the store has such a run, or the one that search makes with its
    defaults, it is measured."""
    embeddings: tuple[str, ...] = ()
    """Names of embeddings whose vectors are measured: alignment (mean squared distance of a query and a relevant
    passage), uniformity of the queries and of the passages, and cosines. unit: vectors scaled to length 1 (Topic-DPR);
    raw: vectors as they are (DPTDR), left out if the encoder normalises them."""
    QUERIES: ClassVar = Heading("queries")
    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "test"
    """The split of the queries whose judgements count; all: every query of the query set, judged or not, by metrics
    from metadata alone, such as Answer@K, or by category."""
    encoder: str | None = None
    """With --embeddings or --source: where the query encoder is now; default: where it was when the corpus was
    encoded."""
    task: str | None = None
    """With --embeddings or --source: tuned task of the queries; default: the task that the corpus was encoded for, if
    any. A sweep stands for the task that it chose."""
    METRICS: ClassVar = Heading("metrics")
    metrics: tuple[str, ...] | None = option(None, help=METRICS_HELP)
    relevance: Literal["judged", "category"] = "judged"
    """judged: passages are relevant as the split judges them; category: a passage is relevant if it has a category in
    common with the query (Topic-DPR), by the metadata of both. A query without categories has those of its judged
    passages. The expected values of a random ranking are printed too."""
    categories_field: str | None = None
    """With --relevance category: metadata field with the categories, a list of names. Default: categories."""
    median_length: int | None = None
    """Also report the median length of the first N passages of each query, in words of title and text; default: not
    reported. 10, as in GTR's analysis, shows whether a retriever prefers longer passages than another one."""
    MEASURES_OF_EMBEDDINGS: ClassVar = Heading("measures of embeddings")
    sample: int = 10_000
    """With --embeddings: measure uniformity over all pairs of N random queries, and of N random passages; with
    --relevance category, alignment and cosines too, over all pairs of such a query and such a passage."""
    seed: int = 0
    """With --embeddings: seed of the random queries and passages."""
    RATE: ClassVar = Heading("rate")
    rate_queries: int | None = None
    """With --source: also measure queries per second, from texts to hits, with the first N queries; the median of three
    rounds in this process. Default: not measured. draw rates draws it against the quality. It differs from call to
    call, so a repeated evaluation needs --overwrite."""
    rate_batch: int = option(1_000, minimum=1)
    """With --rate-queries: number of queries that are searched at once. Each batch opens the files of its source again,
    so small batches are slower here than on a server."""
    CERTIFICATION: ClassVar = Heading("recall of indexes")
    certify: tuple[str, ...] = ()
    """Sources with an index of dense embeddings, such as index:minilm, whose recall is measured against exact search,
    with a 95% confidence interval over the queries. They need no judgements: import a log of queries, and give
    --split all. Each query is also compared with all vectors, in one process and without resume: --limit bounds the
    cost."""
    certify_k: int | None = option(None, minimum=1)
    """With --certify: number of hits whose recall is measured, at most the number of passages; default: 10."""
    certify_filters: tuple[str, ...] = ()
    """With --certify: filters of passages; all queries are also searched with each of them, in the grammar of search
    --filter."""
    certify_filter_field: str | None = None
    """With --certify: metadata field of the queries that holds each one's filter, as a text or as an object; queries
    without it have none. The recall is measured by class of filters, as a server does."""
    OUTPUT: ClassVar = Heading("output")
    json: str | None = option(None, metavar="FILE")
    """Output file for the metrics, per-query values included; default: results/evaluation-SPLIT-NAMES-DIGITS.json, of
    the names of runs and embeddings. The digits are a hash of what is measured and how."""
    overwrite: bool = False
    """Replace the file of --json if it has other content."""
    limit: int | None = None
    """Measure the first N queries of the split."""
