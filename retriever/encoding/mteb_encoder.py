"""Adapts an Encoder, with or without deep prompts, to the interface of the package mteb, to run MTEB's tasks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process.extras import require
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.model.recipe import fingerprint_of
from riptide.retriever.options import SIDES, Side
from riptide.retriever.prompts.prompt_table import task_config
from riptide.retriever.prompts.task_prompt import TaskPrompt

log = logging.getLogger(__name__)

# Query prefix of Qwen3-Embedding and E5-Mistral, which contains a sentence that describes the task.
_INSTRUCTION = re.compile(r"Instruct: (.+)\nQuery: ?", re.DOTALL)


class MtebEncoder:
    """An Encoder that implements mteb's EncoderProtocol: pass it as the argument `model` of `mteb.evaluate`.

    mteb says whether texts are queries or documents in tasks that have both (retrieval, re-ranking, and pairs of unlike
    texts). Queries are encoded as the side "query", documents as the side "passage". All texts of a symmetric task
    (STS, pair classification, classification, clustering, bitext mining, summarization) are encoded as one side, so
    that equal texts have equal vectors. That side is "query": E5's authors give their query prefix to both texts of
    such a task, the instructions of Qwen3-Embedding and E5-Mistral exist for queries only, and a prompt of queries only
    then applies. Use `symmetric_side` if the encoder cuts queries to fewer tokens than these texts have.

    mteb's `batch_size` has no effect on the encoder, which plans its batches by tokens.

    Attributes:
        mteb_model_meta: mteb's ModelMeta. Its revision is the encoder's fingerprint; with prompts, a passage encoder or
            another `symmetric_side` or `instructions`, it is a sha256 that includes them. mteb stores results by name
            and revision.

    Args:
        encoder: The encoder, of queries only if there is a passage encoder. With `task`, it must have been opened with
            tasks, possibly none ({}).
        task: The deep prompt for all tasks of mteb, or prompts by the name of mteb's task (other tasks have none).
        passage_encoder: The encoder of passages, if it is another one.
        symmetric_side: The side of the texts of symmetric tasks.
        instructions: Replace the instruction in the query prefix of Qwen3-Embedding and E5-Mistral
            ("Instruct: …\\nQuery:") by that of mteb's task. A task with a deep prompt keeps the encoder's prefix,
            because the prompt was trained with it.
        name: The name of the model in mteb's results, "organization/model". None: the encoder's Hugging Face name, or
            riptide/FOLDER.

    Raises:
        InputError: If mteb is not installed, if the two encoders do not fit together, or if a prompt does not fit.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        task: TaskPrompt | Mapping[str, TaskPrompt] | None = None,
        passage_encoder: Encoder | None = None,
        symmetric_side: Side = "query",
        instructions: bool = True,
        name: str | None = None,
    ):
        require("MtebEncoder", "mteb")
        if symmetric_side not in SIDES:
            raise InputError(f"{Parameter('symmetric_side', repr(symmetric_side))}: expected one of {', '.join(SIDES)}")
        self._encoders: dict[Side, Encoder] = {"query": encoder, "passage": passage_encoder or encoder}
        _check_alike(encoder, self._encoders["passage"])
        self._symmetric_side = symmetric_side
        self._instruction = _INSTRUCTION.fullmatch(encoder.config["query_prefix"]) if instructions else None
        self._default: str | None = None
        self._by_task: dict[str, str] = {}
        variations: dict[str, Any] = {}
        if isinstance(task, TaskPrompt):
            self._default = variations["task"] = self._put(task)
        elif task:
            self._by_task = variations["tasks"] = {mteb_task: self._put(prompt) for mteb_task, prompt in task.items()}
        if passage_encoder is not None:
            variations["passage_encoder"] = passage_encoder.fingerprint
        if symmetric_side != "query":
            variations["symmetric_side"] = symmetric_side
        if not instructions:
            variations["instructions"] = False
        encoder_fingerprint = encoder.fingerprint
        revision = fingerprint_of({"encoder": encoder_fingerprint, **variations}) if variations else encoder_fingerprint
        self.mteb_model_meta = _describe(encoder, self._encoders["passage"], name or _name_of(encoder), revision)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: str | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Encodes mteb's texts and returns their vectors in order.

        Args:
            inputs: Batches, for example a DataLoader. Documents have "title" and "body", which are joined as the
                options of the encoder say; their "text" is mteb's own concatenation of both, and is not used. Other
                texts have "text".
            task_metadata: mteb's TaskMetadata.
            hf_split: Not used.
            hf_subset: Not used.
            prompt_type: mteb's PromptType, "query" or "document"; None: the task is symmetric.
            **options: mteb's EncodeKwargs; no one has an effect.

        Returns:
            float32 [n, dim].

        Raises:
            InputError: If a text is not a valid string, if another precision than float32 is requested, or if a query
                lacks the words from which its prompt is computed.
        """
        if (precision := options.get("precision")) not in (None, "float32"):
            raise InputError(
                f"{Parameter('precision', repr(precision))}: MtebEncoder makes float32 vectors; leave it out"
            )
        side = self._side_of(prompt_type)
        encoder = self._encoders[side]
        prompt = self._by_task.get(task_metadata.name, self._default)
        prefix = self._prefix_of(task_metadata) if side == "query" and prompt is None else None
        texts = [text for batch in inputs for text in _texts_of(batch, side, encoder)]
        shown = "" if prefix is None else f", prefix {prefix!r}"
        log.info("%s: %d texts, side %s, deep prompt: %s%s", task_metadata.name, len(texts), side, prompt, shown)
        tokens = encoder.tokenize(texts, side=side, prefix=prefix)
        topics = encoder.topics_of(texts, side=side, task=prompt)
        return encoder.forward(tokens, side=side, task=prompt, topics=topics)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Returns the similarity of all pairs, a tensor [n, m]: cosine, or inner product if the encoder uses "dot"."""
        from mteb.similarity_functions import cos_sim, dot_score

        return (cos_sim if self._is_cosine else dot_score)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Returns the row-by-row similarity of two arrays of vectors, a tensor [n]; computed as in `similarity`."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_cos_sim if self._is_cosine else pairwise_dot_score)(embeddings1, embeddings2)

    @property
    def _is_cosine(self) -> bool:
        return self._encoders["query"].similarity == "cosine"

    def _put(self, prompt: TaskPrompt) -> str:
        """Adds a prompt to the encoders and returns its task name, which is the same for equal prompts."""
        configs: dict[str, Any] = {
            side: task_config(encoder.config, prompt, side) for side, encoder in self._encoders.items()
        }
        name = f"mteb-{fingerprint_of(configs)}"
        for encoder in {id(encoder): encoder for encoder in self._encoders.values()}.values():
            if name not in encoder.tasks:
                encoder.put_task(name, prompt)
        return name

    def _side_of(self, prompt_type: str | None) -> Side:
        if prompt_type is None:
            return self._symmetric_side
        return "query" if prompt_type == "query" else "passage"

    def _prefix_of(self, task_metadata: Any) -> str | None:
        """Returns the query prefix with the instruction of mteb's task; None: use the encoder's own prefix."""
        from mteb.abstasks.abstask import get_abstask_prompt

        if self._instruction is None:
            return None
        prompt = task_metadata.prompt
        instruction = prompt.get("query") if isinstance(prompt, Mapping) else prompt
        instruction = instruction or get_abstask_prompt(task_metadata.name)
        if not instruction:
            return None
        prefix, (start, end) = self._instruction.string, self._instruction.span(1)
        return prefix[:start] + instruction + prefix[end:]


def _check_alike(query: Encoder, passage: Encoder) -> None:
    """Raises InputError if vectors of the two encoders cannot be compared."""
    if (query.dim, query.similarity) != (passage.dim, passage.similarity):
        raise InputError(
            f"passage_encoder: {passage.name} has {passage.dim} dimensions ({passage.similarity}) and {query.name} has "
            f"{query.dim} ({query.similarity}): expected the same"
        )


def _texts_of(batch: Mapping[str, Any], side: Side, encoder: Encoder) -> Sequence[str]:
    """Returns the texts of a batch; documents are composed with their titles."""
    if side == "query" or "body" not in batch:
        return list(batch["text"])
    bodies = list(batch["body"])
    return encoder.compose(batch.get("title", [""] * len(bodies)), bodies)


def _name_of(encoder: Encoder) -> str:
    """Returns the model name in the form "organization/model", which mteb requires."""
    is_hub_name = "/" in encoder.name and not expand_home(encoder.name).is_dir()
    return encoder.name if is_hub_name else f"riptide/{expand_home(encoder.name).resolve().name}"


def _describe(query: Encoder, passage: Encoder, name: str, revision: str) -> Any:
    """Returns mteb's ModelMeta; fields that the encoder cannot provide are None."""
    from mteb.models.model_meta import ModelMeta

    known_fields = {
        "name": name,
        "revision": revision,
        "max_tokens": max(query.config["query_length"], passage.config["passage_length"]),
        "embed_dim": query.dim,
        "similarity_fn_name": query.similarity,
        "framework": ["PyTorch"],
        "use_instructions": bool(query.config["query_prefix"] or passage.config["passage_prefix"]),
    }
    required_fields = [field for field, info in ModelMeta.model_fields.items() if info.is_required()]
    return ModelMeta(**{**dict.fromkeys(required_fields), **known_fields})
