"""The kernel of exact search is loaded on every machine that can run it."""

from __future__ import annotations

import pytest
from kernels import must_load

from riptide.indexing.exact import kernel


@pytest.mark.skipif(not must_load(kernel.NEEDED), reason="the CPU lacks AVX-512 BF16")
def test_the_kernel_is_loaded() -> None:
    """Without it search falls back to torch, and only a warning says so."""
    library = kernel.load_kernel()
    assert library is not None
    assert library.riptide_amx() in (0, 1)
