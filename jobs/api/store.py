"""The store of the Python API: its artifacts are made, read, searched and measured with methods."""

from __future__ import annotations

from jobs.api.making import Making

import indexing.store.store
from indexing.store.cache import NodeCache


class Store(Making, indexing.store.store.Store):
    """A store of artifacts: a local folder or `s3://bucket/prefix`.

    Args:
        url: The folder, or `s3://bucket/prefix`.
        cache: The cache of files of this machine; default: the one of all stores.
        verbose: Print the lines that the jobs print.
    """

    def __init__(self, url: str, *, cache: NodeCache | None = None, verbose: bool = False):
        super().__init__(url, cache=cache)
        self.verbose = verbose
