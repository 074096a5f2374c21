"""The interface of a kind of vector: encoding, storage and descriptions of its vectors; the options of an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from riptide.indexing.store.chain import RowPart
from riptide.retriever.options import VECTORS
from riptide.telemetry.phases import call_in_thread

if TYPE_CHECKING:
    from riptide.indexing.corpus.filters import Filter
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.forward.batching import Tokens

Result = TypeVar("Result")


@dataclass(frozen=True)
class PartTexts:
    """The tokenised passages of a corpus part, with the encoder that makes their vectors.

    Attributes:
        encoder: The encoder. It runs on `model_thread` only.
        tokens: The passages to encode, maybe none.
        rows: Their rows within the part: int64, ascending.
        arguments: The other arguments of `Encoder.forward`.
        part: The part of the corpus.
        model_thread: An executor with a single thread.
        copied_rows: The other rows of the part, whose vectors exist already: int64, ascending.
        copied_vectors: Their vectors, as `EmbeddingsReader.take` returns them.
    """

    encoder: Encoder
    tokens: Tokens
    rows: np.ndarray
    arguments: Mapping[str, Any]
    part: RowPart
    model_thread: Executor
    copied_rows: np.ndarray
    copied_vectors: Any

    def label(self, row: int) -> str:
        """Returns the name of the vector of a row of the part in messages."""
        return f"{self.part.artifact.url}/{self.part.part.file}: the vector of passage {self.part.first_row + row}"

    def run(self, function: Callable[[], Result]) -> Result:
        """Runs a function that calls the encoder on the model's thread, and returns the result of the function."""
        return call_in_thread(self.model_thread, function)


class VectorKind(ABC):
    """A kind of vector, which a subclass of `EmbeddingsReader` reads. Objects have no state, since workers get copies.

    A new kind is a module with a subclass, its reader, and the kind of hit source that searches it, whose entry in
    `riptide.indexing.hit_sources.registry` registers all three and its poolings.

    Attributes:
        name: Its name in `riptide.retriever.options.VECTORS`, and in messages.
        poolings: The values of the option pooling that make such vectors, beside those that VECTORS lists.
        remedy: What to do if embeddings hold vectors of another kind.
        suffix: The suffix of the file of a part.
    """

    name: ClassVar[str]
    poolings: ClassVar[tuple[str, ...]] = ()
    remedy: ClassVar[str]
    suffix: ClassVar[str]

    def is_made_by(self, encoder_settings: Mapping[str, Any]) -> bool:
        """Returns whether an encoder with these settings (`EncoderSpec.settings`) makes vectors of this kind."""
        return vector_kind_of(encoder_settings) == self.name

    def is_kind_of(self, config: Mapping[str, Any]) -> bool:
        """Returns whether embeddings with this configuration hold vectors of this kind."""
        return self.is_made_by(config["encoder"])

    @abstractmethod
    def write(self, texts: PartTexts, path: Path) -> None:
        """Encodes the passages of a part and writes all vectors of the part, copied ones too, to a file.

        Raises:
            InputError: If a vector is not finite, or does not fit its file.
        """

    @abstractmethod
    def read(self, path: Path, rows: int, dim: int, label: str) -> Any:
        """Reads the vectors of a file and checks their number and length.

        Args:
            path: The file.
            rows: The number of vectors that it must hold.
            dim: Their length, as the encoder describes it.
            label: The name of the file in messages.

        Raises:
            InputError: If the file is damaged, or does not hold such vectors.
        """

    def flatten(self, vectors: Any, count: int) -> list[np.ndarray]:
        """Returns the numbers of each of the first `count` vectors, as `read` or the query encoder returns them."""
        return [np.ravel(each).astype(np.float64) for each in vectors[:count]]

    def query_encoder(self, encoder: Encoder) -> Any:
        """Returns the object that encodes queries; its `forward` has the arguments of `Encoder.forward`."""
        return encoder

    def batched_model_type(self, encoder_settings: Mapping[str, Any]) -> str | None:
        """Returns the backbone's model_type if batches may be packed or compiled, else None."""
        return str(encoder_settings["model_type"])

    @abstractmethod
    def describe_vectors(self, encoder_settings: Mapping[str, Any]) -> str:
        """Describes an encoder's vectors for messages, in words that follow a count, such as "vectors of 384"."""

    @abstractmethod
    def describe_size(self, encoder_settings: Mapping[str, Any], rows: int) -> str:
        """Describes the number and storage size of the vectors of `rows` passages, for messages."""

    def warning(self, rows: int, size_bytes: int) -> str | None:
        """Returns a warning if the vectors of a part are not useful for search; else None."""
        return None


@dataclass(frozen=True)
class RecallQueries:
    """The queries of a split, with which the recall of an index is measured.

    Attributes:
        name: The name of their query set.
        split: Their split; "all" for every query of the set.
        texts: Their texts.
        filter_field: The metadata field with their filters; None: they have none.
        filters: The filter of each query; empty without a field.
    """

    name: str
    split: str
    texts: Sequence[str]
    filter_field: str | None = None
    filters: Sequence[Filter | None] = ()


@dataclass(frozen=True)
class IndexOptions:
    """The options that determine an index of vectors; a kind of vector may ignore some of them.

    Attributes:
        shards: Number of shards of the first generation.
        factory: FAISS' factory string; auto: chosen by size, memory and recall.
        recall: Recall of the exact top 100 to reach, after candidates were scored again.
        memory_bytes: With auto, the largest size of the first generation.
        queries: The queries with which recall is measured; None: vectors of the corpus serve as queries.
    """

    shards: int = 4
    factory: str = "auto"
    recall: float = 0.95
    memory_bytes: int | None = None
    queries: RecallQueries | None = None


def vector_kind_of(encoder_settings: Mapping[str, Any]) -> str:
    """Returns the name of the vector kind that an encoder with these settings makes."""
    pooling = encoder_settings.get("pooling", "mean")
    return VECTORS.get(pooling, pooling)
