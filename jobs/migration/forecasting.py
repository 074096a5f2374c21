"""Makes the forecast of a migration: the quality of the old search, of mapped queries, and of a whole new encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.corpus_encoding import describe_broken_texts, similarity_of
from riptide.indexing.embeddings.dense_embeddings import DENSE
from riptide.indexing.embeddings.stored_encoder import StoredEncoder
from riptide.indexing.measures.metrics import Interval
from riptide.indexing.migration.forecast import (
    JudgedQuery,
    difference_interval,
    expected_values,
    judged_queries,
    values_of_hits,
)
from riptide.indexing.migration.migration_sample import Migration, check_corpus, fit_query_maps
from riptide.indexing.migration.rank_metrics import RankMetric
from riptide.indexing.migration.space_maps import SpaceMap, best_map
from riptide.indexing.queries.queries import ALL, Queries
from riptide.jobs.common.printing import WARNING, say
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.cluster_cost import ClusterCost, estimate_encoding_cost
from riptide.jobs.migration.migrate_options import Migrate

MAX_FITTED_QUERIES = 1_000  # queries on which maps are fitted, in addition to the passages of the sample
TRAIN = "train"  # the split whose queries measure nothing, unless it is the measured one
VECTOR_BYTES = 2  # of a dimension of a stored vector
OVERLAP_EXAMPLE = "overlap@10 >= 0.8"  # a requirement that needs no judgements


@dataclass(frozen=True)
class Choice:
    """An option of the migration with its quality and cost.

    Attributes:
        name: Its name.
        value: The mean of the metric.
        difference: The mean difference from the old search, with its 95% interval; None of the old search itself.
        passages: Passages that are encoded.
        size_bytes: Bytes of the vectors that are written.
        seconds: The time of their encoding, at the rate of the sample on this machine.
        on_cluster: Its time and price on a cluster; None: it was not requested, or nothing is encoded.
    """

    name: str
    value: float
    difference: Interval | None
    passages: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    on_cluster: ClusterCost | None = None


@dataclass(frozen=True)
class Forecast:
    """The forecast of a migration.

    Attributes:
        old: Name of the old embeddings.
        new: The new encoder.
        queries: Key of the query set.
        split: The split.
        metric: The metric.
        num_queries: Queries with a relevant passage.
        num_passages: Passages of the corpus.
        num_random: Random passages that the new encoder has encoded.
        num_chosen: Judged passages and first hits that it has encoded.
        num_fitted: Random passages and queries on which the maps were fitted.
        maps: The maps, with their quality on texts that they were not fitted on.
        choices: The old search, a choice for each map, and the whole new encoding.
    """

    old: str
    new: str
    queries: str
    split: str
    metric: str
    num_queries: int
    num_passages: int
    num_random: int
    num_chosen: int
    num_fitted: int
    maps: tuple[SpaceMap, ...]
    choices: tuple[Choice, ...]

    @property
    def best_map(self) -> SpaceMap:
        return best_map(list(self.maps))


def read_judged(both: BothEncoders, options: Migrate) -> tuple[Queries, list[str], list[str], list[JudgedQuery]]:
    """Returns the query set, and the ids, texts and relevant passages of the queries that have any.

    Raises:
        InputError: If the split has no judgements, or no query has a relevant passage of the corpus.
    """
    check_corpus(both.corpus)
    queries = Queries.open(both.store, options.queries)
    if options.split == ALL or options.split not in queries.splits:
        have = ", ".join(queries.splits) or "none"
        raise InputError(
            f"{Parameter('split', options.split)}: {queries.artifact.key} has no judgements of it, which a forecast "
            f"needs; name a split with judgements ({have}), or encode the corpus and give {Parameter('split', ALL)} "
            f"{Parameter('require', repr(OVERLAP_EXAMPLE))}"
        )
    table, qrels = queries.qrels(options.split), dict[str, dict[str, int]]()
    for query, passage, grade in zip(*(table[name].to_pylist() for name in table.column_names[:3]), strict=True):
        qrels.setdefault(query, {})[passage] = grade
    ids, texts = queries.split(options.split, options.limit)
    passages = sorted({passage for id in ids for passage in qrels[id]})
    rows = dict(zip(passages, both.corpus.rows_of(passages).tolist(), strict=True))
    relevant = judged_queries(ids, qrels, rows)
    has_relevant = [bool((query.rows >= 0).any()) for query in relevant]
    if not any(has_relevant):
        raise InputError(
            f"{queries.artifact.key} {options.split}: no query has a relevant passage of the corpus, so nothing can be "
            "measured; name another split"
        )
    return (
        queries,
        list(compress(ids, has_relevant)),
        list(compress(texts, has_relevant)),
        list(compress(relevant, has_relevant)),
    )


def fitting_texts(queries: Queries, split: str) -> list[str]:
    """Returns queries to fit maps on, so that a map can be measured with every split but `train`.

    Queries that any split but `train` judges are excluded, and all of the measured split, also by their texts.

    Args:
        queries: The query set.
        split: The measured split.
    """
    judged = {
        id
        for name in queries.splits
        if name != TRAIN or name == split
        for id in queries.qrels(name)["query_id"].to_pylist()
    }
    pairs = list(zip(*queries.split(ALL), strict=True))
    measured = {text for id, text in pairs if id in judged}
    return [text for _, text in pairs if text not in measured][:MAX_FITTED_QUERIES]


def open_encoder(both: BothEncoders) -> StoredEncoder:
    """Returns the new encoder, which loads its model when it is first used."""
    dim, similarity = both.settings["dim"], similarity_of(both.settings)
    return StoredEncoder(both.spec, DENSE, dim=dim, similarity=similarity)


def make_forecast(both: BothEncoders, options: Migrate, old_encoder: StoredEncoder, encoder: StoredEncoder) -> Forecast:
    """Encodes a sample with the new encoder, fits the maps, and measures the choices."""
    on_cluster = estimate_encoding_cost(both, options)
    queries, _, texts, judged = read_judged(both, options)
    metric = RankMetric.parse(options.metric)
    warn_of_broken(encoder, texts)
    migration = Migration(both.corpus, both.old, encoder)
    fitted = fitting_texts(queries, options.split)
    old_queries, new_queries = (each.encode([*texts, *fitted]) for each in (old_encoder, encoder))
    number = len(texts)
    sample = migration.encode(migration.draw(options.sample, options.seed))
    maps = fit_query_maps(sample, new_queries[number:], old_queries[number:], options.seed)
    depth = min(max(options.hard, metric.cutoff), len(both.corpus))
    mapped_queries = [each.apply(new_queries[:number]) for each in maps]
    old_hits, *hits = migration.search([old_queries[:number], *mapped_queries], depth)
    mapped_hits = {each.name: rows for each, rows in zip(maps, hits, strict=True)}
    chosen = best_map(maps)
    hard = [hits[:, : options.hard] for hits in (old_hits, mapped_hits[chosen.name])]
    passages, whole = migration.known_passages(sample, judged, hard)
    old_values = values_of_hits(metric, old_hits, judged)
    choices = [Choice(f"keep {both.old.name}", float(old_values.mean()), None)]
    for each in maps:
        values = values_of_hits(metric, mapped_hits[each.name], judged)
        choices.append(Choice(f"map ({each.name})", float(values.mean()), difference_interval(values, old_values)))
    expected = expected_values(metric, new_queries[:number], whole.new, passages, judged)
    num_passages = len(both.corpus)
    choices.append(
        Choice(
            "encode all",
            float(expected.values.mean()),
            difference_interval(expected.values, old_values, expected),
            num_passages,
            num_passages * encoder.dim * VECTOR_BYTES,
            whole.seconds / len(whole.rows) * num_passages,
            on_cluster,
        )
    )
    num_random = int(passages.is_random.sum())
    return Forecast(
        old=both.old.name,
        new=both.spec.named_by[1],
        queries=queries.artifact.key,
        split=options.split,
        metric=options.metric,
        num_queries=number,
        num_passages=num_passages,
        num_random=num_random,
        num_chosen=len(passages.rows) - num_random,
        num_fitted=len(sample.rows) + len(fitted),
        maps=tuple(maps),
        choices=tuple(choices),
    )


def warn_of_broken(encoder: StoredEncoder, texts: Sequence[str]) -> None:
    """Warns if the tokenizer of the new encoder breaks many queries into fragments, as of another language."""
    query_encoder = encoder.encoder_of("query")
    is_broken = query_encoder.broken_texts(query_encoder.tokenize(list(texts), side="query"))
    example = next(compress(texts, is_broken), "")
    name, count = "the tokenizer of the new encoder", int(is_broken.sum())
    if warning := describe_broken_texts(name, count, len(texts), "query", example):
        say(f"{WARNING}{warning}")
