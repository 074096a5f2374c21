"""Loads weights and refuses a model unless the file contains exactly the tensors that the architecture needs."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from riptide.base.errors import InputError
from riptide.base.wording import list_first, shown
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.failures import readable_errors, without_loading_report
from riptide.retriever.model.json_fields import format_json, parse_json, read_object
from riptide.retriever.model.model_folder import weight_files

MAX_HEADER = 4 << 20  # maximum bytes of a safetensors header
_GLOBAL = re.compile(r"\bGLOBAL ([\w.]+)")
_SPARE_PARAMETERS = 1 << 24  # parameters of parts that a file may lack, for example a pooler
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_REMEDY = "copy the model folder again, or save the model again"

InPart = Callable[[str], bool]


def check_files(folder: Path, config: Any) -> None:
    """Checks a backbone's weight files without loading them: headers, the shard index, and plausible sizes.

    A file whose header is read is as long as its header says. The hidden size must be a dimension of some tensor: with
    another one, transformers would allocate random weights of that size before it noticed.

    Args:
        folder: The folder with the weights.
        config: transformers' configuration.

    Raises:
        InputError: For missing or damaged files, sizes that no tensor has, quantised weights, and a tensor in two
            files.
    """
    used = _used_files(folder)
    if used[0].suffix == ".safetensors":
        dimensions = {size for shape in _shapes_in(used) for size in shape}
        for name in ("hidden_size", "vocab_size"):
            size = getattr(config, name, None)
            if size is not None and size not in dimensions:
                raise InputError(
                    f"{folder / 'config.json'}: {name} is {size}, and no tensor of the weights has this size; {_REMEDY}"
                )


def _used_files(folder: Path) -> list[Path]:
    """Returns the weight files that transformers reads: a single one, or the shards of an index.

    Raises:
        InputError: If there are none, or if one is missing.
    """
    files = weight_files(folder)
    if not files:
        raise InputError(
            f"{folder}: no model.safetensors and no pytorch_model.bin: the model folder is incomplete; copy it again"
        )
    stem, suffix = ("model", ".safetensors") if files[0].suffix == ".safetensors" else ("pytorch_model", ".bin")
    single, index = folder / f"{stem}{suffix}", folder / f"{stem}{suffix}.index.json"
    if single in files:
        return [single]
    if not index.exists():
        raise InputError(f"{files[0]}: neither {single.name} nor {index.name} is there; {_REMEDY}")
    return _shards(index, files)


def _shapes_in(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """Returns the shapes of all tensors. Raises InputError for quantised weights, and for a tensor in two files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in shapes:
                raise InputError(f"{file}: holds {shown(name)}, which another file of the model holds too; {_REMEDY}")
            if entry["dtype"] not in _DTYPES:
                _refuse_if_weight(name, entry["dtype"], file)
            shapes[name] = tuple(entry["shape"])
    return list(shapes.values())


def _refuse_if_weight(name: str, dtype: str, file: Path) -> None:
    """Raises InputError if a tensor without floating-point numbers is a weight; other tensors may have any type."""
    if name.endswith(".weight"):  # ".bias" may be the mask of a GPT-2
        raise InputError(
            f"{file}: {shown(name)} is {dtype}: expected {', '.join(_DTYPES)}; quantised weights are not supported"
        )


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Reads the shape of each tensor from the header of a safetensors file.

    Raises:
        InputError: If the file is damaged, its header exceeds MAX_HEADER bytes, or a name stands twice in the header,
            which safetensors does not notice.
    """
    return {name: tuple(entry["shape"]) for name, entry in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, Any]:
    """Reads the header of a safetensors file, without its metadata; errors as in `tensor_shapes`."""
    from safetensors import safe_open

    with readable_errors(file):
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER:
                raise InputError(f"{file}: a header of {length:,} bytes, expected up to {MAX_HEADER:,}")
            header = stream.read(length)
        with safe_open(file, "pt"):  # This checks the header and the file size.
            pass
        try:
            entries = parse_json(header.decode(), has_unique_fields=True)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}: its header is not a table of tensors: {error.msg}; {_REMEDY}") from error
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Reads tensors onto the CPU, by name, from a safetensors file or a state dict that torch.save has written.

    Raises:
        InputError: As `tensor_shapes` does; for a state dict, if it is damaged, holds anything but tensors with values
            in memory, or would run code when it is loaded.
    """
    if file.exists() and not file.is_file():
        raise InputError(f"{file}: not a file: expected tensors; copy it again")
    if file.suffix != ".safetensors":
        return _read_pickle(file)
    from safetensors.torch import load_file

    tensor_shapes(file)
    with readable_errors(file):
        return dict(load_file(file))


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    stored = _load_pickle(file, "cpu")
    if not isinstance(stored, dict):
        raise InputError(f"{file}: holds a {type(stored).__name__}, expected tensors by name (a state dict)")
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InputError(
                f"{file}: {shown(repr(name))} is a {type(value).__name__}, expected tensors by name (a state dict)"
            )
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise InputError(
                f"{file}: {shown(repr(name))} is sparse, quantised or without values, expected a plain tensor"
            )
    return stored


def _load_pickle(file: Path, device: str) -> Any:
    """Loads what torch.save has written, on a device; "meta": without the values of tensors."""
    # torch warns of archives of TorchScript and of quantised tensors, which are refused here.
    with readable_errors(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except UnpicklingError as error:
            if (name := _GLOBAL.search(str(error))) is None:
                raise InputError(
                    f"{file}: not a state dict that torch.save has written: save the tensors with safetensors"
                ) from error
            raise InputError(
                f"{file}: holds {name[1]} beside tensors; only a state dict is read, as a pickle can run code: save "
                "the tensors with safetensors"
            ) from error


def load_model(
    kind: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    unused: Sequence[InPart] = (),
    fresh: Sequence[InPart] = (),
    trust_remote_code: bool = False,
    **settings: Any,
) -> tuple[Any, list[str]]:
    """Loads a transformers model; raises InputError unless its weights are complete.

    Args:
        kind: The class whose `from_pretrained` loads it.
        folder: The model folder.
        dtype: The dtype of its weights.
        unused: Parts of the model, as predicates on tensor names, that the caller does not use: they may be missing.
        fresh: Parts that the caller trains from random weights if the file lacks them; a file that has some tensors of
            such a part and lacks others is refused.
        trust_remote_code: Whether code in the folder may run.
        settings: Values that override those of config.json.

    Returns:
        The model, and the names of the tensors of `fresh` parts that the file lacks.

    Raises:
        InputError: If files are damaged, if tensors are missing or have another shape, or if the file holds more layers
            than the configuration says and `settings` do not override that. Names up to three tensors.
    """
    if not trust_remote_code:
        _check_size(kind, folder, settings)
    files = _used_files(folder)
    safe = files[0].suffix == ".safetensors"  # With True, transformers never reads pickled files.
    if not safe:
        _check_pickled_dtypes(files)
    with readable_errors(folder), without_loading_report():
        model, report = kind.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=safe,
            trust_remote_code=trust_remote_code,
            **settings,
        )
    missing, title = set(report["missing_keys"]), type(model).__name__
    if report["error_msgs"]:
        raise InputError(
            f"{folder}: the weights do not fit a {title}: {' '.join(str(report['error_msgs'][0]).split())}"
        )
    if report["mismatched_keys"]:
        shapes = [
            f"{name} {list(stored)} instead of {list(expected)}"
            for name, stored, expected in sorted(report["mismatched_keys"])
        ]
        raise InputError(f"{folder}: tensors whose shapes differ from config.json's: {list_first(shapes)}; {_REMEDY}")
    lacking = _missing_fresh_tensors(model, missing, fresh)
    needed = sorted(name for name in missing - lacking if not any(part(name) for part in unused))
    encoder = _encoder_tensors(model)
    if needed and encoder and encoder <= missing and _has_decoder(folder):
        raise InputError(
            f"{folder}: the weights hold a decoder without its encoder, which computes the vectors: give a folder with "
            "the encoder, or with both"
        )
    if needed:
        raise InputError(f"{folder}: the weights lack {list_first(sorted(needed))}, which a {title} needs: {_REMEDY}")
    # If `settings` override the number of layers, the last layers are omitted on purpose.
    if "num_hidden_layers" not in settings and (surplus := surplus_layers(model, report["unexpected_keys"])):
        raise InputError(
            f"{folder}: the weights hold layers that config.json does not use: {list_first(sorted(surplus))}; correct "
            "the number of layers in config.json"
        )
    return model, sorted(lacking)


def _check_pickled_dtypes(files: Sequence[Path]) -> None:
    """Raises InputError for weights in state dicts that transformers would cast from integers or complex numbers."""
    for file in files:
        stored = _load_pickle(file, "meta")
        for name, value in stored.items() if isinstance(stored, dict) else ():
            if isinstance(value, torch.Tensor) and value.dtype not in _DTYPES.values():
                _refuse_if_weight(f"{name}", f"{value.dtype}", file)


def _check_size(kind: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises InputError if a model has more parameters than its weight files have bytes, before it takes their memory.

    transformers replaces tensors of other shapes, and those that the files lack, by random ones.
    """
    config = load_config(folder, **settings)
    with readable_errors(folder), torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    size = sum(file.stat().st_size for file in weight_files(folder))
    if count > size + _SPARE_PARAMETERS:
        raise InputError(
            f"{folder / 'config.json'}: describes a model of {count:,} parameters, and the weight files have {size:,} "
            f"bytes; {_REMEDY}"
        )


def surplus_layers(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Returns the unexpected tensors of layers beyond the model's last layer, sorted.

    Other unexpected tensors (a language-model head, a classifier, a decoder) are what checkpoints usually hold more of.
    """
    prefix = f"{model.base_model_prefix}."
    known: dict[str, set[str]] = {}  # path of each list of layers -> numbers of its layers in the model
    for name in model.state_dict():
        for path, number in _layer_numbers(name.removeprefix(prefix)):
            known.setdefault(path, set()).add(number)
    return sorted(
        name
        for name in unexpected
        if any(
            path in known and number not in known[path] for path, number in _layer_numbers(name.removeprefix(prefix))
        )
    )


def load_tensors(folder: Path, expected: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, torch.Tensor]:
    """Loads the tensors of a small layer from model.safetensors, or from pytorch_model.bin if that does not exist.

    Args:
        folder: The layer's folder.
        expected: Name and shape of each tensor.
        prefix: What the names in the file may begin with.

    Returns:
        The tensors in float32, by the names of `expected`.

    Raises:
        InputError: If the file is damaged, or holds other tensors, shapes or types.
    """
    file = folder / "model.safetensors"
    if not file.exists():
        file = folder / "pytorch_model.bin"
    stored = read_tensors(file)
    tensors = {name.removeprefix(prefix): value for name, value in stored.items()}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes != dict(expected) or len(tensors) != len(stored):
        raise InputError(
            f"{file}: expected tensors {_describe_shapes(expected)}, got {_describe_shapes(shapes)}; {_REMEDY}"
        )
    if wrong := sorted(name for name, value in tensors.items() if not value.is_floating_point()):
        raise InputError(f"{file}: {wrong[0]} is {tensors[wrong[0]].dtype}, expected floating-point numbers")
    return {name: value.float() for name, value in tensors.items()}


def _shards(index: Path, files: Sequence[Path]) -> list[Path]:
    """Returns the files listed in a shard index. Raises InputError if one is missing or damaged."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index}: weight_map: expected a file name for each tensor, got {format_json(names)}")
    by_name = {file.name: file for file in files}
    if lost := sorted(set(names.values()) - set(by_name)):
        raise InputError(f"{index}: names {list_first(lost)}, which is not in the folder; {_REMEDY}")
    return [by_name[name] for name in sorted(set(names.values()))]


def _missing_fresh_tensors(model: Any, missing: set[str], fresh: Sequence[InPart]) -> set[str]:
    """Returns the missing tensors of those fresh parts that are missing completely.

    If only some tensors of a part are missing, the file is damaged, and these are not among them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ordinary = {value.data_ptr() for name, value in parameters.items() if not any(part(name) for part in fresh)}
    lacking: set[str] = set()
    for part in fresh:
        # Tensors that share memory with a backbone tensor are not counted, because transformers does not report them as
        # missing while the backbone tensor is present.
        names = {name for name, value in parameters.items() if part(name) and value.data_ptr() not in ordinary}
        absent = {name for name in missing if part(name)}
        if names <= missing:
            lacking |= absent
    return lacking


def _encoder_tensors(model: Any) -> set[str]:
    """Returns the tensor names of a model's encoder, except the token embeddings, which a decoder has too."""
    return {name for name in model.state_dict() if name.startswith("encoder.") and "embed_tokens" not in name}


def _has_decoder(folder: Path) -> bool:
    """Whether the weight files of a folder contain decoder tensors (T5)."""
    for file in weight_files(folder):
        names: Iterable[str] = tensor_shapes(file) if file.suffix == ".safetensors" else read_tensors(file)
        if any(name.startswith("decoder.") for name in names):
            return True
    return False


def _layer_numbers(name: str) -> list[tuple[str, str]]:
    """Returns (path, number) for each number in a tensor name: `encoder.layer.3.x` gives (encoder.layer, 3)."""
    pieces = name.split(".")
    return [(".".join(pieces[:place]), piece) for place, piece in enumerate(pieces) if piece.isdigit()]


def _describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return list_first(sorted(f"{name} {list(shape)}" for name, shape in shapes.items())) or "none"
