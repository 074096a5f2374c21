"""Converts the errors that third-party loaders raise on damaged files into InputError."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from riptide.base.errors import InputError
from riptide.base.wording import shorten

_MAX_REASON = 300  # maximum characters kept of a third-party message


@contextlib.contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Converts errors of a third-party loader to a one-line InputError that names `path`; the original is its cause.

    transformers, tokenizers, safetensors and torch raise many types of exceptions on damaged files (KeyError,
    AttributeError, ZeroDivisionError, plain Exception, Rust panics), so this catches all but exhausted memory and
    interrupts. Only calls of such loaders belong inside.
    """
    try:
        yield
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be loaded: {reason_of(error)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InputError(f"{path}: cannot be loaded: {reason_of(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic in tokenizers or safetensors, whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def reason_of(error: BaseException) -> str:
    """Returns an error's message on one line, preceded by the error type if the message alone is not informative."""
    message = " ".join(str(error).split())
    if not message or isinstance(error, KeyError) or " " not in message:
        message = f"{type(error).__name__} {message}".strip()
    return shorten(message, _MAX_REASON)


@contextlib.contextmanager
def without_loading_report() -> Iterator[None]:
    """Suppresses transformers' progress bar and its table of missing or unexpected weights: the caller checks them."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    has_bar = is_progress_bar_enabled()
    if has_bar:
        disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(is_error)
        if has_bar:
            enable_progress_bar()
