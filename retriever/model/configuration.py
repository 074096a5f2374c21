"""Loads config.json after checking that no field loads code, kernels or files from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.model.failures import readable_errors
from riptide.retriever.model.json_fields import format_json, read_object
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.transformers_arguments import ATTENTION

# Fields for which transformers would load other files, packages or kernels, with what each stands for.
_REFUSED = {
    "backbone": "a backbone of another model",
    "compression_config": "quantised weights",
    "configuration_files": "another file in place of config.json",
    "fusion_config": "fused layers",
    "gguf_file": "a GGUF file",
    "kernel_config": "kernels",
    "quantization_config": "quantised weights",
    "transformers_weights": "weights in a file with another name",
    "use_kernels": "kernels",
    "use_pretrained_backbone": "a backbone of another model",
    "use_timm_backbone": "a backbone of another model",
}
_IMPLEMENTATIONS = {
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "_attn_implementation_internal": ATTENTION,
    "experts_implementation": ("eager", "grouped_mm"),
    "_experts_implementation": ("eager", "grouped_mm"),
    "_experts_implementation_internal": ("eager", "grouped_mm"),
}
_MAX_LAYERS = 1000
_LABELS = ("num_labels", "id2label", "label2id")
_MAX_LABELS = 100_000  # transformers makes a table of the labels, whose size num_labels alone determines
BERT_TYPES = frozenset({"bert", "electra", "roberta", "xlm-roberta", "camembert"})
"""`model_type` of the backbones with BERT's layers."""
_INT8_STEPS = {"hidden_size": 64, "intermediate_size": 64}  # multiples that the widths of layers must be for int8
_INT8_HEAD_STEP = 16  # the same for the width of an attention head


def load_config(folder: Path, *, trust_remote_code: bool = False, **arguments: Any) -> Any:
    """Loads the transformers configuration of a model folder, without loading weights or using the network.

    Args:
        folder: The folder with config.json.
        trust_remote_code: Whether code in the folder may run.
        arguments: Values that override those of config.json.

    Raises:
        InputError: For a missing or damaged file, an unknown architecture, sizes that no model can have, and fields
            that would load code, kernels or other files.
    """
    transformers = import_transformers()

    file = folder / "config.json"
    content = read_object(file, required=True)
    check_fields(content, file)
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder / 'adapter_config.json'}: adapters are not supported: merge it into its base model")
    kind = content.get("model_type")
    if not trust_remote_code and content.get("auto_map") and kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{file}: auto_map: the architecture {format_json(kind)} is not in transformers and needs code of the "
            "model folder; read that code, then set trust_remote_code to run it"
        )
    with readable_errors(file):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **arguments)
    # transformers checks types but accepts 0 and negative values. An architecture without attention has no heads.
    for name, default in (("hidden_size", None), ("num_hidden_layers", None), ("num_attention_heads", 1)):
        value = getattr(config, name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(
                f"{file}: {name}: expected an integer of at least 1, got {format_json(value)}: not the "
                "configuration of a text encoder"
            )
    if config.num_hidden_layers > _MAX_LAYERS:
        raise InputError(f"{file}: {config.num_hidden_layers} layers, expected at most {_MAX_LAYERS}")
    return config


def check_int8(config: Any, file: Path) -> None:
    """Raises InputError if the layers of a backbone cannot be computed in int8 (`riptide.retriever.forward.int8`)."""
    remedy = f"use {Parameter('dtype', 'bfloat16')} or float32"
    if config.model_type not in BERT_TYPES:
        kinds = ", ".join(sorted(BERT_TYPES))
        raise InputError(f"{file}: model_type {config.model_type}: int8 is for {kinds}; {remedy}")
    if config.hidden_act != "gelu":
        raise InputError(f"{file}: hidden_act {format_json(config.hidden_act)}: int8 needs gelu; {remedy}")
    head = config.hidden_size // config.num_attention_heads
    widths = [(name, getattr(config, name), step) for name, step in _INT8_STEPS.items()]
    for name, value, step in (*widths, ("hidden_size / num_attention_heads", head, _INT8_HEAD_STEP)):
        if value % step:
            raise InputError(f"{file}: {name} {value}: int8 needs a multiple of {step}; {remedy}")


def check_bidirectional(config: Any, file: Path, other_remedy: str = "") -> None:
    """Raises InputError for a BERT-family model that is a decoder: encoders of the family see all tokens of a text.

    Args:
        config: The configuration of the model.
        file: The file that has `is_decoder` or `is_causal`.
        other_remedy: What else the user can do about `is_decoder`.
    """
    for name, remedy in (("is_decoder", other_remedy), ("is_causal", "")):
        if config.model_type in BERT_TYPES and getattr(config, name, False):
            raise InputError(
                f"{file}: {name} is true, so that tokens do not attend to later ones, and {config.model_type} encoders "
                f"attend to all: set it to false{remedy}"
            )


def check_fields(content: Mapping[str, Any], file: Path) -> None:
    """Raises InputError for a field of config.json, at any depth, that loads something, or has too many labels."""
    for name, value in _fields(content):
        num_labels = len(value) if isinstance(value, dict) else value
        if name in _LABELS and isinstance(num_labels, int) and num_labels > _MAX_LABELS:
            raise InputError(
                f"{file}: {name}: {num_labels:,} labels, expected at most {_MAX_LABELS:,}; {name} may be left out"
            )
        if name in _REFUSED and value not in (None, False):
            raise InputError(
                f"{file}: {name}: {_REFUSED[name]} (here {format_json(value)}) are not supported; save the model "
                "without"
            )
        allowed = _IMPLEMENTATIONS.get(name, ())
        if allowed and value is not None and (not isinstance(value, str) or value not in allowed):
            raise InputError(
                f"{file}: {name}: {format_json(value)} is not supported; remove it, or give {' or '.join(allowed)}"
            )


def _fields(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of all fields of a JSON value, at any depth."""
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
            pending += value.values()
        elif isinstance(value, list):
            pending += value
