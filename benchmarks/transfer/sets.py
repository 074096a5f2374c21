"""Parts of the sets, each in a store with BM25, embeddings and negatives; their dev and test splits."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import build_bm25, encode_corpus, import_corpus, import_queries, mine_negatives
from jobs.common.options import build

import numpy as np
import pyarrow as pa

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_documents, write_qrels
from benchmarks.common.models import MINILM
from benchmarks.transfer.runs import FEW_SHOT_SETS, store_of
from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import Queries
from indexing.embeddings.embeddings import Embeddings
from indexing.exact.search import exact_search
from indexing.measures.metrics import per_query
from indexing.store.store import Store

EMBEDDINGS = "minilm"  # the name of the backbone's embeddings in each store
NEGATIVES = 19  # per query
HITS = 100  # per query
METRICS = ("nDCG@10", "R@100")
HELD_OUT = 200  # training queries of SciFact that are its dev split


@dataclass(frozen=True)
class Limits:
    """How much of a set is used; queries and passages are drawn at random.

    Attributes:
        size: Number of training queries at most.
        measured: Number of queries that the dev split and the test split each have at most.
        passages: Number of passages at most, if fewer are judged.
    """

    size: int
    measured: int
    passages: int


def prepare(options: argparse.Namespace) -> None:
    """Imports the sets, encodes their corpora by the backbone, and mines negatives of their training queries."""
    data, folder = Path(options.data).resolve(), Path(options.folder)
    limits = Limits(options.size, options.measured, options.passages)
    for name in options.sets:
        store = store_of(name, options)
        hold_out = HELD_OUT if name == "scifact" else 0
        source = write_set(data / name, folder / "sets" / name, limits, hold_out=hold_out)
        import_corpus.main(import_corpus.ImportCorpus(store=store, source=str(source)))
        build_bm25.main(build_bm25.BuildBm25(store=store))
        encode_corpus.main(
            encode_corpus.EncodeCorpus(
                store=store, encoder=MINILM, name=EMBEDDINGS, passage_length=options.passage_length
            )
        )
        mine(store, name, drop_answers=name == "squad")
        if "few-shot" in options.parts and name in FEW_SHOT_SETS:
            few = f"{name}-few"
            few_limits = replace(limits, size=max(options.few))
            source = write_few_shot(data / name, folder / "few" / few, source, few_limits)
            import_queries.main(import_queries.ImportQueries(store=store, source=str(source)))
            mine(store, few, drop_answers=name == "squad")


def mine(store: str, queries: str, *, drop_answers: bool) -> None:
    """Mines negatives of the training queries of a query set from BM25's hits, under the name of the query set."""
    mine_negatives.main(
        build(
            mine_negatives.MineNegatives,
            {
                "store": store,
                "sources": ("bm25",),
                "queries": queries,
                "split": "train",
                "depth": HITS,
                "name": queries,
                "drop_answers": drop_answers,
                "pool_negatives": NEGATIVES,
            },
        )
    )


def write_set(data: Path, folder: Path, limits: Limits, *, hold_out: int = 0) -> Path:
    """Returns a BEIR folder with a part of a set; writes it if needed.

    Args:
        data: The BEIR folder of the whole set.
        folder: The folder to write to; its name becomes the name of the queries.
        limits: How much of the set is used.
        hold_out: Number of other training queries that become the dev split.
    """
    if (folder / "queries.jsonl").exists():  # written last
        return folder
    whole = {file.stem: read_qrels(file) for file in sorted((data / "qrels").glob("*.tsv"))}
    judgements = draw_judgements(whole, limits, hold_out)
    for split, of_split in judgements.items():
        write_qrels(folder / "qrels" / f"{split}.tsv", of_split)
    queries = {judgement.query for of_split in judgements.values() for judgement in of_split}
    passages = {judgement.passage for of_split in judgements.values() for judgement in of_split}
    others = {document["_id"] for document in read_documents(data / "corpus.jsonl")} - passages
    passages |= draw(others, max(limits.passages - len(passages), 0))
    copy_documents(data / "corpus.jsonl", folder / "corpus.jsonl", passages)
    copy_documents(data / "queries.jsonl", folder / "queries.jsonl", queries)
    return folder


def write_few_shot(data: Path, folder: Path, part: Path, limits: Limits) -> Path:
    """Returns a BEIR folder with training queries that a part of a set lacks, and whose passages it has.

    Writes it if needed. Ends the program if the part has the passages of fewer queries than `limits.size`.

    Args:
        data: The BEIR folder of the whole set.
        folder: The folder to write to; its name becomes the name of the queries.
        part: The BEIR folder of the part, whose training queries are left out.
        limits: How much of the set is used.
    """
    if (folder / "queries.jsonl").exists():  # written last
        return folder
    passages = {document["_id"] for document in read_documents(part / "corpus.jsonl")}
    used = {judgement.query for judgement in read_qrels(part / "qrels" / "train.tsv")}
    judgements = read_qrels(data / "qrels" / "train.tsv")
    unusable = used | {judgement.query for judgement in judgements if judgement.passage not in passages}
    chosen = draw({judgement.query for judgement in judgements if int(judgement.score) > 0} - unusable, limits.size)
    if len(chosen) < limits.size:
        raise SystemExit(
            f"{data.name}: found {len(chosen):,} other training queries whose passages are used, expected "
            f"{limits.size:,}: give a larger --passages, or a smaller --few or --size"
        )
    write_qrels(folder / "qrels" / "train.tsv", of_queries(judgements, chosen))
    copy_documents(data / "queries.jsonl", folder / "queries.jsonl", chosen)
    return folder


def draw_judgements(
    judgements: Mapping[str, Sequence[Judgement]], limits: Limits, hold_out: int
) -> dict[str, list[Judgement]]:
    """Returns the judgements of the queries of a part of a set by split.

    Args:
        judgements: The judgements of the whole set by split.
        limits: How much of the set is used.
        hold_out: Number of other training queries that become the dev split.
    """
    train = sorted({judgement.query for judgement in judgements["train"] if int(judgement.score) > 0})
    order = [train[place] for place in np.random.default_rng(0).permutation(len(train))]
    measured = {split: of_split for split, of_split in judgements.items() if split != "train"}
    if hold_out:
        measured["dev"] = of_queries(judgements["train"], order[:hold_out])
    parts = {"train": of_queries(judgements["train"], order[hold_out : hold_out + limits.size])}
    for split, of_split in measured.items():
        parts[split] = of_queries(of_split, draw((judgement.query for judgement in of_split), limits.measured))
    return parts


def of_queries(judgements: Iterable[Judgement], queries: Iterable[str]) -> list[Judgement]:
    """Returns the judgements of some queries."""
    ids = set(queries)
    return [judgement for judgement in judgements if judgement.query in ids]


def draw(ids: Iterable[str], count: int) -> set[str]:
    """Returns at most `count` of some ids, drawn at random."""
    ordered = sorted(set(ids))
    return {ordered[place] for place in np.random.default_rng(0).permutation(len(ordered))[:count]}


def copy_documents(source: Path, target: Path, ids: set[str]) -> None:
    """Writes the documents of a file that have one of some ids."""
    write_documents(target, (document for document in read_documents(source) if document["_id"] in ids))


class EvaluationSet:
    """The queries and judgements of a set's splits, and the vectors of its corpus.

    Args:
        name: The set, whose query set has its name.
        store: The store of the set.
    """

    def __init__(self, name: str, store: str):
        of_set = Store(store)
        self._corpus = Corpus.open(of_set)
        self._embeddings = Embeddings.open(of_set, EMBEDDINGS, self._corpus)
        self._queries = Queries.open(of_set, name)

    def texts(self, split: str) -> list[str]:
        """Returns the queries of a split."""
        return list(self._queries.split(split).texts)

    def passages(self) -> tuple[list[str], list[str]]:
        """Returns the titles and the texts of the passages."""
        passages = self._corpus.passages(np.arange(self._embeddings.num_rows))
        return [passage.title for passage in passages], [passage.text for passage in passages]

    def measure(
        self, split: str, queries: np.ndarray, passages: np.ndarray | None, threads: int
    ) -> dict[str, list[float]]:
        """Returns the metrics of each query of a split, by metric.

        Args:
            split: The split.
            queries: The vectors of its queries, float32 [q, dim].
            passages: The vectors of the passages, float16 [n, dim]; None: those of the backbone.
            threads: Threads of the search.
        """
        parts = self._embeddings.between(0, self._embeddings.num_rows) if passages is None else [(0, passages)]
        hits = exact_search(np.ascontiguousarray(queries, np.float32), parts, HITS, threads=threads)
        ids = np.repeat(np.array(self._queries.split(split).ids, object), hits.rows.shape[1])
        is_hit = hits.rows.ravel() >= 0
        run = pa.table(
            {
                "query_id": pa.array(ids[is_hit], pa.string()),
                "id": pa.array(self._corpus.ids(hits.rows.ravel()[is_hit]), pa.string()),
                "score": pa.array(hits.scores.ravel()[is_hit].astype(np.float64)),
            }
        )
        values = per_query(self._queries.qrels(split), run, METRICS)
        return {metric: of_metric.tolist() for metric, of_metric in values.items()}
