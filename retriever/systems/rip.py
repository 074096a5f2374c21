"""Pretraining objectives: RIP (DPTDR, section 3.2), Condenser, coCondenser, masked language modelling, and plain pairs.

Defines a System for the training loop: the batch of each step, the two losses of the model, and how it is saved. RIP
is retrieval-oriented intermediate pretraining.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.encoding.saving import save_encoder
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.batching import (
    BATCH_TOKENS,
    COLUMN_STEP,
    TextTokenizer,
    Tokens,
    padded_batches,
    plan_padded,
)
from riptide.retriever.forward.kernels import swap_dropout
from riptide.retriever.forward.prompt_rows import PromptInputs
from riptide.retriever.model.model_folder import BackboneFiles
from riptide.retriever.model.recipe import read_recipe, settings_of
from riptide.retriever.options import EncoderOptions, Side
from riptide.retriever.options.pretraining import RipOptions
from riptide.retriever.prompts.deep_prompt import MatrixPrompt
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.systems.condenser import CondenserHead, choose_head_shape, saved_head_shape
from riptide.retriever.systems.masking import MaskedLanguageModel, Masking
from riptide.retriever.systems.sentences import count_words, split_into_spans, split_sentences
from riptide.retriever.training.dev_workers import ITEMS, share_items
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput, checkpoint_activations

# Numbers of random streams for epoch orders, pairs and masks; the training loop uses stream 2.
_ORDER, _PAIR, _MASK = 3, 4, 5
PAIRS_TEMPERATURE = 0.01  # divisor of the cosines of objective "pairs", as in GTR


@dataclass(frozen=True)
class RipData:
    """The passages of a pretraining run.

    Attributes:
        num_passages: The corpus has rows 0 to num_passages - 1.
        texts: Maps rows, int64 [n], to the texts of n passages.
        rows: Rows that can be drawn (`are_eligible`), int64 [any].
    """

    num_passages: int
    texts: Callable[[np.ndarray], list[str]]
    rows: np.ndarray


def encoder_options(options: RipOptions) -> EncoderOptions:
    """Returns the encoder options of pretraining, which its prompts keep."""
    return EncoderOptions(
        pooling=options.pooling,
        query_prefix="",
        passage_prefix="",
        normalize=not options.has_masks,
        query_length=options.max_length,
        passage_length=options.max_length,
        padding_side="right",
    )


def rip_loss(
    vectors: torch.Tensor, passages: torch.Tensor | None = None, texts: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the loss of Eq. 4: the mean over 2m units of -log( e^s(x, x') / sum over y of e^s(x, y) ).

    s is the raw inner product, x' the partner of x, and y are x' and the negatives. The negatives of x are all units
    of the batch, except x, the other units of its passage, and the units whose text is that of x or of x'.

    Args:
        vectors: float32 [2m, dim]; the partner of row 2i is row 2i + 1.
        passages: The passage of each row, int64 [2m]; None: every pair is of another passage.
        texts: A number per row, int64 [2m], that equal texts share; None: all texts differ.

    Returns:
        A scalar.
    """
    rows = torch.arange(len(vectors), device=vectors.device)
    partners = rows ^ 1
    excluded = rows[:, None] == rows
    if passages is not None:
        excluded = excluded | (passages[:, None] == passages)
    if texts is not None:
        excluded = excluded | (texts[:, None] == texts) | (texts[partners][:, None] == texts)
    excluded[rows, partners] = False
    scores = (vectors @ vectors.T).masked_fill(excluded, float("-inf"))
    return functional.cross_entropy(scores, partners)


def are_eligible(texts: Sequence[str], options: RipOptions) -> np.ndarray:
    """Returns a mask of the passages that can be drawn, bool [texts].

    These are passages with two different sentences of at least `min_words` words, or with two spans of as many. If
    passages are drawn as a whole, these are the passages that are not empty.
    """
    if not options.has_pairs:
        return np.array([bool(text.strip()) for text in texts], bool)
    return np.array([len(_passage_units(text, options, np.random.default_rng(0))) > 1 for text in texts], bool)


def limit_batch(options: RipOptions, num_eligible: int) -> RipOptions:
    """Returns options with at most `num_eligible` passages per batch, if passages are negatives of each other.

    Raises:
        InputError: If fewer than two passages can be drawn.
    """
    if not options.has_pairs:
        return options
    if num_eligible < 2:
        raise InputError(
            f"passages with two {options.unit}s of at least {options.min_words} words: {num_eligible}; "
            "the pairs of one passage have no negatives, so two passages are needed"
        )
    return replace(options, batch=min(options.batch, num_eligible))


def passages_at(options: RipOptions, rows: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the passage rows of the batch at a step, and the epoch of each: int64 [batch] both.

    They depend on (seed, step, batch) only: the epochs are permutations of the eligible rows, concatenated.
    """
    positions = step * options.batch + np.arange(options.batch)
    epochs, positions_in_epoch = np.divmod(positions, len(rows))
    passages = np.empty(options.batch, np.int64)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        passages[is_in_epoch] = rows[_permutation(options.seed, int(epoch), len(rows))[positions_in_epoch[is_in_epoch]]]
    return passages, epochs


def draw_pair(text: str, options: RipOptions, epoch: int, passage: int) -> tuple[str, str]:
    """Draws two different sentences (or spans) of a passage, as a function of (seed, epoch, passage).

    Raises:
        InputError: If the passage has only one.
    """
    rng = np.random.default_rng([options.seed, _PAIR, epoch, passage])
    units = _passage_units(text, options, rng)
    if len(units) < 2:
        raise InputError(f"passage {passage}: has {len(units)} {options.unit}(s), two are needed: find the rows again")
    first, second = rng.choice(len(units), 2, replace=False)
    return units[first], units[second]


class RipSystem:
    """A System for pretraining: a backbone with a masked-language-model head and the losses of Eq. 4 and 5.

    Weights are float32; with dtype bfloat16 the forward pass runs under autocast.

    Args:
        folder: Folder of the backbone.
        options: Options of pretraining.
        data: The passages; None if the model is only inspected.
        device: The device of the model.
        dtype: The dtype of the forward pass.
        checkpointing: Use activation checkpointing.

    Raises:
        InputError: If the backbone cannot be used.
    """

    module: nn.Module

    def __init__(
        self,
        folder: Path,
        options: RipOptions,
        data: RipData | None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
    ):
        torch.manual_seed(options.seed)
        self.options, self.data, self.device, self.dtype = options, data, device, dtype
        self.encoder = encoder_options(options)
        head = () if options.has_masks else ("normalize",)
        self.recipe = replace(read_recipe(folder, self.encoder), head=head)
        self._files = BackboneFiles(self.recipe.backbone)
        self.tokenizer = TextTokenizer(self.recipe, self.encoder)
        model = MaskedLanguageModel(
            self.recipe,
            options.pooling,
            late_loss=options.late_loss,
            condenser=self._open_head if options.trains_condenser_head else None,
        )
        self._files.check()
        self.masking = Masking(self.recipe, int(model.whole.config.vocab_size), options.mlm_probability)
        self.model = model.to(device)
        swap_dropout(self.model)
        if not options.has_masks:  # The head gets no gradient, except tensors that it shares with the backbone.
            self.model.saves_head = not model.fresh_head  # A saved head with random weights would look trained.
            shared = {id(parameter) for parameter in model.backbone.parameters()}
            for parameter in model.head.parameters():
                parameter.requires_grad_(id(parameter) in shared)
        modules: dict[str, nn.Module] = {"model": self.model}
        if options.train == "prompts":
            modules["prompt"] = prompt = MatrixPrompt(enable_prompts(model.backbone), options.prompt_length).to(device)
            self.prompt: MatrixPrompt | None = prompt
            model.head.requires_grad_(model.fresh_head and options.has_masks)
            model.backbone.requires_grad_(False)
        else:
            self.prompt = None
            # Architectures without support for prompts train with torch's own attention.
            with contextlib.suppress(InputError):
                enable_prompts(model.backbone)
        if checkpointing:
            checkpoint_activations(model.whole)
        self.module = nn.ModuleDict(modules)

    def _open_head(self, config: Any) -> CondenserHead:
        """Loads the head that was saved with the backbone, or builds a new one."""
        folder = self.recipe.backbone
        shape = choose_head_shape(
            folder, int(config.num_hidden_layers), self.options.head_layers, self.options.skip_from
        )
        head = CondenserHead(config, shape)
        if saved_head_shape(folder) is not None:
            head.load(folder)
        return head

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns a worker's share of the batch of a step: every world-th passage.

        Rows 2i and 2i + 1 are the two units of passage i of the batch. If passages are drawn as a whole, row i is
        passage i, and its vector is not used. The loss gets the passages and the digests of all units, which show equal
        units of other workers too.

        Raises:
            InputError: If there are fewer passages than workers.
        """
        assert self.data is not None
        options = self.options
        if options.batch < world:
            raise InputError(
                f"{Parameter('batch', options.batch)}: cannot be shared by {world} workers, expected at least "
                "one passage for each"
            )
        passages, epochs = passages_at(options, self.data.rows, step)
        mine = np.arange(rank, options.batch, world)
        texts = self.data.texts(passages[mine])
        per_passage = 2 if options.has_pairs else 1
        if per_passage == 2:
            chosen = zip(texts, epochs[mine], passages[mine], strict=True)
            texts = [unit for text, e, p in chosen for unit in draw_pair(text, options, int(e), int(p))]
        rows = (per_passage * mine[:, None] + np.arange(per_passage)).ravel()
        keys = [[options.seed, _MASK, step, int(row)] for row in rows]
        words = None
        if options.mask == "word":
            units, words = self.tokenizer.with_words(texts, side="passage")
        else:
            units = self.tokenizer(texts, side="passage")
        tokens, labels = self.masking(units, keys, words) if options.has_masks else (units, units)
        # A single all-reduce shares the number of masked tokens and the unit digests with all workers.
        num_rows = 0 if per_passage == 1 else per_passage * options.batch
        shared = torch.zeros(1 + num_rows, dtype=torch.int64)
        shared[0] = int((labels.ids != -100).sum())
        if num_rows:
            shared[1 + torch.from_numpy(rows)] = torch.from_numpy(_digests(units))
        shared = shared.to(self.device)
        if world > 1:
            dist.all_reduce(shared)
        total = max(1, int(shared[0]))
        batches = plan_padded(tokens.lengths, BATCH_TOKENS[self.device.type], COLUMN_STEP, self.recipe.max_positions)
        noun = options.whole_texts
        inputs = padded_batches(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
        targets = padded_batches(labels, batches, side="right", pad_id=-100)
        chunks = []
        for (text_rows, ids, lengths), (_, label_ids, _) in zip(inputs, targets, strict=True):
            unique = slice(len(text_rows))  # A chunk of a single text contains it twice.
            chunk_inputs = (ids[unique], lengths[unique], label_ids[unique], total)
            cuts = {} if noun is None else {noun: units.count_cuts(text_rows)}
            chunks.append(BatchChunk({"dense": rows[text_rows]}, chunk_inputs, chunk_inputs[0].numel(), cuts))
        of_rows = torch.from_numpy(np.repeat(passages, per_passage)).to(self.device)
        labels_of_rows = {"passages": of_rows, "texts": shared[1:]} if num_rows else {}
        outputs = {"dense": BatchOutput(self.recipe.hidden, num_rows)} if num_rows else {}
        return Batch(outputs, chunks, labels_of_rows)

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Returns a chunk's vectors as "dense", float32 [n, hidden], and its part of L_s; None without masking.

        L_s is the mean over all masked tokens of the batch.
        """
        *inputs, total = chunk.inputs
        ids, lengths, labels = (tensor.to(self.device) for tensor in inputs)
        prompt = None if self.prompt is None else self.prompt(PromptInputs(ids, lengths))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            if not self.options.has_masks:
                return {"dense": functional.normalize(self.model.encode(ids, lengths, prompt), dim=-1)}, None
            vectors, masked = self.model(ids, lengths, labels, prompt)
        return {"dense": vectors}, masked / total

    @property
    def dim(self) -> int:
        """The dimension of a vector."""
        return self.recipe.hidden

    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Encodes texts with the current model, without masking: float32 [n, hidden].

        Each worker encodes a share of the texts, and all workers get the result.
        """

        def make_chunks(rows: np.ndarray) -> list[BatchChunk]:
            if not len(rows):
                return []
            tokens = self.tokenizer([texts[row] for row in rows], side=side)
            batches = plan_padded(
                tokens.lengths, BATCH_TOKENS[self.device.type], COLUMN_STEP, self.recipe.max_positions
            )
            filled = padded_batches(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
            return [
                BatchChunk({ITEMS: rows[text_rows]}, (ids, lengths), ids.numel()) for text_rows, ids, lengths in filled
            ]

        def forward(chunk: BatchChunk) -> torch.Tensor:
            ids, lengths = (tensor.to(self.device) for tensor in chunk.inputs)
            prompt = None if self.prompt is None else self.prompt(PromptInputs(ids, lengths))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                vectors = self.model.encode(ids, lengths, prompt)[: len(chunk.rows[ITEMS])]
            return vectors if self.options.has_masks else functional.normalize(vectors, dim=-1)

        shape = (len(texts), int(self.model.whole.config.hidden_size))
        return share_items(self.module, make_chunks, forward, shape, device=self.device, rank=rank, world=world)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the contrastive loss L_c, the mean over the batch's units; 0 if passages are drawn as a whole."""
        if not batch.outputs:
            return torch.zeros((), device=self.device)
        vectors = outputs["dense"]
        if not self.options.has_masks:
            vectors = vectors * (self.options.temperature or PAIRS_TEMPERATURE) ** -0.5
        return rip_loss(vectors, **batch.arguments)

    def save(self, folder: Path) -> None:
        """Saves a model for transformers, sentence-transformers and Encoder, with its full length; or a prompt."""
        if self.prompt is not None:
            self._files.check()
            matrix = self.prompt.matrix().cpu()
            config = settings_of(read_recipe(self.recipe.folder, self.encoder), self.encoder)
            TaskPrompt(backbone_of(config), self.encoder, matrix, matrix).save(folder)
            return
        recipe = read_recipe(
            self.recipe.folder, replace(self.encoder, query_length=None, passage_length=None, padding_side=None)
        )
        save_encoder(folder, replace(recipe, head=self.recipe.head), self.model)


def _passage_units(text: str, options: RipOptions, rng: np.random.Generator) -> list[str]:
    """Returns the units of a passage from which a pair is drawn, without duplicate sentences."""
    if options.unit == "sentence":
        sentences = dict.fromkeys(split_sentences(text, options.language))
        return [sentence for sentence in sentences if count_words(sentence) >= options.min_words]
    return split_into_spans(text, options.max_length, rng, options.min_words)


def _digests(tokens: Tokens) -> np.ndarray:
    """Returns one hash per text, equal for equal token ids: int64 [texts], 8 bytes of BLAKE2b."""
    digests = np.empty(len(tokens), np.int64)
    for row, (start, length) in enumerate(zip(tokens.starts, tokens.lengths, strict=True)):
        digest = hashlib.blake2b(tokens.ids[start : start + length].tobytes(), digest_size=8).digest()
        digests[row] = int.from_bytes(digest, "little", signed=True)
    return digests


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(size)
