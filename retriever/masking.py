"""Masked language modelling with any backbone: what is masked, and a model that gives vectors and the loss at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retriever.batching import Tokens
from retriever.encoder import load_backbone
from retriever.errors import InputError
from retriever.kernels import attention_dropouts, vocabulary_loss
from retriever.pooling import check_first_token
from retriever.recipe import Recipe
from retriever.saving import restored

CONDENSER_LAYERS = 2  # of Condenser's head (Gao & Callan 2021, section 4.1)


class Masking:
    """Which tokens of a tokenizer can be masked, and by what.

    Where there is no mask token the unknown one takes its place. Raises InputError where there is neither.
    """

    def __init__(self, recipe: Recipe, vocabulary: int, probability: float):
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(recipe.backbone, **recipe.tokenizer_args)
        mask = slow.mask_token_id if slow.mask_token_id is not None else slow.unk_token_id
        if mask is None:
            raise InputError(f"{recipe.backbone}: its tokenizer has no mask token, and no unknown one to mask with")
        self.mask_id, self.probability = int(mask), probability
        special = set(slow.all_special_ids)
        # Never of a padded table's tail, nor the padding token, by which RoBERTa counts positions.
        ids = [number for number in range(min(len(slow), vocabulary)) if number not in special]
        self.ordinary = np.zeros(max(vocabulary, len(slow)), bool)
        self.ordinary[ids] = True
        self.replacements = np.array(ids, np.int32)

    def __call__(self, tokens: Tokens, keys: list[list[int]]) -> tuple[Tokens, Tokens]:
        """The texts masked, and their labels: what was there at masked places, -100 elsewhere.

        Of a text's ordinary (not special) tokens, round(probability * their number) are masked, at least one where
        there is any (BERT): of these 80 % become the mask token, 10 % a random ordinary one, 10 % stay. A function of
        the text's tokens and of its key, from which a generator is made.
        """
        ids, labels = tokens.ids.copy(), np.full_like(tokens.ids, -100)
        for start, length, key in zip(tokens.starts, tokens.lengths, keys, strict=True):
            places = start + np.flatnonzero(self.ordinary[tokens.ids[start : start + length]])
            if not len(places):
                continue
            draw = np.random.default_rng(key)
            count = min(len(places), max(1, round(self.probability * len(places))))
            chosen = draw.choice(places, count, replace=False)
            fate = draw.random(count)
            random = draw.choice(self.replacements, count)
            labels[chosen] = tokens.ids[chosen]
            ids[chosen] = np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, random, tokens.ids[chosen]))
        return Tokens(ids, tokens.lengths), Tokens(labels, tokens.lengths)


class MaskedBackbone(nn.Module):
    """A backbone with its masked-language-model head (float32; dropout of attention's weights off, as in training).

    Where the weights have no head, or transformers has none for the architecture, a fresh one is tied to the input
    embeddings. condenser: two more layers, which see the last first token and the other tokens of the middle layer
    (Gao & Callan 2021); its own loss is added. Raises InputError for weights that are not this backbone's.
    """

    whole: Any
    backbone: nn.Module
    head: nn.Module

    def __init__(self, recipe: Recipe, pooling: str = "cls", *, condenser: bool = False):
        super().__init__()
        self.pooling = pooling
        whole, self.fresh_head, self._dropouts = _load(recipe)
        object.__setattr__(self, "whole", whole)  # what is saved; its parts are registered
        check_first_token(whole, pooling)
        foreign = _has_head(whole.config)
        self.backbone = whole.base_model if foreign else whole
        self.head = _ForeignHead(whole) if foreign else TiedHead(whole)
        config = whole.config
        self.early = int(config.num_hidden_layers) // 2
        self.condenser = nn.ModuleList(_layer(config) for _ in range(CONDENSER_LAYERS)) if condenser else None

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor, prompt: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [n, width], filled up on the right; lengths int64 [n]; labels int64 [n, width], -100 where not
        masked -> the texts' vectors float32 [n, hidden], and the sum over masked tokens of -log p(token), a scalar.

        prompt: PromptRows, for a backbone whose attention was led through the seam (retriever.attention.reach).
        """
        inside = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        extra: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        if self.condenser is not None:
            extra["output_hidden_states"] = True
        output = self.backbone(input_ids=ids, attention_mask=inside.long(), **extra)
        last = output.last_hidden_state
        if self.pooling == "mean":
            vectors = (last.float() * inside[..., None]).sum(1) / lengths[:, None]
        else:
            vectors = last[:, 0].float()
        at = torch.nonzero(labels.flatten() != -100)[:, 0]
        targets = labels.flatten()[at]
        loss = self._masked_loss(last, at, targets)
        if self.condenser is not None:
            both = torch.cat([last[:, :1], output.hidden_states[self.early][:, 1:]], dim=1)
            for layer in self.condenser:
                both = layer(both, src_key_padding_mask=~inside)
            loss = loss + self._masked_loss(both, at, targets)
        return vectors, loss

    def _masked_loss(self, hidden: torch.Tensor, at: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head runs at the masked places alone; its numbers, as many as the vocabulary has each, are not kept."""
        loss: torch.Tensor = self.head(hidden.flatten(0, 1)[at], targets)
        return loss

    def save_pretrained(self, folder: Path) -> None:
        """The backbone, with its head where transformers has a class for it, dropouts as they were found."""
        with restored(self.whole.config, self._dropouts):
            self.whole.save_pretrained(folder)


class _Words(nn.Module):
    """A table of words, to be guessed from: hidden float [k, d], targets int64 [k] -> the summed loss, float32 []."""

    def __init__(self, table: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = table
        self.bias = bias

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocabulary_loss(hidden, self.weight, self.bias, targets)


class TiedHead(nn.Module):
    """BERT's head for a model that has none: hidden float [k, hidden], targets int64 [k] -> the summed loss.

    Its logits: s LayerNorm(gelu(W h + b)) E^T + c, where E is the model's table of input embeddings, the very same
    tensor. s is 1, or less where E's numbers are so large (T5's are near 1) that fresh logits would spread wider
    than by 1.
    """

    def __init__(self, model: Any):
        super().__init__()
        table = model.get_input_embeddings().weight
        spread = getattr(model.config, "initializer_range", None) or 0.02
        self.transform = nn.Linear(int(model.config.hidden_size), table.shape[1])
        nn.init.normal_(self.transform.weight, std=spread)
        nn.init.zeros_(self.transform.bias)
        self.norm = nn.LayerNorm(table.shape[1], eps=1e-12)
        self.decoder = _Words(table, nn.Parameter(torch.zeros(table.shape[0])))
        self.scale = min(1.0, 1 / (float(table.detach().float().std()) * table.shape[1] ** 0.5 + 1e-12))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        words = self.scale * self.norm(functional.gelu(self.transform(hidden)))
        loss: torch.Tensor = self.decoder(words, targets)
        return loss


class _ForeignHead(nn.Module):
    """The head of a transformers model with any structure: the model itself, over a stand-in for its backbone.

    Where all that follows its table of words is the product by it, the model ends before that, and the product is
    ours; where more follows (a cap on the logits), they are all made, and made again on the way back.
    """

    decoder: _Words | None

    def __init__(self, whole: Any):
        super().__init__()
        self.model = _replaced(whole, whole.base_model, _Given())
        table = whole.get_output_embeddings()
        cut = _replaced(self.model, table, nn.Identity())
        self.decoder = None
        if type(table) is nn.Linear and _same(self.model, cut, table):
            self.model, self.decoder = cut, _Words(table.weight, table.bias)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.decoder is None:
            return checkpoint(self._loss_of, hidden, targets, use_reentrant=False)
        loss: torch.Tensor = self.decoder(self._run(hidden), targets)
        return loss

    def _run(self, hidden: torch.Tensor) -> Any:
        return self.model(inputs_embeds=hidden[None]).logits[0]

    def _loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self._run(hidden).float(), targets, reduction="sum")


def _replaced(module: Any, old: Any, new: nn.Module) -> Any:
    """The module with another in the place of one of its parts: a copy of the way there, all else the very same."""
    if module is old:
        return new
    parts = {name: None if part is None else _replaced(part, old, new) for name, part in module._modules.items()}
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    copied = copy.copy(module)
    copied._modules = parts
    return copied


def _same(whole: Any, cut: Any, table: nn.Linear) -> bool:
    """Whether the table's product with what the model without it gives is what the whole one gives."""
    hidden = torch.linspace(-1, 1, 2 * int(whole.config.hidden_size)).view(1, 2, -1).to(table.weight)
    modes = {part: part.training for part in (*whole.modules(), *cut.modules())}
    try:
        with torch.no_grad():
            words = cut.eval()(inputs_embeds=hidden).logits
            return words.shape[-1] == table.in_features and torch.allclose(
                table(words), whole.eval()(inputs_embeds=hidden).logits, atol=1e-4, rtol=1e-4
            )
    except (RuntimeError, ValueError, TypeError):
        return False
    finally:
        for part, training in modes.items():
            part.training = training


class _Given(nn.Module):
    """A backbone whose last hidden state is what it is given."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)


def _has_head(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def _load(recipe: Recipe) -> tuple[Any, bool, dict[str, float]]:
    """The model, with its head where its class has one; whether the head is fresh; the dropouts that were put off."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(recipe.backbone, **recipe.config_args)
    dropouts = attention_dropouts(config)
    off: dict[str, Any] = dict.fromkeys(dropouts, 0.0)
    if not _has_head(config):
        return load_backbone(recipe, torch.float32, **off), True, dropouts

    if config.is_encoder_decoder:
        raise InputError(f"{recipe.backbone}: a {config.model_type} has a decoder too, which makes no vectors")

    def load(**more: Any) -> Any:
        return AutoModelForMaskedLM.from_pretrained(
            recipe.backbone, dtype=torch.float32, output_loading_info=True, **{**recipe.config_args, **off, **more}
        )

    try:
        model, found = load()
        prefix = f"{model.base_model_prefix}."
        lost = [name for name in found["missing_keys"] if name.startswith(prefix)]
        fresh = bool(found["missing_keys"])
        if fresh and not config.tie_word_embeddings:
            model, _ = load(tie_word_embeddings=True)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{recipe.backbone}: {str(error).strip().splitlines()[0]}") from error
    if lost:
        raise InputError(f"{recipe.backbone}: the weights lack {len(lost)} tensors of a {type(model).__name__}, "
                         f"{lost[0]} among them")  # fmt: skip
    return model, fresh, dropouts


def _layer(config: Any) -> nn.Module:
    """A layer as BERT's, its size the backbone's; no dropout of attention's weights."""
    hidden = int(config.hidden_size)
    layer = nn.TransformerEncoderLayer(
        hidden, int(config.num_attention_heads), int(getattr(config, "intermediate_size", 4 * hidden)),
        float(getattr(config, "hidden_dropout_prob", 0.1)), "gelu", layer_norm_eps=1e-12, batch_first=True,
    )  # fmt: skip
    layer.self_attn.dropout = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return layer
