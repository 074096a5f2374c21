"""Tiny random models in the layout of two published embedders that are decoders: Qwen3-Embedding and E5-Mistral.

The files have the names, fields and special tokens of the published folders; sizes and vocabularies are small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
LENGTH = 120  # tokens of a text at most
_SHAPE = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.3,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
}
_MERGES = [("i", "n"), ("e", "r"), ("t", "h"), ("th", "e"), ("a", "n"), ("o", "n"), ("r", "e")]


def save_qwen3_embedding(folder: Path, **tokenizer: Any) -> Path:
    """Saves a folder as Qwen3-Embedding's: the tokenizer ends texts with <|endoftext|>, which also pads.

    Args:
        folder: The folder to write to.
        **tokenizer: Further fields of tokenizer_config.json.

    Returns:
        The folder.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = _vocabulary(letters)
    backend = Tokenizer(models.BPE(vocabulary, _MERGES))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    end = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            processors.TemplateProcessing(
                single="$A:0 <|endoftext|>:0", pair="$A:0 $B:1 <|endoftext|>:1", special_tokens=[("<|endoftext|>", end)]
            ),
        ]
    )
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "head_dim": 8,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": 320,  # more rows than tokens, as in the published weights
        **_SHAPE,
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": _added(backend, special),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **tokenizer,
    }
    return _save(folder, "Qwen3Model", config, backend, settings, {"query": INSTRUCTION, "document": ""}, "cosine")


def save_e5_mistral(
    folder: Path, *, window: int = 64, prompts: Mapping[str, str] | None = None, **tokenizer: Any
) -> Path:
    """Saves a folder as E5-Mistral's: </s> ends and pads texts, which tokenizer_config.json alone says.

    The post-processor of tokenizer.json adds <s> only; `add_eos_token` is true in tokenizer_config.json.

    Args:
        folder: The folder to write to.
        window: Tokens of the model's sliding window.
        prompts: The prompts of sentence-transformers; None: one of queries.
        **tokenizer: Further fields of tokenizer_config.json; a field that is None is left out.

    Returns:
        The folder.
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127))]
    backend = Tokenizer(models.BPE(_vocabulary(pieces), _MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    config = {
        "architectures": ["MistralModel"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "model_type": "mistral",
        "pad_token_id": 2,
        "rope_theta": 10000.0,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": len(backend.get_vocab()),
        **_SHAPE,
    }
    settings = {
        "add_eos_token": True,
        "added_tokens_decoder": _added(backend, special),
        "additional_special_tokens": special,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": True,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "</s>",
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
        **tokenizer,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    prompts = {"query": f"{INSTRUCTION} "} if prompts is None else prompts
    _save(folder, "MistralModel", config, backend, settings, prompts, None)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    return folder


def _vocabulary(pieces: list[str]) -> dict[str, int]:
    """Returns an id for each piece, and for each result of a merge."""
    return {piece: number for number, piece in enumerate([*pieces, *("".join(pair) for pair in _MERGES)])}


def _added(backend: Tokenizer, tokens: list[str]) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(backend.token_to_id(token)): {"content": token, **flags} for token in tokens}


def _save(
    folder: Path,
    architecture: str,
    config: dict[str, Any],
    backend: Tokenizer,
    tokenizer: dict[str, Any],
    prompts: Mapping[str, str],
    similarity: str | None,
) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**config))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", tokenizer)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write(
        folder / "modules.json",
        [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(modules)
        ],
    )
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": config["hidden_size"],
            **{f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes},
            "include_prompt": True,
        },
    )
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": similarity},
    )
    return folder


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
