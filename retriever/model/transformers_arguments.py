"""Checks the arguments that sentence-transformers' files pass on to transformers, against a list with types.

sentence_bert_config.json may hold arguments for AutoConfig, AutoTokenizer and AutoModel. Among what these accept are
names of kernels and of code to download, so that only known, harmless ones are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.retriever.model.json_fields import format_json, has_type, read_field

ATTENTION = ("eager", "sdpa")  # implementations included in torch
# Attention names built into transformers; any other name may refer to a kernel that transformers would download.
_PLAIN_ATTENTION = (*ATTENTION, "flash_attention_2", "flash_attention_3", "flex_attention")

# Allowed arguments of AutoConfig. None: any JSON value (rope_scaling is an object that transformers checks).
_CONFIG = {
    "attention_dropout": float,
    "attention_probs_dropout_prob": float,
    "classifier_dropout": float,
    "dropout": float,
    "dropout_rate": float,
    "hidden_act": str,
    "hidden_dropout_prob": float,
    "is_causal": bool,
    "is_decoder": bool,
    "layer_norm_eps": float,
    "max_position_embeddings": int,
    "num_hidden_layers": int,
    "output_attentions": bool,
    "output_hidden_states": bool,
    "pad_token_id": int,
    "return_dict": bool,
    "rope_scaling": None,
    "rope_theta": float,
    "rotary_scaling_factor": float,
    "sliding_window": int,
    "unpad_inputs": bool,
    "use_bidirectional_attention": bool,
    "use_cache": bool,
    "use_memory_efficient_attention": bool,
}
_TOKENIZER = {
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_prefix_space": bool,
    "bos_token": str,
    "clean_up_tokenization_spaces": bool,
    "cls_token": str,
    "do_lower_case": bool,
    "eos_token": str,
    "legacy": bool,
    "mask_token": str,
    "model_max_length": int,
    "pad_token": str,
    "padding_side": str,
    "sep_token": str,
    "strip_accents": bool,
    "tokenize_chinese_chars": bool,
    "truncation_side": str,
    "unk_token": str,
    "use_fast": bool,
}
# These are accepted but not passed on: the encoder's own options decide dtype and attention.
_MODEL = {"add_pooling_layer": bool, "attn_implementation": str, "dtype": str, "torch_dtype": str}


def config_arguments(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the AutoConfig arguments of sentence-transformers' settings. Raises InputError for an unknown one."""
    return _read_arguments(settings, ("config_args", "config_kwargs"), _CONFIG, file)


def tokenizer_arguments(settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the AutoTokenizer arguments of sentence-transformers' settings. Raises InputError for an unknown one."""
    return _read_arguments(settings, ("tokenizer_args", "processor_kwargs"), _TOKENIZER, file)


def check_model_arguments(settings: Mapping[str, Any], file: Path, *, trust_remote_code: bool = False) -> None:
    """Checks the AutoModel arguments of sentence-transformers' settings, which are accepted but not used.

    Args:
        settings: The content of the file.
        file: sentence_bert_config.json or one of its older names.
        trust_remote_code: Whether the caller lets code of the folder run; then `trust_remote_code: true` is accepted.

    Raises:
        InputError: For an unknown one, and for attention that transformers does not know by a plain name.
    """
    known = {**_MODEL, "trust_remote_code": bool} if trust_remote_code else _MODEL
    arguments = _read_arguments(settings, ("model_args", "model_kwargs"), known, file)
    attention = arguments.get("attn_implementation")
    if attention not in (None, *_PLAIN_ATTENTION):
        raise InputError(
            f"{file}: attn_implementation: {format_json(attention)} is not supported; remove it, or give one of "
            f"{', '.join(_PLAIN_ATTENTION)}"
        )


def _read_arguments(
    settings: Mapping[str, Any], names: tuple[str, ...], known: Mapping[str, type[Any] | None], file: Path
) -> dict[str, Any]:
    """Returns the arguments under the one of `names` that exists; raises InputError for two, unknown keys or types."""
    name = next((name for name in names if name in settings), names[0])
    for other in names:
        if other != name and settings.get(other):
            raise InputError(f"{file}: both {name} and {other} are given; keep one")
    arguments: dict[str, Any] = read_field(settings, name, dict, file, {})
    for key, value in arguments.items():
        if key not in known:
            raise InputError(
                f"{file}: {name}: {format_json(key)} is not supported; remove it (supported: {', '.join(known)})"
            )
        kind = known[key]
        if value is not None and kind is not None and not has_type(value, kind):
            raise InputError(f"{file}: {name}: {key}: expected {kind.__name__}, got {format_json(value)}")
    return dict(arguments)
