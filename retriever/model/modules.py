"""Reads the modules of a sentence-transformers model folder: the backbone, the pooling, and the layers after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.retriever.model.json_fields import (
    check_inner_path,
    format_json,
    read_count,
    read_document,
    read_field,
    read_object,
)
from riptide.retriever.model.model_folder import weight_files
from riptide.retriever.options import Pooling

_TRANSFORMER_CONFIGS = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
POOLING_MODES: dict[Pooling, str] = {"cls": "cls", "mean": "mean", "last": "lasttoken"}
"""The names of poolings in the files of sentence-transformers."""
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SPLADE: Pooling = "splade"
ENCODER_CONFIG = "config_sentence_transformers.json"
_SPLADE_MODULES = ("MLMTransformer", "SpladePooling")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class DenseLayer:
    """The settings of a linear layer after pooling.

    folder: relative to the model's; None: the layer is new, and training gives it weights. activation: a class of
    torch.nn. size: numbers of its output.
    """

    folder: str | None
    activation: str
    size: int
    bias: bool


@dataclass(frozen=True)
class ModelModules:
    """The modules of a model folder. In a plain Hugging Face folder, the backbone is the folder itself.

    Attributes:
        backbone: The folder of the backbone.
        settings_file: The file with sentence-transformers' settings of the backbone.
        settings: Its content; empty without such a file.
        pooling: Pooling of token vectors.
        head: The steps after pooling.
        splade_file: The file with the settings of SpladePooling; None for other models.
    """

    backbone: Path
    settings_file: Path
    settings: dict[str, Any]
    pooling: Pooling
    head: tuple[DenseLayer | str, ...]
    splade_file: Path | None = None


def read_modules(folder: Path) -> ModelModules:
    """Reads the modules of a model folder.

    Raises:
        InputError: For damaged or missing files, and an unsupported module, pooling or setting.
    """
    modules = _list_modules(folder)
    if not modules:
        return ModelModules(folder, folder / _TRANSFORMER_CONFIGS[0], {}, "mean", ())
    kinds, paths = zip(*modules, strict=True)
    backbone = folder / paths[0] if paths[0] else folder
    if _is_splade(folder, kinds):
        file, settings = _transformer_settings(backbone, kinds[0], is_splade=True)
        return ModelModules(backbone, file, settings, SPLADE, (), folder / paths[1] / "config.json")
    if kinds[:2] != ("Transformer", "Pooling") or {"Transformer", "Pooling"} & set(kinds[2:]):
        raise InputError(
            f"{folder / 'modules.json'}: expected Transformer, Pooling, then Dense or Normalize, got "
            f"{', '.join(kinds)}: not supported"
        )
    file, settings = _transformer_settings(backbone)
    pooling = _read_pooling(folder / paths[1] / "config.json")
    head = tuple(_read_dense(folder, path) if kind == "Dense" else "normalize" for kind, path in modules[2:])
    return ModelModules(backbone, file, settings, pooling, head)


def _list_modules(folder: Path) -> list[tuple[str, str]]:
    """Returns (kind, folder) of each sentence-transformers module; empty for a plain Hugging Face folder."""
    file = folder / "modules.json"
    if not file.exists() and not file.is_symlink():
        for name in (ENCODER_CONFIG, "1_Pooling"):
            if (folder / name).exists():
                raise InputError(
                    f"{file}: no such file, but {name} is there: the model folder is incomplete; copy it again"
                )
        return []
    modules = []
    for entry in read_document(file, list):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or "path" not in entry:
            raise InputError(f"{file}: expected modules with type and path, got {format_json(entry)}")
        package, _, kind = entry["type"].rpartition(".")
        if package.partition(".")[0] != "sentence_transformers" or kind not in (
            "Transformer",
            "Pooling",
            "Dense",
            "Normalize",
            *_SPLADE_MODULES,
        ):
            raise InputError(
                f"{file}: module {entry['type']} is not supported (Transformer, Pooling, Dense, "
                "Normalize, MLMTransformer and SpladePooling of sentence-transformers are)"
            )
        modules.append((kind, check_inner_path(entry["path"], "path", file)))
    if len(modules) < 2:
        raise InputError(f"{file}: expected a Transformer and a Pooling module, got {len(modules)} module(s)")
    return modules


def _is_splade(folder: Path, kinds: Sequence[str]) -> bool:
    """Whether the modules form a SPLADE model. Raises InputError if only some of them do."""
    if not set(kinds) & set(_SPLADE_MODULES):
        return False
    if len(kinds) != 2 or kinds[0] not in ("Transformer", "MLMTransformer") or kinds[1] != "SpladePooling":
        raise InputError(
            f"{folder / 'modules.json'}: expected MLMTransformer (or Transformer), then SpladePooling, got "
            f"{', '.join(kinds)}: not supported"
        )
    return True


def check_splade(file: Path, vocabulary_size: int | None) -> None:
    """Raises InputError unless the SpladePooling settings are those of SPLADE v2."""
    config = read_object(file, required=True)
    for name, expected in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if (value := read_field(config, name, str, file, expected)) != expected:
            raise InputError(f"{file}: {name}={value} is not supported ({expected} is)")
    for name in ("embedding_dimension", "word_embedding_dimension"):
        size = read_count(config, name, file)
        if size is not None and size != vocabulary_size:
            raise InputError(
                f"{file}: {name} is {size}, and the model has {vocabulary_size} words: copy the folder again"
            )


def _transformer_settings(
    backbone: Path, kind: str = "Transformer", *, is_splade: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Returns the path and content of sentence-transformers' settings for a backbone; the content is {} if missing.

    kind: its module. With SpladePooling, a Transformer has the task fill-mask, which is the default of MLMTransformer.
    """
    file, settings = backbone / _TRANSFORMER_CONFIGS[0], {}
    for name in _TRANSFORMER_CONFIGS:
        if content := read_object(backbone / name):
            file, settings = backbone / name, content
            break
    task = settings.get("transformer_task", "fill-mask" if kind == "MLMTransformer" else "feature-extraction")
    is_masked = is_splade and task == "fill-mask"
    output = "logits" if is_masked else "last_hidden_state"
    default = {"method": "forward", "method_output_name": output}
    text = read_field(settings, "modality_config", dict, file, {}).get("text", default)
    refused = {
        "transformer_task": is_splade != is_masked or (not is_splade and task != "feature-extraction"),
        "query_expansion": bool(settings.get("query_expansion")),
        "processing_kwargs": bool(settings.get("processing_kwargs")),
        "modality_config": text != default,
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise InputError(f"{file}: {key}={settings.get(key, task)} is not supported")
    return file, settings


def _read_pooling(file: Path) -> Pooling:
    """Returns the pooling of a Pooling module; raises InputError for an unsupported one."""
    config = read_object(file, required=True)
    modes: Any = config.get("pooling_mode")
    if not modes:
        chosen = {mode: read_field(config, key, bool, file) for key, mode in _OLD_POOLING_KEYS.items()}
        modes = [mode for mode, is_chosen in chosen.items() if is_chosen]
        if not modes and chosen["mean"] is False:
            raise InputError(f"{file}: no pooling mode is true; expected one of cls, mean and lasttoken")
        modes = modes or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise InputError(f"{file}: pooling_mode: expected a name or a list of names, got {format_json(modes)}")
    known = {"pooling_mode", *_OLD_POOLING_KEYS}
    if unknown := [
        key for key, value in config.items() if key.startswith("pooling_mode") and value and key not in known
    ]:
        raise InputError(f"{file}: {unknown[0]}: unknown pooling mode (cls, mean and lasttoken are supported)")
    names = {mode: name for name, mode in POOLING_MODES.items()}
    if len(modes) != 1 or modes[0] not in names:
        raise InputError(f"{file}: pooling {' + '.join(modes)} is not supported (cls, mean and lasttoken are)")
    if read_field(config, "include_prompt", bool, file) is False:
        raise InputError(f"{file}: include_prompt=false (pooling that leaves the prefix out) is not supported")
    return names[modes[0]]


def _read_dense(folder: Path, path: str) -> DenseLayer:
    """Reads the settings of a Dense module."""
    file = folder / path / "config.json"
    config = read_object(file, required=True)
    name = read_field(config, "activation_function", str, file, "torch.nn.modules.activation.Tanh")
    package, _, activation = name.rpartition(".")
    if not package.startswith("torch.nn") or activation not in _ACTIVATIONS:
        raise InputError(f"{file}: activation {package}.{activation} is not supported ({', '.join(_ACTIVATIONS)} are)")
    ends = [read_field(config, f"module_{end}_name", str, file) or "sentence_embedding" for end in ("input", "output")]
    if set(ends) != {"sentence_embedding"} or config.get("use_residual"):
        raise InputError(
            f"{file}: only a plain layer over the sentence embedding is supported, got {format_json(config)}"
        )
    size = read_count(config, "out_features", file)
    if size is None:
        raise InputError(f"{file}: out_features: expected an integer of at least 1, got none")
    if not weight_files(folder / path):
        raise InputError(f"{folder / path}: no model.safetensors and no pytorch_model.bin")
    return DenseLayer(path, activation, size, read_field(config, "bias", bool, file, True))
