"""Tiny random models in the layouts that real ones come in, saved by the libraries that users save them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

WORDS = (
    "the a of river bank money water flows fast slow question passage query : instruct answer title alpha beta gamma"
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def save_tokenizer(folder: Path, *, special: bool = True, padding_side: str = "right", limit: int = 10**30) -> int:
    """A WordPiece tokenizer over WORDS and single letters; returns the vocabulary's size."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *WORDS.split(), *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[EOS]", padding_side=padding_side, model_max_length=limit,
    ).save_pretrained(folder)  # fmt: skip
    return len(vocabulary)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """tiny(kind, **tokenizer options) -> the folder of a random model of that kind: bert, roberta, t5 or qwen3."""

    def build(kind: str, name: str = "tiny", seed: int = 0, **tokenizer: object) -> Path:
        folder = tmp_path / f"{name}-{kind}"
        size = save_tokenizer(folder, **tokenizer)  # type: ignore[arg-type]
        torch.manual_seed(seed)
        shape = {"vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 64, "initializer_range": 0.5}  # fmt: skip
        if kind == "bert":
            model: torch.nn.Module = BertModel(BertConfig(**shape, max_position_embeddings=61))
        elif kind == "roberta":
            config = RobertaConfig(**shape, max_position_embeddings=42, pad_token_id=0, bos_token_id=2, eos_token_id=3)
            model = RobertaModel(config)
        elif kind == "t5":
            model = T5EncoderModel(T5Config(vocab_size=size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
        else:
            model = Qwen3Model(Qwen3Config(**shape, num_key_value_heads=2, head_dim=8, max_position_embeddings=128))
        model.save_pretrained(folder)  # type: ignore[operator]
        return folder

    return build


@pytest.fixture
def texts() -> list[str]:
    """Texts of many lengths in no order, odd ones among them."""
    words = WORDS.split()
    plain = [" ".join(words[(i * 7 + j) % len(words)] for j in range(1 + (i * 11) % 50)) for i in range(40)]
    return [*plain, "", " ", "\0 a \0 b", "é 漢字 \U0001f600 ‮", "the RIVER Bank", "bank " * 300]
