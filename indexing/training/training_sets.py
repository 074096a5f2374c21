"""Opens the training sets of a run: judged queries of one or more stores, with or without mined negatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.categories import categories_of_rows
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.negatives import check_has_negatives, mined_corpus, passage_reader, read_training_data
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store
from riptide.indexing.training.named_values import parse_named_values
from riptide.retriever.training.mixture_schedule import Batches
from riptide.retriever.training.mixture_sets import TrainingSet, draw_queries, join_training_sets
from riptide.retriever.training.training_data import TrainingData

NO_NEGATIVES = "none"  # the value of `negatives` for training on judged pairs alone


@dataclass(frozen=True, kw_only=True)
class TrainingSetSpec:
    """The specification of a training set: the names of its artifacts, and how training uses it.

    Attributes:
        queries: Name of the query set.
        split: Its split with the queries.
        negatives: Name of the mined negatives; None: the judged pairs alone.
        weight: How often a query comes, relative to queries of other sets.
        task: Name of the task; "": that of the query set.
        store: URL or folder of the store of the query set, its negatives and their corpus; "": the store of the run.
        size: Use at most N queries, drawn at random, the same ones in every run; None: all.
        embeddings: Name of the embeddings from which vectors of passages are read; None: the only ones that fit.
        dev: A split of the query set that also measures quality during training; None: it does not.
    """

    queries: str
    split: str = "train"
    negatives: str | None = None
    weight: float = 1.0
    task: str = ""
    store: str = ""
    size: int | None = None
    embeddings: str | None = None
    dev: str | None = None


def resolve_stores(store: Store, specs: Sequence[TrainingSetSpec]) -> tuple[TrainingSetSpec, ...]:
    """Returns the training sets with the URL of each store in one form, so that all processes read the same stores.

    Args:
        store: The store of the run.
        specs: The training sets.

    Raises:
        InputError: If there is no store.
    """
    urls = {_canonical_url(store.url): ""}
    result = []
    for spec in specs:
        url = Store(spec.store).require_not_empty().url if spec.store else store.url
        result.append(replace(spec, store=urls.setdefault(_canonical_url(url), url)))
    return tuple(result)


def _canonical_url(url: str) -> str:
    """Returns the absolute path of a local folder with links resolved; a URL with a scheme unchanged."""
    return url if "://" in url else str(Path(url).resolve())


def parse_training_set(text: str) -> TrainingSetSpec:
    """Parses `queries=NAME,negatives=NAME,split=NAME,weight=N,task=NAME,store=URL` as a training set.

    `size=N`, `embeddings=NAME` and `dev=SPLIT` may be added; `queries` is required. Without `negatives`, or with
    `negatives=none`, the judged pairs are used alone.

    Raises:
        InputError: If the text has another form.
    """
    form = f"{Parameter('also_train', repr(text))}: "
    values = parse_named_values(text, [field.name for field in fields(TrainingSetSpec)], form)
    if "queries" not in values:
        raise InputError(f"{form}expected queries=NAME, the query set to train on")
    try:
        weight = float(values.pop("weight", "1"))
    except ValueError:
        raise InputError(f"{form}weight must be a number") from None
    size = values.pop("size", None)
    if size is not None and not (size.isdecimal() and int(size)):
        raise InputError(f"{form}size must be a number of queries, at least 1")
    negatives = values.pop("negatives", NO_NEGATIVES)
    return TrainingSetSpec(
        **values,
        negatives=None if negatives == NO_NEGATIVES else negatives,
        weight=weight,
        size=None if size is None else int(size),
    )


@dataclass(frozen=True)
class SetCorpus:
    """A corpus of one or more training sets, with its store and embeddings.

    Attributes:
        number: The number of the first set over it, from 1.
        store: URL of its store; "": the store of the run.
        corpus: The corpus, up to the last generation that a set needs.
        embeddings: Name of the embeddings from which vectors of its passages are read; None: the only ones that fit.
    """

    number: int
    store: str
    corpus: Corpus
    embeddings: str | None


@dataclass(frozen=True, eq=False)
class OpenSets:
    """The opened training sets of a run.

    Attributes:
        queries: The query set of each set.
        corpora: The corpora of the sets, in the order of their rows in the training data; the first set's comes first.
        data: The training data.
        inputs: The query sets and negatives by role: "queries" and "negatives" of the first set, "queries:2" and
            "negatives:2" of the second, and so on. A set of another store has its corpus too, and URLs as keys.
        places: For each set, the position of its corpus in `corpora`.
    """

    queries: tuple[Queries, ...]
    corpora: tuple[SetCorpus, ...]
    data: TrainingData
    inputs: dict[str, Artifact | ArtifactReference]
    places: tuple[int, ...]

    @property
    def corpus(self) -> Corpus:
        """The corpus of the first training set."""
        return self.corpora[0].corpus

    def fingerprints(self) -> dict[str, str]:
        """Returns the fingerprint of each input by role."""
        return {role: artifact.fingerprint for role, artifact in self.inputs.items()}

    def check(self, fingerprints: Mapping[str, str]) -> None:
        """Raises InputError unless the inputs are those that another process has opened.

        Args:
            fingerprints: The fingerprints of the other process.

        Raises:
            InputError: If an input differs.
        """
        for role, artifact in self.inputs.items():
            if artifact.fingerprint != fingerprints[role]:
                raise InputError(
                    f"{artifact.key}: this node has {artifact.fingerprint[:12]}, the node of the job "
                    f"{fingerprints[role][:12]}: give stores that all nodes share, and leave them unchanged"
                )


def open_sets(
    store: Store,
    specs: Sequence[TrainingSetSpec],
    *,
    limit: int | None,
    batches: Batches,
    weighted: bool,
    teacher: bool = False,
    categories_field: str | None = None,
) -> OpenSets:
    """Opens and checks training sets, and joins their data.

    Sets of one store are over the same state of its corpus: the last one that a set of them needs.

    Args:
        store: The store of the run.
        specs: The training sets, at least one.
        limit: Use only the first N queries of each split; None: all.
        batches: Whether a batch mixes the sets.
        weighted: Read the scores of the judgements as sampling weights of the positives.
        teacher: Read the scores of a re-ranker too, for distillation.
        categories_field: Read the categories of the positives from this metadata field; None: do not read them.

    Raises:
        InputError: If an artifact is missing or does not fit the others, if a set has no query to train on, if sets of
            one corpus name different embeddings, or if training by categories has several sets, a positive without
            categories, or no pair of positives without a common one.
    """
    if categories_field is not None and len(specs) > 1:
        raise InputError(
            f"{Parameter('positives', 'categories')}, {Parameter('also_train')}: categories are those of one training "
            "set; leave out one of them"
        )
    inputs: dict[str, Artifact | ArtifactReference] = {}
    artifacts: list[tuple[TrainingSetSpec, Queries, Artifact | None]] = []
    corpora: dict[str, Corpus] = {}  # URL of the store -> corpus
    for spec in specs:
        set_store = Store(spec.store) if spec.store else store
        queries = Queries.open(set_store, spec.queries)
        negatives = None if spec.negatives is None else set_store.open("negatives", spec.negatives)
        artifacts.append((spec, queries, negatives))
        needed = mined_corpus(set_store, negatives or queries.artifact)
        corpora[spec.store] = max(corpora.get(spec.store, needed), needed, key=lambda corpus: len(corpus.generations))
    sets, places = [], []
    by_state: dict[str, SetCorpus] = {}
    for number, (spec, queries, negatives) in enumerate(artifacts, 1):
        corpus = corpora[spec.store]
        by_role = {"queries": queries.artifact, "negatives": negatives}
        by_role |= {"corpus": corpus.generations[-1]} if spec.store else {}
        suffix = "" if number == 1 else f":{number}"
        for role, artifact in by_role.items():
            if artifact is not None:
                inputs[role + suffix] = (
                    ArtifactReference(artifact.url, artifact.fingerprint) if spec.store else artifact
                )
        data = _set_data(spec, corpus, queries, negatives, limit=limit, weighted=weighted, teacher=teacher)
        state = corpus.generations[-1].fingerprint
        known = by_state.setdefault(state, SetCorpus(number, spec.store, corpus, spec.embeddings))
        if spec.embeddings not in (None, known.embeddings):
            raise InputError(
                f"training set {spec.task or spec.queries}: embeddings {spec.embeddings}, and the first set of the "
                f"same corpus has {known.embeddings or 'none named'}: name the same"
            )
        data = draw_queries(data, spec.size)
        if categories_field is not None:
            data = with_categories(data, corpus, categories_field)
        sets.append(TrainingSet(spec.task or spec.queries, data, spec.weight, corpus=state))
        places.append(list(by_state).index(state))
    queries_of_sets = tuple(queries for _, queries, _ in artifacts)
    data = join_training_sets(sets, batches)
    return OpenSets(queries_of_sets, tuple(by_state.values()), data, inputs, tuple(places))


def _set_data(
    spec: TrainingSetSpec,
    corpus: Corpus,
    queries: Queries,
    negatives: Artifact | None,
    *,
    limit: int | None,
    weighted: bool,
    teacher: bool,
) -> TrainingData:
    """Reads the training data of a set: queries with mined negatives, or judged pairs alone."""
    if negatives is not None:
        return read_training_data(corpus, queries, spec.split, negatives, limit, weighted=weighted, teacher=teacher)
    if teacher:
        raise InputError(
            f"training set {spec.task or spec.queries}: judged pairs alone have no teacher scores, "
            f"which a distillation loss needs: name negatives, or another {Parameter('loss')}"
        )
    return read_judged_data(corpus, queries, spec.split, limit, weighted=weighted)


def with_categories(data: TrainingData, corpus: Corpus, field: str) -> TrainingData:
    """Adds the categories of the positives to training data.

    Args:
        data: The training data.
        corpus: The corpus of its passages.
        field: The metadata field with the categories of a passage.

    Raises:
        InputError: If a positive has no categories, or if one category is that of all positives.
    """
    rows = np.unique(np.concatenate(data.positives))
    table = categories_of_rows(corpus, field, rows)
    [common] = np.nonzero(np.bincount(table.values, minlength=len(table.names)) == len(rows))
    if len(common):
        raise InputError(
            f"{corpus.generations[-1].url}: all {len(rows):,} passages to train on have the category "
            f"{table.names[common[0]]!r} in the field {field!r}, so that no query has a negative; name a field that "
            f"tells them apart by {Parameter('categories_field')}, or use judged positives"
        )
    return replace(data, categories=table)


def read_judged_data(
    corpus: Corpus, queries: Queries, split: str, limit: int | None, *, weighted: bool
) -> TrainingData:
    """Reads the queries of a split with their relevant passages, without negatives.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split.
        limit: Use only its first N queries; None: all.
        weighted: The scores of the judgements are the sampling weights of the positives.

    Raises:
        InputError: If no query has a relevant passage.
    """
    if split == ALL:
        raise InputError(
            f"{Parameter('split', ALL)}: it has no judgements, which training without negatives needs; name a split of "
            f"{queries.artifact.key} with judgements"
        )
    pairs = read_judged_pairs(corpus, queries, split, limit)
    if not pairs.ids:
        raise InputError(
            f"{queries.artifact.url}: none of the {pairs.num_queries:,} queries of the split {split!r} has a relevant "
            "passage in the corpus; name another split, or import the passages"
        )
    no_rows = [np.empty(0, np.int64)] * len(pairs.ids)
    check_has_negatives(corpus, queries.artifact.url, pairs.ids, pairs.rows, pairs.others)
    weights = [scores.astype(np.float64) for scores in pairs.scores] if weighted else None
    return TrainingData(
        pairs.texts,
        pairs.rows,
        no_rows,
        corpus.num_rows,
        passage_reader(corpus),
        deleted=corpus.deleted,
        copies=pairs.others if corpus.is_split else None,
        weights=weights,
    )
