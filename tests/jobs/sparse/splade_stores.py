"""Brute-force search of sparse embeddings, prompts for a sparse encoder, and the hits of runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.search.runs import read_run
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import describe
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.encoding.sparse_vectors import SparseVectors
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of

OPTIONS = EncoderOptions(pooling="splade", dtype="float32", compile="never")
SHAPE = PromptShape(layers=2, heads=4, head_dim=8)

Ranking = list[tuple[str, float]]  # (id, score) of the hits of a query, the best first


def whole(vectors: SparseVectors) -> np.ndarray:
    """Returns rint(100 v), int64 [n, words]."""
    return np.rint(100 * vectors.dense().astype(np.float64)).astype(np.int64)


def encode_queries(folder: Path, texts: Sequence[str], prompt: TaskPrompt | None = None) -> SparseVectors:
    """Returns the vectors of queries, with a task's prompt if it is given."""
    encoder = SparseEncoder(str(folder), OPTIONS, tasks={"t": prompt} if prompt else None)
    return encoder.encode(texts, side="query", task="t" if prompt else None)


def brute_force(
    store: Store, name: str, queries: SparseVectors, k: int, among: Collection[int] | None = None
) -> list[Ranking]:
    """Returns the top k of each query by the products of whole weights: by score, then by row.

    Deleted passages, passages with the score 0 and, with `among`, all rows that are not in it are excluded.
    """
    corpus = Corpus.open(store)
    vectors = SparseEmbeddings.open(store, name, corpus).take(np.arange(corpus.num_rows))
    gone = set(corpus.deleted.tolist())
    ids = [passage.id for passage in corpus.passages(np.arange(corpus.num_rows))]
    rankings = []
    for scores in (whole(queries) @ whole(vectors).T).tolist():
        rows = [row for row, score in enumerate(scores) if score and row not in gone]
        rows = [row for row in rows if among is None or row in among]
        best = sorted(rows, key=lambda row: (-scores[row], row))[:k]
        rankings.append([(ids[row], float(scores[row])) for row in best])
    return rankings


def run_of(store: Store, name: str) -> dict[str, Ranking]:
    """Returns the hits of a run by the id of the query."""
    found: dict[str, Ranking] = {}
    for table in read_run(store.open("runs", name)):
        for hit in table.to_pylist():
            found.setdefault(hit["query_id"], []).append((hit["id"], hit["score"]))
    return found


def save_prompt(store: Store, folder: Path, name: str, prompt_folder: Path, *, passages: bool = False) -> TaskPrompt:
    """Makes prompts/NAME, a random prompt of a sparse encoder for queries and, with `passages`, for passages.

    Args:
        store: The store.
        folder: The folder of the encoder.
        name: Name of the prompt.
        prompt_folder: An empty folder for its files.
        passages: Whether passages have a prompt too.
    """
    torch.manual_seed(3)
    matrix = torch.randn(SHAPE.layers, 2, SHAPE.heads, 3, SHAPE.head_dim)
    prompt = TaskPrompt(backbone_of(describe(str(folder), OPTIONS)), OPTIONS, matrix, matrix / 2 if passages else None)
    prompt.save(prompt_folder)
    with store.create("prompts", name, config={}, inputs={}) as draft:
        draft.add_notes(backbone=str(folder), options=asdict(OPTIONS))
        commit_files(draft, prompt_folder)
    return prompt
