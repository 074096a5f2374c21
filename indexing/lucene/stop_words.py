"""The English stop words of Lucene, which BM25 leaves out of passages and queries. Needs no JVM."""

from __future__ import annotations

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
