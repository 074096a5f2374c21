"""Compares an encoder with stored vectors, to find encoder drift: other vectors than when a corpus was encoded.

The hashes of weights, tokenizer and settings do not show everything that shapes a vector: another version of a library,
a broken kernel or a damaged GPU changes vectors too. So a few stored passages, the canaries, are encoded again. A model
that maps queries to the vectors of another encoder has canaries too: fixed queries with their mapped vectors.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus, read_rows
from riptide.indexing.embeddings.embeddings_reader import TOPICS, EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import VectorKind
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.retriever.options import PLURALS, Side

if TYPE_CHECKING:
    from riptide.retriever.encoding.encoder import Encoder

CANARIES = 8  # passages that are encoded again
WINDOW = 64  # first rows of a part among which they are: one short range of its file
MIN_SIMILARITY = 0.99  # below it the vectors are another encoder's
QUERY_CANARIES = "canaries.json"  # file of a model of queries: {"texts": [...], "vectors": [[...]]}
CANARY_QUERIES = (
    "what is the capital of France",
    "how does a vaccine protect against a virus",
    "who wrote the first dictionary of English",
    "rising sea levels and coastal cities",
    "symptoms of vitamin D deficiency in children",
    "when was the telephone invented",
    "interest rates and inflation in 1980",
    "best way to sort a large file on disk",
)
EXPECTED_SIMILARITY = 0.999  # rounding alone changes less; see docs/measurements/encoding.md


@dataclass(frozen=True)
class Canaries:
    """Stored passages, or queries, with their stored vectors.

    Attributes:
        url: The URL of the generation of embeddings that holds the vectors, or of the model of queries.
        titles, texts: The passages; of queries, the texts.
        vectors: The numbers of each one's vector, float64 [size].
        topics: The topic whose prompt encoded each passage, int64 [n]; None without topics.
    """

    url: str
    titles: list[str]
    texts: list[str]
    vectors: list[np.ndarray]
    topics: np.ndarray | None = None
    side: Side = "passage"

    def __len__(self) -> int:
        return len(self.titles)


@dataclass(frozen=True)
class Drift:
    """The result of comparing an encoder with the stored vectors of canaries.

    Attributes:
        url: As of `Canaries`.
        similarity: The smallest similarity of a passage's two vectors; 1 if there are no canaries.
        num_canaries: Number of canaries, which are passages or queries.
        node: The node that encoded them again.
        side: Side of the canaries.
    """

    url: str
    similarity: float
    num_canaries: int
    node: str
    side: Side = "passage"

    @property
    def is_refused(self) -> bool:
        """Whether the encoder gives other vectors than those stored."""
        return not self.similarity >= MIN_SIMILARITY

    @property
    def shown(self) -> str:
        """The similarity in messages, rounded down, so that one below a bound does not look like the bound."""
        return f"{math.floor(self.similarity * 1e5) / 1e5:.5f}" if math.isfinite(self.similarity) else "nan"

    @property
    def problem(self) -> InputError | None:
        """The error, or unless `is_refused` the warning, if the difference is not rounding alone; otherwise None."""
        if self.similarity >= EXPECTED_SIMILARITY:
            return None
        bound = MIN_SIMILARITY if self.is_refused else EXPECTED_SIMILARITY
        again, parameter = ("encode the corpus", "name") if self.side == "passage" else ("save the map", "save_map")
        return InputError(
            f"{self.url}: the encoder on {self.node} gives other vectors than those stored: smallest similarity "
            f"{self.shown} of {self.num_canaries} {PLURALS[self.side]}, expected at least {bound}: use the versions of "
            f"packages that {Command('store', 'show')} prints, on the kind of machine that encoded them, or {again} "
            f"under another {Parameter(parameter)}"
        )

    def refuse(self) -> None:
        """Raises InputError if the encoder gives other vectors than those stored."""
        if self.is_refused and self.problem:
            raise self.problem


def canaries_of(embeddings: EmbeddingsReader, corpus: Corpus, generation: int = 0) -> Canaries:
    """Returns the canaries of a generation of embeddings. Of files that this node does not have, ranges are read.

    Args:
        embeddings: The embeddings.
        corpus: Their corpus.
        generation: The number of the generation.
    """
    artifact = embeddings.generations[generation]
    part = next((part for part in embeddings.parts if part.artifact.key == artifact.key), None)
    if part is None:
        return Canaries(artifact.url, [], [], [])
    passages = corpus.parts[int(np.searchsorted(corpus.parts.starts, part.first_row, side="right")) - 1]
    count = min(WINDOW, part.part.rows)
    stored = embeddings.kind.flatten(embeddings.fetch(part.first_row + np.arange(count)), count)
    return _choose_canaries(passages, artifact, part.part, stored)


def canaries_of_part(passages: RowPart, draft: Draft, part: ArtifactPart, kind: VectorKind) -> Canaries:
    """Returns the canaries of a committed part of embeddings that may be incomplete; its file is fetched.

    Args:
        passages: The part of the corpus.
        draft: The embeddings.
        part: The part with the vectors of these passages.
        kind: The kind of the vectors.
    """
    dim = draft.config["encoder"]["dim"]
    vectors = kind.read(draft.local_path(part), part.rows, dim, f"{draft.url}/{part.file}")
    return _choose_canaries(passages, draft, part, kind.flatten(vectors, min(WINDOW, part.rows)))


def has_query_canaries(artifact: Artifact) -> bool:
    """Returns whether a model of the store has fixed queries with their vectors; fetches no file."""
    return any(part.facts["path"] == QUERY_CANARIES for part in artifact.numbered_parts("file"))


def query_canaries(artifact: Artifact) -> Canaries:
    """Returns the canaries of a model of queries; one without a map that was saved with it has none."""
    if "map" not in artifact.notes:  # a file of this name in another model is not one of ours
        return Canaries(artifact.url, [], [], [], side="query")
    document = json.loads((model_folder(artifact) / QUERY_CANARIES).read_text(encoding="utf-8"))
    texts, vectors = document["texts"], list(np.array(document["vectors"], np.float64))
    return Canaries(artifact.url, [""] * len(texts), texts, vectors, side="query")


def write_query_canaries(folder: Path, vectors: np.ndarray) -> None:
    """Writes the vectors of CANARY_QUERIES, float32 [n, dim], as the canaries of a model of queries."""
    document = {"texts": CANARY_QUERIES, "vectors": vectors.astype(np.float64).tolist()}
    (folder / QUERY_CANARIES).write_text(json.dumps(document), encoding="utf-8")


def _choose_canaries(
    passages: RowPart, artifact: Artifact | Draft, part: ArtifactPart, stored: Sequence[np.ndarray]
) -> Canaries:
    """Chooses canaries among the first passages of a part, whose vectors are given; excludes erased passages."""
    table = read_rows(passages, np.arange(len(stored)), ["title", "text"]).to_pydict()
    titles, texts = table["title"], table["text"]
    is_usable = [bool((title or text) and row.any()) for title, text, row in zip(titles, texts, stored, strict=True)]
    usable = np.flatnonzero(is_usable)
    rows = usable[np.unique(np.linspace(0, len(usable) - 1, CANARIES).astype(np.int64))] if len(usable) else usable
    stored_topics = artifact.find_part(f"{TOPICS}-{part.name.rpartition('-')[2]}")
    topics = None if stored_topics is None else np.load(artifact.local_path(stored_topics))[rows].astype(np.int64)
    return Canaries(
        artifact.url, [titles[row] for row in rows], [texts[row] for row in rows], [stored[row] for row in rows], topics
    )


def measure_drift(canaries: Canaries, encoder: Encoder, kind: VectorKind, task: str | None = None) -> Drift:
    """Encodes canaries again and compares the vectors with the stored ones.

    Args:
        canaries: The canaries.
        encoder: The encoder of their side.
        kind: The kind of the vectors.
        task: The encoder's name of the task whose prompt encoded the passages; None: no prompt.

    Raises:
        InputError: If a vector is not finite.
    """
    if not len(canaries):
        return Drift(canaries.url, 1.0, 0, platform.node())
    side = canaries.side
    texts = encoder.compose(canaries.titles, canaries.texts) if side == "passage" else canaries.texts
    tokens = encoder.tokenize(texts, side=side)
    try:
        vectors = kind.query_encoder(encoder).forward(tokens, side=side, task=task, topics=canaries.topics)
    except InputError as error:
        raise InputError(f"{canaries.url}: its {PLURALS[side]} cannot be encoded again: {error}") from error
    smallest = min_similarity(canaries.vectors, kind.flatten(vectors, len(canaries)))
    return Drift(canaries.url, smallest, len(canaries), platform.node(), side)


def min_similarity(first: Iterable[np.ndarray], second: Iterable[np.ndarray]) -> float:
    """Returns the smallest `similarity` of a pair of vectors; NaN if one is NaN."""
    return float(np.min([similarity(*pair) for pair in zip(first, second, strict=True)]))


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the similarity of two vectors: 2ab / (aa + bb), the cosine if both have the same length.

    It is below the cosine if the lengths differ, which matters for encoders that do not normalise their vectors.

    Args:
        first: float64 [n].
        second: float64 [m].

    Returns:
        1 for two zero vectors, and 0 if n and m differ.
    """
    if first.shape != second.shape:
        return 0.0
    squares = first @ first + second @ second
    return float(2 * (first @ second) / squares) if squares else 1.0
