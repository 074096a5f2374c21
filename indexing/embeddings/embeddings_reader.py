"""The base class of readers of embeddings, whose generations, parts and rows correspond to those of the corpus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.named_encoders import EncoderSpec, differing_settings, find_encoder_spec
from riptide.indexing.embeddings.stored_encoder import StoredEncoder
from riptide.indexing.embeddings.vector_kind import VectorKind, vector_kind_of
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowChain, RowPart, check_coverage
from riptide.indexing.store.store import Store
from riptide.retriever.options import EncoderOptions

TOPICS = "topics"  # prefix of the names of parts with the topic of each passage, int32 [rows]


class EmbeddingsReader(RowChain, ABC):
    """Base class that reads embeddings/NAME, with vectors of one kind, from all complete generations.

    Attributes:
        kind: The kind of the vectors.
        num_rows: The number of passages.
        encoder_options: The fields of EncoderOptions.
        task: The task whose encoder made them; None: there was no task.
        dim: Length of a vector; of sparse ones, the words of the vocabulary.
        similarity: "cosine" or "dot".
        store: The store that they were opened from; None: they were made from their generations.
    """

    kind: ClassVar[VectorKind]
    store: Store | None = None

    def __init__(self, name: str, generations: Sequence[Artifact]):
        super().__init__(generations)
        self.name = name
        self.config: dict[str, Any] = generations[0].config
        notes = generations[0].notes
        self.encoder_name: str = notes["encoder"]
        self.encoder_options: dict[str, Any] = notes["options"]
        self.task: str | None = notes.get("task")
        self.dim: int = notes["dim"]
        self.similarity: str = notes["similarity"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.num_rows:,} vectors of {self.dim})"

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> Self:
        """Opens embeddings/NAME and checks that they belong to the corpus.

        Args:
            store: The store.
            name: Their name; None: the only ones of the store with vectors of this kind.
            corpus: The corpus that they must cover.

        Raises:
            InputError: If their vectors are of another kind, if they are of another corpus, or if they lack rows of it.
        """
        name = store.only_name("embeddings", name, cls.kind.is_kind_of)
        generations = store.generations("embeddings", name)
        first = generations[0]
        if not cls.kind.is_kind_of(first.config):
            raise InputError(
                f"{store.url}/embeddings/{name}: holds {vector_kind_of(first.config['encoder'])} vectors, expected "
                f"{cls.kind.name} ones: {cls.kind.remedy}"
            )
        check_corpus(generations, corpus)
        check_coverage(generations, corpus.generations)
        reader = cls(name, generations)
        reader.store = store
        return reader

    def encoder(
        self, *, task: str | None = None, device: str | None = None, threads: int | None = None
    ) -> StoredEncoder:
        """Returns the encoder that made these embeddings, with the same options and prompt, to encode further texts.

        Args:
            task: Tuned task of the queries; None: the task that the corpus was encoded for, if any.
            device: "cpu" or "cuda"; None: CUDA if it is available.
            threads: Threads for matrix products on the CPU; None: the setting of torch.

        Raises:
            InputError: If the encoder or the task is missing, or is not the one that made the embeddings.
        """
        if self.store is None:
            raise InputError(f"embeddings/{self.name}: open them with `open`, which knows the store of their encoder")
        spec = self.encoder_spec(self.store, task=task)
        return StoredEncoder(spec, self.kind, dim=self.dim, similarity=self.similarity, device=device, threads=threads)

    def encoder_spec(self, store: Store, *, encoder: str | None = None, task: str | None = None) -> EncoderSpec:
        """Returns the specification of the encoder that made these embeddings.

        Args:
            store: The store.
            encoder: Where the encoder is now; None: where it was when the corpus was encoded.
            task: Tuned task of the queries; None: the task that the corpus was encoded for, if any.

        Raises:
            InputError: If it does not exist, or is not the encoder that made the embeddings.
        """
        options = EncoderOptions(**self.encoder_options)
        if task is not None:
            spec = find_encoder_spec(store, None, task, options)
        else:
            spec = EncoderSpec(store, encoder or self.encoder_name, options, self.task)
        # With a task, only settings of passages must match: its prompt or prefix may encode queries differently.
        if differ := differing_settings(self.config["encoder"], spec.settings("passage"), passages=task is not None):
            what, parameter = (f"task {task}", "task") if task else (f"encoder {spec.name}", "encoder")
            raise InputError(
                f"{what} is not the one that made embeddings/{self.name} ({', '.join(differ)} differ): name "
                f"that one with {Parameter(parameter)}, or encode the corpus with this one"
            )
        return replace(spec, numerics=self.config["numerics"])

    def vectors(self, part: RowPart) -> Any:
        """Opens the vectors of a part. Raises InputError if the file is damaged or holds another kind or shape."""
        label = f"{part.artifact.url}/{part.part.file}"
        return self.kind.read(part.artifact.local_path(part.part), part.part.rows, self.dim, label)

    @abstractmethod
    def take(self, rows: np.ndarray) -> Any:
        """Returns the vectors of the given rows, int64 [n], in their order."""

    def take_open(self, rows: np.ndarray) -> Any:
        """Returns the same as `take`, for many calls: a subclass may keep the files open that it has checked."""
        return self.take(rows)

    def fetch(self, rows: np.ndarray) -> Any:
        """Returns the same as `take`, for rows that are read once: a subclass may read their ranges alone."""
        return self.take(rows)

    @abstractmethod
    def open_vector_reader(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function that training calls many times to read vectors: int64 [n] -> float [n, dim].

        It keeps the files of the parts open.
        """

    def topics(self) -> np.ndarray | None:
        """Returns the topic whose prompt encoded each passage: int64 [num_rows]; None if the prompt has no topics."""
        pieces = [np.load(made.local_path(part)) for made in self.generations for part in made.numbered_parts(TOPICS)]
        return np.concatenate(pieces).astype(np.int64) if pieces else None


def check_corpus(generations: Sequence[Artifact], corpus: Corpus) -> None:
    """Raises InputError if generations of embeddings were made from another corpus."""
    for made, of in zip(generations, corpus.generations, strict=False):
        if made.inputs["corpus"]["fingerprint"] != of.fingerprint:
            raise InputError(
                f"{made.url} was made from the corpus {made.inputs['corpus']['fingerprint'][:12]}, "
                f"{of.url} is {of.fingerprint[:12]}: encode this corpus"
            )
