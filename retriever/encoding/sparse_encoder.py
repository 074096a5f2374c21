"""The sparse encoder converts texts to sparse vectors; the same list of texts gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError, TextsError
from riptide.base.wording import Parameter
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.sparse_vectors import SparseVectors, concatenate_sparse_vectors, from_dense
from riptide.retriever.forward.batching import Tokens
from riptide.retriever.model.modules import SPLADE
from riptide.retriever.options import DEFAULT_OPTIONS, EncoderOptions, Side
from riptide.retriever.prompts.query_words import unusable_texts_error
from riptide.retriever.prompts.task_prompt import TaskPrompt


@refuse_unknown_names
class SparseEncoder:
    """A frozen masked language model that represents a text by weights of vocabulary words (SPLADE).

    Only the non-zero weights of a batch leave it, so that memory does not grow with the vocabulary. An `Encoder` of the
    same folder gives the same numbers as dense vectors.

    Attributes:
        dim: Number of words of the vocabulary.
        similarity: "dot".
        config, fingerprint, numerics, startup, device: As those of `Encoder`.

    Args:
        encoder: A Hugging Face name, a model folder, or an open `Encoder`.
        options: How text becomes a vector, unless the encoder is open. `query_terms` and `passage_terms` keep only the
            largest weights.
        device, threads, tasks: As of `Encoder`, unless the encoder is open.

    Raises:
        InputError: If the model cannot be used, has no masked-language-model head, or makes dense vectors.
    """

    similarity: Literal["dot"] = "dot"

    def __init__(
        self,
        encoder: str | Encoder,
        options: EncoderOptions = DEFAULT_OPTIONS,
        *,
        device: str | None = None,
        threads: int | None = None,
        tasks: Mapping[str, TaskPrompt] | None = None,
    ):
        if not isinstance(encoder, Encoder):
            encoder = Encoder(encoder, options, device=device, threads=threads, tasks=tasks)
        if encoder.config["pooling"] != SPLADE:
            raise InputError(
                f"{encoder.name}: makes dense vectors (pooling {encoder.config['pooling']}); expected a SPLADE model, "
                f"or {Parameter('pooling', SPLADE)} for a masked language model"
            )
        self.dense = encoder
        self.dim, self.config, self.fingerprint = encoder.dim, encoder.config, encoder.fingerprint
        self.numerics, self.startup, self.device = encoder.numerics, encoder.startup, encoder.device
        self.put_task, self.drop_task = encoder.put_task, encoder.drop_task
        self.compose, self.tokenize, self.unknown_tokens = encoder.compose, encoder.tokenize, encoder.unknown_tokens
        self.broken_texts = encoder.broken_texts

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the current tasks, sorted."""
        return self.dense.tasks

    def encode(
        self, texts: Sequence[str], *, side: Side = "query", task: str | Sequence[str | None] | None = None
    ) -> SparseVectors:
        """Encodes texts; returns their vectors in order. Arguments as in `Encoder.encode`, errors as in `forward`."""
        tokens = self.tokenize(texts, side=side)  # This also checks the texts.
        return self.forward(tokens, side=side, task=task, topics=self.dense.topics_of(texts, side=side, task=task))

    def forward(
        self,
        tokens: Tokens,
        *,
        side: Side = "query",
        task: str | Sequence[str | None] | None = None,
        topics: np.ndarray | None = None,
        report: Callable[[int], object] | None = None,
    ) -> SparseVectors:
        """Encodes tokenised texts and returns their vectors in order. Arguments as in `Encoder.forward`.

        Raises:
            TextsError: If texts lack the words by which their prompts are found, or if vectors are not finite; it
                names all of the former, or those of one batch of the latter.
        """
        pieces: list[SparseVectors] = []
        order = [np.empty(0, np.int64)]
        for rows, vectors in self.batches(tokens, side=side, task=task, topics=topics, report=report):
            order.append(rows)
            pieces.append(vectors)
        return concatenate_sparse_vectors(pieces, self.dim).take(np.argsort(np.concatenate(order)))

    def batches(
        self,
        tokens: Tokens,
        *,
        side: Side = "query",
        task: str | Sequence[str | None] | None = None,
        topics: np.ndarray | None = None,
        report: Callable[[int], object] | None = None,
    ) -> Iterator[tuple[np.ndarray, SparseVectors]]:
        """Yields, per batch, its text numbers, int64 [n], and their vectors; batches of the longest texts come first.

        Arguments and errors as of `Encoder.forward`.
        """
        if reasons := self.dense.unusable_texts(tokens, side=side, task=task, topics=topics):
            raise unusable_texts_error(reasons, len(tokens))
        done = 0
        for rows, weights in self.dense.pooled_batches(tokens, side=side, task=task, topics=topics):
            finite = torch.isfinite(weights).all(1)
            if not bool(finite.all()):
                bad = [int(row) for row in rows[(~finite).cpu().numpy()]]
                reason = f"is not finite: try {Parameter('dtype', 'float32')} (now: {self.numerics})"
                raise TextsError(
                    f"the vector of text {bad[0]} of {len(tokens)} {reason}",
                    dict.fromkeys(bad, f"the vector of the text {reason}"),
                )
            yield rows, from_dense(weights.cpu().numpy())
            done += len(rows)
            if report is not None:
                report(done)
