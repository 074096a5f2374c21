"""The encoder that made embeddings, opened in this process to encode further queries and passages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from riptide.base.arguments import check_side, check_texts, refuse_unknown_names
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.embeddings.vector_kind import VectorKind
from riptide.retriever.options import Side

if TYPE_CHECKING:
    from riptide.retriever.encoding.encoder import Encoder


@refuse_unknown_names
class StoredEncoder:
    """Encodes queries and passages as for existing embeddings; loads the model of a side when it is first used.

    Attributes:
        spec: The encoder by name, with its options and its task.
        dim: Length of a vector.
        similarity: "cosine" or "dot".

    Args:
        spec: The encoder that made the embeddings.
        kind: The kind of their vectors.
        dim: Length of a vector.
        similarity: "cosine" or "dot".
        device: "cpu" or "cuda"; None: CUDA if it is available.
        threads: Threads for matrix products on the CPU; None: the setting of torch.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        kind: VectorKind,
        *,
        dim: int,
        similarity: str,
        device: str | None = None,
        threads: int | None = None,
    ):
        # Compilation takes longer than most programs encode; searches do not compile the encoder of queries either.
        self.spec = replace(spec, options=replace(spec.options, compile="never"))
        self.dim, self.similarity, self._kind = dim, similarity, kind
        self._device, self._threads = device, threads
        self._open: dict[str, Encoder] = {}
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        task = f", task={self.spec.task!r}" if self.spec.task else ""
        return f"StoredEncoder({self.spec.name!r}{task}, dim={self.dim})"

    def encode(self, texts: Sequence[str], *, side: Side = "query") -> Any:
        """Encodes texts, in order, with the prompt of the task if there is one.

        Args:
            texts: The texts. `compose` joins passages with their titles.
            side: Whether they are queries or passages.

        Returns:
            float32 [n, dim]; `SparseVectors` of a SPLADE encoder.

        Raises:
            InputError: If the encoder cannot be opened, if a text is not a valid string, or if a vector is not finite.
        """
        check_texts(texts)
        check_side(side)
        return self._kind.query_encoder(self.encoder_of(side)).encode(texts, side=side, task=self.spec.task)

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Joins titles and texts of passages in the way that the corpus was encoded; an empty title adds nothing."""
        return self.encoder_of("passage").compose(titles, texts)

    def encoder_of(self, side: Side) -> Encoder:
        """Returns the open encoder of a side, which both sides share unless untied; its task is `spec.task`."""
        folder = self.spec.folder_of(side)
        with self._opening:
            if folder not in self._open:
                self._open[folder] = self.spec.open(side=side, device=self._device, threads=self._threads)
            return self._open[folder]
