"""Data frames of pandas, which is imported only for them."""

from __future__ import annotations

from typing import Any

from retriever.errors import InputError


def import_pandas() -> Any:
    """Returns the module pandas. Raises InputError if it is not installed."""
    try:
        import pandas
    except ImportError:
        raise InputError("a data frame needs pandas, which is not installed; run: pip install pandas") from None
    return pandas
