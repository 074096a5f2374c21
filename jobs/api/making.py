"""The methods of a store that make artifacts."""

from __future__ import annotations


class Making:
    """The methods that make artifacts; a method has the name and the options of its job."""
