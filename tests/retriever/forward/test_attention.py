"""The seam for prompts, against transformers' own caches and its own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from riptide.base.errors import InputError
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertModel", {}),
    "Roberta": ("RobertaModel", {}),
    "XLMRoberta": ("XLMRobertaModel", {}),
    "Electra": ("ElectraModel", {"embedding_size": 32}),
    "Ernie": ("ErnieModel", {}),
    "DistilBert": ("DistilBertModel", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
    "ModernBert": (
        "ModernBertModel",
        {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "NomicBert": ("NomicBertModel", {}),
    "T5": ("T5EncoderModel", {"d_model": 32, "num_layers": 3, "num_heads": 4, "d_kv": 8, "d_ff": 64}),
    "Llama": ("LlamaModel", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Model", {"num_key_value_heads": 2, "head_dim": 8}),
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 0, 0, 0, 0, 0], [16, 17, 18, 19, 20, 0, 0, 0]])
MASK = (IDS != 0).long()


def build(kind: str) -> Any:
    model, extra = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    return getattr(transformers, model)(config).eval()


def matrix(shape: PromptShape, length: int, prompts: int = 1) -> torch.Tensor:
    torch.manual_seed(length)
    return torch.randn(shape.layers, 2, prompts, shape.heads, length, shape.head_dim)


def hidden(model: Any, ids: torch.Tensor = IDS, mask: torch.Tensor = MASK, **extra: Any) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask, **extra).last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_every_backbone_takes_prompts(kind: str) -> None:
    model = build(kind)
    with torch.no_grad():
        plain = hidden(model)[MASK.bool()]
        shape = enable_prompts(model)
        assert shape == PromptShape(3, 2 if kind in ("Llama", "Qwen3") else 4, 8)
        torch.testing.assert_close(hidden(model)[MASK.bool()], plain, atol=1e-6, rtol=1e-6)

        table = matrix(shape, 5, prompts=2)
        with_prompt = hidden(model, prompt=PromptRows(table[:, :, :1]))
        assert (with_prompt[MASK.bool()] - plain).abs().max() > 1e-3
        for row, length in enumerate(MASK.sum(1).tolist()):  # neither padding nor batch-mates change a vector
            alone = hidden(
                model, IDS[row : row + 1, :length], MASK[row : row + 1, :length], prompt=PromptRows(table[:, :, :1])
            )
            torch.testing.assert_close(with_prompt[row, :length], alone[0], atol=1e-5, rtol=1e-5)

        # Rows of two tasks, of 5 and 3 numbers, and a row without any.
        inside = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])
        three = torch.cat([table, torch.zeros_like(table[:, :, :1])], dim=2)
        mixed = hidden(model, prompt=PromptRows(three, torch.tensor([1, 0, 2]), inside))
        for row, one in enumerate([PromptRows(table[:, :, 1:, :, :3]), PromptRows(table[:, :, :1]), None]):
            length = int(MASK[row].sum())
            alone = hidden(model, IDS[row : row + 1, :length], MASK[row : row + 1, :length], prompt=one)
            torch.testing.assert_close(mixed[row, :length], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_prompt_is_a_cache_of_keys_and_values(kind: str) -> None:
    """The older way, with the positions that the seam leaves as they are."""
    model = build(kind)
    positions = torch.arange(IDS.shape[1])[None].expand_as(IDS) + (1 if kind == "Roberta" else 0)
    table = matrix(PromptShape(3, 4, 8), 5)
    cache = DynamicCache()
    for layer in range(3):
        key, value = table[layer].expand(2, len(IDS), *table.shape[3:])
        cache.update(key.contiguous(), value.contiguous(), layer)
    with torch.no_grad():
        model.config.is_decoder = False
        longer = torch.cat([torch.ones(len(IDS), 5, dtype=torch.long), MASK], dim=1)
        expected = hidden(model, mask=longer, past_key_values=cache, position_ids=positions)
        enable_prompts(model)
        found = hidden(model, prompt=PromptRows(table), position_ids=positions)
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "T5", "Qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_every_layers_prompt_and_nothing_else(kind: str, checkpointing: bool) -> None:
    model = build(kind).requires_grad_(False)
    shape = enable_prompts(model)
    expected = matrix(shape, 4).requires_grad_()
    hidden(model, prompt=PromptRows(expected)).square().sum().backward()
    table = expected.detach().clone().requires_grad_()
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
    hidden(model, prompt=PromptRows(table)).square().sum().backward()
    assert table.grad is not None
    assert expected.grad is not None
    assert bool((table.grad.abs().amax(dim=(1, 2, 3, 4, 5)) > 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(table.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_a_backbone_out_of_reach_is_told() -> None:
    for kind in ("MPNet", "DebertaV2"):
        config = getattr(transformers, f"{kind}Config")(**SMALL)
        with pytest.raises(InputError, match=f"{kind}Model: no prompts can be put in"):
            enable_prompts(getattr(transformers, f"{kind}Model")(config))
