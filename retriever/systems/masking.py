"""Masked language modelling with any backbone: masks tokens, and computes vectors and the loss in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from riptide.base.errors import InputError
from riptide.retriever.encoding.backbones import check_layers, load_backbone
from riptide.retriever.encoding.language_model import (
    extract_language_model_head,
    has_head,
    make_head_test,
    replace_submodule,
)
from riptide.retriever.encoding.saving import save_model, with_original_values
from riptide.retriever.forward.batching import Tokens
from riptide.retriever.forward.kernels import attention_dropouts, vocabulary_loss
from riptide.retriever.forward.pooling import check_first_token
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.vocabulary import load_tokenizer
from riptide.retriever.model.weights import load_model
from riptide.retriever.systems.condenser import CondenserHead

_WORD_MARKS = ("\u2581", "\u0120")  # mark of the space before a word in SentencePiece tokens and byte-level BPE tokens


class Masking:
    """Masks tokens of texts; knows which tokens can be masked and which can replace them.

    A tokenizer without a mask token masks with its unknown token. Raises InputError if it has neither.
    """

    def __init__(self, recipe: Recipe, vocabulary_size: int, probability: float):
        slow = load_tokenizer(recipe.backbone, vocabulary_size=vocabulary_size, **recipe.tokenizer_args)
        mask = slow.mask_token_id if slow.mask_token_id is not None else slow.unk_token_id
        if mask is None:
            raise InputError(f"{recipe.backbone}: its tokenizer has no mask token, and no unknown one to mask with")
        self.mask_id, self.probability = int(mask), probability
        special = set(slow.all_special_ids)
        # Excludes unused rows of a padded table, and the padding token, from which RoBERTa computes positions.
        ids = [number for number in range(min(len(slow), vocabulary_size)) if number not in special]
        self.ordinary = np.zeros(max(vocabulary_size, len(slow)), bool)
        self.ordinary[ids] = True
        self.replacements = np.array(ids, np.int32)
        self.opens_word = np.zeros(len(self.ordinary), bool)
        self.opens_word[ids] = [str(piece).startswith(_WORD_MARKS) for piece in slow.convert_ids_to_tokens(ids)]

    def __call__(self, tokens: Tokens, keys: list[list[int]], words: np.ndarray | None = None) -> tuple[Tokens, Tokens]:
        """Returns the masked texts and their labels: original tokens at masked positions, -100 elsewhere.

        Of a text's ordinary (not special) tokens, round(probability * their number) are masked, at least one if the
        text has any (BERT): 80 % of them become the mask token, 10 % a random ordinary token, 10 % stay. A function of
        the text's tokens and its key, which seeds the random generator.

        With `words`, whole words are masked, in random order, as long as they fit into that number; those that do not
        fit are skipped (Condenser). A text in which no word fits is masked token by token.

        Args:
            tokens: The texts.
            keys: The seed of each text.
            words: The tokenizer's word of each token, int64 [total]; None: single tokens are masked.
        """
        ids, labels = tokens.ids.copy(), np.full_like(tokens.ids, -100)
        for start, length, key in zip(tokens.starts, tokens.lengths, keys, strict=True):
            text = slice(start, start + length)
            positions = start + np.flatnonzero(self.ordinary[tokens.ids[text]])
            if not len(positions):
                continue
            rng = np.random.default_rng(key)
            count = min(len(positions), max(1, round(self.probability * len(positions))))
            chosen = np.empty(0, np.int64)
            if words is not None:
                word_numbers = self._word_numbers(tokens.ids[text], words[text])
                chosen = _choose_words(positions, word_numbers[positions - start], count, rng)
            if not len(chosen):
                chosen = rng.choice(positions, count, replace=False)
            fate = rng.random(len(chosen))
            random = rng.choice(self.replacements, len(chosen))
            labels[chosen] = tokens.ids[chosen]
            ids[chosen] = np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, random, tokens.ids[chosen]))
        return Tokens(ids, tokens.lengths), Tokens(labels, tokens.lengths)

    def _word_numbers(self, ids: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns the word number of each token of a text, from 0, int64 [length].

        A tokenizer without pre-tokenization takes a text for one word; then the pieces mark where a word begins.
        """
        begins = np.r_[True, words[1:] != words[:-1]] | self.opens_word[ids]
        return np.cumsum(begins) - 1


def _choose_words(positions: np.ndarray, word_numbers: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Chooses words to mask: returns their positions, int64 [at most count], ascending; empty if no word fits.

    Args:
        positions: Positions of the tokens that can be masked, int64 [n].
        word_numbers: The word of each of them, int64 [n], not falling.
        count: Maximum number of tokens to mask.
        rng: The random generator.
    """
    firsts = np.flatnonzero(np.r_[True, word_numbers[1:] != word_numbers[:-1]])
    sizes = np.diff(np.r_[firsts, len(word_numbers)])
    chosen: list[np.ndarray] = []
    room = count
    for word in rng.permutation(len(firsts)):
        if not room:
            break
        if sizes[word] <= room:
            chosen.append(positions[firsts[word] : firsts[word] + sizes[word]])
            room -= int(sizes[word])
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


class MaskedLanguageModel(nn.Module):
    """A backbone and masked-language-model head for training, in float32, without attention dropout.

    If the weights hold no head, or transformers has no head for the architecture, a new one is tied to the input
    embeddings.

    Args:
        recipe: How the backbone encodes texts.
        pooling: Pooling of token vectors into the vector of a text.
        condenser: Condenser's head, as a function of the backbone's configuration; its loss is added. It is saved with
            the backbone.
        late_loss: With a head, also add the loss of the last layer's tokens.

    Raises:
        InputError: If weights are incomplete or belong to another backbone.
    """

    whole: Any
    backbone: nn.Module
    head: nn.Module

    def __init__(
        self,
        recipe: Recipe,
        pooling: str = "cls",
        *,
        condenser: Callable[[Any], CondenserHead] | None = None,
        late_loss: bool = True,
    ):
        super().__init__()
        self.pooling, self.late_loss, self.saves_head = pooling, late_loss, True
        whole, self.fresh_head, self._dropouts = _load_masked_language_model(recipe)
        # Bypasses nn.Module, because the submodules are registered below; the model is saved as a whole.
        object.__setattr__(self, "whole", whole)
        check_first_token(whole, pooling)
        has_class = has_head(whole.config)
        self.backbone = whole.base_model if has_class else whole
        self.head = _TransformersHead(whole) if has_class else TiedHead(whole)
        self.condenser = None if condenser is None else condenser(whole.config)
        check_layers(self.encode, whole.config, recipe.backbone)

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor, prompt: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the texts' vectors, float32 [n, hidden], and the sum over masked tokens of -log p(token), a scalar.

        Args:
            ids: int64 [n, width], padded on the right.
            lengths: int64 [n].
            labels: int64 [n, width], -100 at tokens that are not masked.
            prompt: PromptRows, for a backbone that `riptide.retriever.forward.attention.enable_prompts` prepared.
        """
        is_token = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        output = self._run(ids, is_token, prompt, **({} if self.condenser is None else {"output_hidden_states": True}))
        last = output.last_hidden_state
        vectors = self._pool(last, is_token)
        masked = torch.nonzero(labels.flatten() != -100)[:, 0]
        targets = labels.flatten()[masked]
        if self.condenser is None:
            return vectors, self._masked_loss(last, masked, targets)
        early_layer = self.condenser.shape.skip_from
        loss = self._masked_loss(self.condenser(last, output.hidden_states[early_layer], is_token), masked, targets)
        if self.late_loss:
            loss = self._masked_loss(last, masked, targets) + loss
        return vectors, loss

    def encode(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: Any = None) -> torch.Tensor:
        """Returns the texts' vectors alone, float32 [n, hidden]; arguments as in `forward`."""
        is_token = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        return self._pool(self._run(ids, is_token, prompt).last_hidden_state, is_token)

    def _run(self, ids: torch.Tensor, is_token: torch.Tensor, prompt: Any, **settings: Any) -> Any:
        """Runs the backbone; is_token: bool [n, width], False at padding."""
        extra: dict[str, Any] = settings if prompt is None else {"prompt": prompt, **settings}
        return self.backbone(input_ids=ids, attention_mask=is_token.long(), **extra)

    def _pool(self, last: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        """Pools token vectors: float [n, width, hidden] -> float32 [n, hidden]."""
        if self.pooling == "mean":
            return (last.float() * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
        return last[:, 0].float()

    def _masked_loss(self, hidden: torch.Tensor, masked: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the summed loss at masked positions, float32 []; logits are computed only for these positions."""
        loss: torch.Tensor = self.head(hidden.flatten(0, 1)[masked], targets)
        return loss

    def save_pretrained(self, folder: Path) -> None:
        """Saves the backbone with its original dropout rates, and its heads.

        The masked-language-model head is saved if transformers has a class for it, unless `saves_head` is False.
        """
        saved: Any = self.whole if self.saves_head else self.backbone
        with with_original_values(saved.config, self._dropouts):
            save_model(saved, folder)
        if self.condenser is not None:
            self.condenser.save(folder)


class _OutputLayer(nn.Module):
    """The output layer of a language model: hidden float [k, d], targets int64 [k] -> the summed loss, float32 []."""

    def __init__(self, table: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = table
        self.bias = bias

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocabulary_loss(hidden, self.weight, self.bias, targets)


class TiedHead(nn.Module):
    """BERT's head for a model without a head: hidden float [k, hidden], targets int64 [k] -> the summed loss.

    Its logits are s LayerNorm(gelu(W h + b)) E^T + c, where E is the tensor of the model's input embeddings. s is 1, or
    less if E's numbers are so large (T5's are near 1) that the standard deviation of new logits would exceed 1.
    """

    def __init__(self, model: Any):
        super().__init__()
        table = model.get_input_embeddings().weight
        spread = getattr(model.config, "initializer_range", None) or 0.02
        self.transform = nn.Linear(int(model.config.hidden_size), table.shape[1])
        nn.init.normal_(self.transform.weight, std=spread)
        nn.init.zeros_(self.transform.bias)
        self.norm = nn.LayerNorm(table.shape[1], eps=1e-12)
        self.decoder = _OutputLayer(table, nn.Parameter(torch.zeros(table.shape[0])))
        self.scale = min(1.0, 1 / (float(table.detach().float().std()) * table.shape[1] ** 0.5 + 1e-12))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        words = self.scale * self.norm(functional.gelu(self.transform(hidden)))
        loss: torch.Tensor = self.decoder(words, targets)
        return loss


class _TransformersHead(nn.Module):
    """The head of a transformers model of any structure: the model itself, over a stand-in for its backbone.

    If the product with the output table is the model's last step, the model ends before it and `vocabulary_loss`
    computes the product; if more follows (a cap on the logits), all logits are computed, with activation checkpointing.
    """

    decoder: _OutputLayer | None

    def __init__(self, model: Any):
        super().__init__()
        self.model = extract_language_model_head(model)
        table = model.get_output_embeddings()
        without_output = replace_submodule(self.model, table, nn.Identity())
        self.decoder = None
        if type(table) is nn.Linear and _computes_same(self.model, without_output, table):
            self.model, self.decoder = without_output, _OutputLayer(table.weight, table.bias)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.decoder is None:
            return checkpoint(self._loss_of, hidden, targets, use_reentrant=False)
        loss: torch.Tensor = self.decoder(self._run(hidden), targets)
        return loss

    def _run(self, hidden: torch.Tensor) -> Any:
        return self.model(inputs_embeds=hidden[None]).logits[0]

    def _loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self._run(hidden).float(), targets, reduction="sum")


def _computes_same(model: Any, without_output: Any, table: nn.Linear) -> bool:
    """Whether the output layer applied after the model without it gives the same logits as the model."""
    hidden = torch.linspace(-1, 1, 2 * int(model.config.hidden_size)).view(1, 2, -1).to(table.weight)
    modes = {part: part.training for part in (*model.modules(), *without_output.modules())}
    try:
        with torch.no_grad():
            words = without_output.eval()(inputs_embeds=hidden).logits
            return words.shape[-1] == table.in_features and torch.allclose(
                table(words), model.eval()(inputs_embeds=hidden).logits, atol=1e-4, rtol=1e-4
            )
    except (RuntimeError, ValueError, TypeError):
        return False
    finally:
        for part, training in modes.items():
            part.training = training


def _load_masked_language_model(recipe: Recipe) -> tuple[Any, bool, dict[str, float]]:
    """Loads the model without attention dropout; also returns whether its head is new, and the original dropout rates.

    The model has a head if transformers has a class with a head for the architecture.
    """
    transformers = import_transformers()

    config = load_config(recipe.backbone, **recipe.config_args)
    dropouts = attention_dropouts(config)
    off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
    if not has_head(config):
        return load_backbone(recipe, torch.float32, **off), True, dropouts

    if config.is_encoder_decoder:
        raise InputError(f"{recipe.backbone}: a {config.model_type} has a decoder too, which gives no vectors")
    is_head = make_head_test(config)

    def load(**config: Any) -> tuple[Any, list[str]]:
        settings = {**recipe.config_args, **off, **config}
        return load_model(
            transformers.AutoModelForMaskedLM, recipe.backbone, dtype=torch.float32, fresh=[is_head], **settings
        )

    model, lacking = load()
    if lacking and not config.tie_word_embeddings:
        model, _ = load(tie_word_embeddings=True)
    return model, bool(lacking), dropouts
