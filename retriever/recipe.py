"""What a model's folder says about turning text into vectors, resolved against the options; loads no weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.errors import InputError
from retriever.files import read_json, resolve, sha256_of, tokenizer_files, weight_files
from retriever.options import DEFAULT_OPTIONS, EncoderOptions, Pooling

_TRANSFORMER_CONFIGS = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_POOLING_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
# Kinds of backbone whose positions begin behind the padding token's id.
OFFSET_POSITIONS = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text", "esm"}
)
# Keys of a backbone's config.json that say nothing about its output.
_IDLE_CONFIG_KEYS = {
    "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "gradient_checkpointing", "_attn_implementation_autoset",
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling: its folder (relative to the model's), its activation, its output's size."""

    folder: str
    activation: str
    size: int
    bias: bool


@dataclass(frozen=True)
class Recipe:
    """What a model's folder and the options together say; everything is resolved, nothing is loaded.

    head: what follows pooling, in order; "normalize" stands for scaling to length 1.
    """

    folder: Path
    backbone: Path
    model_type: str
    pooling: Pooling
    head: tuple[Dense | str, ...]
    query_prefix: str
    passage_prefix: str
    query_length: int
    passage_length: int
    lower_case: bool
    padding_side: str
    hidden: int
    dim: int
    positions: int | None
    first_position: int
    tokenizer_args: dict[str, Any]
    config_args: dict[str, Any]


def read_recipe(folder: Path, options: EncoderOptions, *, trust_remote_code: bool = False) -> Recipe:
    """Resolves the options against a model's folder (plain Hugging Face or sentence-transformers layout).

    Raises InputError for a module, a pooling or a setting that is not supported, and for lengths that the backbone
    has no positions for.
    """
    from transformers import AutoConfig

    modules = _read_modules(folder)
    backbone, settings = folder, {}
    pooling: str = "mean"
    head: list[Dense | str] = []
    for position, (kind, path) in enumerate(modules):
        if (kind == "Transformer") != (position == 0) or (kind == "Pooling") != (position == 1):
            found = ", ".join(kind for kind, _ in modules)
            raise InputError(
                f"{folder / 'modules.json'}: expected Transformer, Pooling, then Dense or Normalize, found {found}: "
                "not supported"
            )
        if kind == "Transformer":
            backbone = folder / path if path else folder
            settings = _transformer_settings(backbone)
        elif kind == "Pooling":
            pooling = _read_pooling(folder / path / "config.json")
        elif kind == "Dense":
            head.append(_read_dense(folder, path))
        else:
            head.append("normalize")
    try:
        config_args = dict(settings.get("config_args", settings.get("config_kwargs", {})))
        config = AutoConfig.from_pretrained(backbone, trust_remote_code=trust_remote_code, **config_args)
    except (ValueError, OSError) as error:
        raise InputError(f"{backbone}: {str(error).strip().splitlines()[0]}") from error
    hidden = int(config.hidden_size)
    if options.normalize is not None:
        while head and head[-1] == "normalize":
            head.pop()
        if options.normalize:
            head.append("normalize")
    dim = next((step.size for step in reversed(head) if isinstance(step, Dense)), hidden)
    if options.dimension is not None:
        if options.dimension > dim:
            raise InputError(f"dimension={options.dimension} is more than the {dim} that {folder.name} makes")
        dim = options.dimension
    query_length, passage_length, padding_side = _lengths(backbone, config, settings, options)
    prompts = read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    passage_prompt = next((prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)), "")
    own = (prompts.get("query") or "", passage_prompt)
    return Recipe(
        folder=folder,
        backbone=backbone,
        model_type=config.model_type,
        pooling=options.pooling or _POOLING_NAMES[pooling],
        head=tuple(head),
        query_prefix=own[0] if options.query_prefix is None else options.query_prefix,
        passage_prefix=own[1] if options.passage_prefix is None else options.passage_prefix,
        query_length=query_length,
        passage_length=passage_length,
        lower_case=bool(settings.get("do_lower_case", False)),
        padding_side=options.padding_side or padding_side,
        hidden=hidden,
        dim=dim,
        positions=positions_of(config),
        first_position=first_position_of(config),
        tokenizer_args=dict(settings.get("tokenizer_args", settings.get("processor_kwargs", {}))),
        config_args=config_args,
    )


def describe(name_or_path: str | Path, options: EncoderOptions = DEFAULT_OPTIONS) -> dict[str, Any]:
    """The settings that shape the vectors, JSON-able: an Encoder's `config`, without loading the model."""
    return settings_of(read_recipe(resolve(name_or_path), options), options)


def settings_of(recipe: Recipe, options: EncoderOptions) -> dict[str, Any]:
    """What enters an artifact's fingerprint: contents by their sha256, settings resolved; no paths, no device."""
    backbone = {key: value for key, value in read_json(recipe.backbone / "config.json").items()
                if key not in _IDLE_CONFIG_KEYS}  # fmt: skip
    backbone |= recipe.config_args
    return {
        "model_type": recipe.model_type,
        "backbone": hashlib.sha256(json.dumps(backbone, sort_keys=True).encode()).hexdigest(),
        "weights": [sha256_of(file) for file in weight_files(recipe.backbone)],
        "tokenizer": [sha256_of(file) for file in tokenizer_files(recipe.backbone)],
        "tokenizer_args": recipe.tokenizer_args,
        "lower_case": recipe.lower_case,
        "pooling": recipe.pooling,
        "head": [
            step
            if isinstance(step, str)
            else {
                "activation": step.activation,
                "size": step.size,
                "weights": [sha256_of(f) for f in weight_files(recipe.folder / step.folder)],
            }
            for step in recipe.head
        ],
        "query_prefix": recipe.query_prefix,
        "passage_prefix": recipe.passage_prefix,
        "title": options.title,
        "query_length": recipe.query_length,
        "passage_length": recipe.passage_length,
        "dimension": options.dimension,
        "append_eos": options.append_eos,
        "padding_side": recipe.padding_side,
        "dtype": options.dtype,
        "dim": recipe.dim,
    }


def fingerprint_of(config: dict[str, Any]) -> str:
    """sha256 over a `config`, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each sentence-transformers module; a plain Hugging Face folder has none."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    modules = []
    for entry in json.loads(file.read_text(encoding="utf-8")):
        package, _, kind = entry["type"].rpartition(".")
        if not package.startswith("sentence_transformers") or kind not in (
            "Transformer",
            "Pooling",
            "Dense",
            "Normalize",
        ):
            raise InputError(f"{file}: module {entry['type']} is not supported (Transformer, Pooling, Dense and "
                             "Normalize of sentence-transformers are)")  # fmt: skip
        modules.append((kind, entry["path"]))
    if len(modules) < 2:
        raise InputError(f"{file}: expected a Transformer and a Pooling module, found {len(modules)} module(s)")
    return modules


def _transformer_settings(backbone: Path) -> dict[str, Any]:
    settings = next((found for name in _TRANSFORMER_CONFIGS if (found := read_json(backbone / name))), {})
    text = settings.get("modality_config", {}).get(
        "text", {"method": "forward", "method_output_name": "last_hidden_state"}
    )
    refused = {
        "transformer_task": settings.get("transformer_task", "feature-extraction") != "feature-extraction",
        "query_expansion": bool(settings.get("query_expansion")),
        "processing_kwargs": bool(settings.get("processing_kwargs")),
        "modality_config": text != {"method": "forward", "method_output_name": "last_hidden_state"},
    }
    for key, bad in refused.items():
        if bad:
            raise InputError(f"{backbone / 'sentence_bert_config.json'}: {key}={settings[key]} is not supported")
    return settings


def _read_pooling(file: Path) -> str:
    config = read_json(file)
    modes = (
        config.get("pooling_mode") or [mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key)] or ["mean"]
    )
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLING_NAMES:
        raise InputError(f"{file}: pooling {' + '.join(modes)} is not supported (cls, mean and lasttoken are)")
    if config.get("include_prompt") is False:
        raise InputError(f"{file}: include_prompt=false (pooling that leaves the prefix out) is not supported")
    return modes[0]


def _read_dense(folder: Path, path: str) -> Dense:
    file = folder / path / "config.json"
    config = read_json(file)
    package, _, activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")
    if not package.startswith("torch.nn") or activation not in _ACTIVATIONS:
        raise InputError(f"{file}: activation {package}.{activation} is not supported ({', '.join(_ACTIVATIONS)} are)")
    where = {config.get(f"module_{end}_name") or "sentence_embedding" for end in ("input", "output")}
    if where != {"sentence_embedding"} or config.get("use_residual"):
        raise InputError(f"{file}: only a plain layer over the sentence embedding is supported, found {config}")
    if not weight_files(folder / path):
        raise InputError(f"{folder / path}: no model.safetensors and no pytorch_model.bin")
    return Dense(path, activation, int(config["out_features"]), bool(config.get("bias", True)))


def _lengths(backbone: Path, config: Any, settings: dict[str, Any], options: EncoderOptions) -> tuple[int, int, str]:
    """Tokens of a query and of a passage, and the side on which the tokenizer pads."""
    tokenizer = read_json(backbone / "tokenizer_config.json") | settings.get("tokenizer_args", {})
    positions = positions_of(config)
    own = settings.get("max_seq_length") or tokenizer.get("model_max_length") or 512
    own = 512 if own > 1_000_000 and positions is None else int(min(own, positions or own))
    lengths = []
    for name, folder_says in (
        ("query_length", settings.get("query_length")),
        ("passage_length", settings.get("document_length")),
    ):
        asked = getattr(options, name)
        if asked is not None and positions is not None and asked > positions:
            raise InputError(f"{name}={asked} is more than the {positions} positions of {backbone.name}")
        lengths.append(int(asked or folder_says or own))
    return lengths[0], lengths[1], tokenizer.get("padding_side", "right")


def positions_of(config: Any) -> int | None:
    """How many tokens a backbone has positions for; None where they are relative (T5)."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 0:
        return None
    return int(positions) - first_position_of(config)


def first_position_of(config: Any) -> int:
    """That of a text's first token: RoBERTa and its kin number positions from the padding token's id on."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
