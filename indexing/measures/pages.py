"""R-precision of pages, as KILT's eval_retrieval.py defines it: a page ranks by its first passage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.files.raw import short_repr
from riptide.indexing.measures.metadata_metric import MetadataMetric
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.queries.queries import Queries

PAGE = "wikipedia_id"  # the metadata field of a passage with the id of its page
_BLOCK = 512  # number of queries whose passages are in memory at once
_FIRST_HITS = 10  # hits per query whose pages are looked up first; most provenance sets have one or two pages


def page_sets(queries: Queries, ids: Sequence[str]) -> dict[str, list[frozenset[str]]]:
    """Returns the provenance sets by query id: the page ids of each output, an empty list without provenance.

    They are in the metadata of the queries, {"provenance": [["12", "25"], ["39"]]}, as the import of KILT's task files
    stores them.

    Args:
        queries: The query set.
        ids: Ids of the queries.

    Raises:
        InputError: If none of the queries has provenance, or if the provenance of one is not a list of lists of ids.
    """
    metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
    sets: dict[str, list[frozenset[str]]] = {}
    for id in ids:
        fields = json.loads(metadata[id]) if metadata[id] else {}
        provenance = fields.get("provenance") if isinstance(fields, dict) else None
        if not _are_page_lists(provenance or []):
            raise InputError(
                f"{queries.artifact.key}: query {id!r} has the provenance {short_repr(provenance)}, expected a list of "
                'page ids for each output, [["12", "25"], ["39"]]; import KILT\'s task file'
            )
        sets[id] = [frozenset(str(page).strip() for page in pages) for pages in provenance or [] if pages]
    if not any(sets.values()):
        raise InputError(
            f"no query of {queries.artifact.key} has provenance: it is metadata of the queries, "
            '{"provenance": [["12", "25"], ["39"]]}, page ids for each output; import KILT\'s task file'
        )
    return sets


def page_r_precision(
    ranked_ids: Mapping[str, Sequence[str]], provenance: Mapping[str, Sequence[frozenset[str]]], corpus: Corpus
) -> dict[str, float]:
    """Returns KILT's R-precision by query id.

    The value of a provenance set of R pages is the fraction of them among the first R distinct pages of the hits; the
    value of a query is the largest of its sets. A query without provenance or without hits has 0. A hit that the corpus
    lacks counts as a page that is not relevant.

    Args:
        ranked_ids: Passage ids of each query, best first.
        provenance: The provenance sets of each query, see `page_sets`.
        corpus: The corpus, whose passages name their pages.

    Raises:
        InputError: If a passage names no page.
    """
    values = {}
    queries = list(provenance)
    for start in range(0, len(queries), _BLOCK):
        sizes = {query: max(map(len, provenance[query]), default=0) for query in queries[start : start + _BLOCK]}
        for query, pages in _first_pages(ranked_ids, sizes, corpus).items():
            values[query] = max((len(set(pages[: len(s)]) & s) / len(s) for s in provenance[query]), default=0.0)
    return values


def _first_pages(
    ranked_ids: Mapping[str, Sequence[str]], sizes: Mapping[str, int], corpus: Corpus
) -> dict[str, list[str]]:
    """Returns the first distinct pages of each query's hits: at least `sizes[query]`, or all if the hits have fewer."""
    pages: dict[str, dict[str, None]] = {query: {} for query in sizes}
    start, end = 0, _FIRST_HITS
    while pending := [q for q, size in sizes.items() if len(pages[q]) < size and start < len(ranked_ids[q])]:
        page_of = _pages_of(sorted({id for query in pending for id in ranked_ids[query][start:end]}), corpus)
        for query in pending:
            pages[query] |= dict.fromkeys(page_of[id] for id in ranked_ids[query][start:end])
        start, end = end, 2 * end
    return {query: list(found) for query, found in pages.items()}


def _pages_of(ids: Sequence[str], corpus: Corpus) -> dict[str, str]:
    """Returns the page of each passage; a passage that the corpus lacks gets a name that no page has."""
    rows = corpus.rows_of(ids)
    pages = {id: f" {id}" for id in ids}  # no page id begins with a space
    for passage in corpus.passages(rows[rows >= 0]):
        page = passage.metadata.get(PAGE)
        if type(page) not in (str, int) or not str(page).strip():
            raise InputError(
                f"passage {passage.id!r} names no page: its metadata has {PAGE} {short_repr(page)}, expected the id of "
                "a page; import KILT's knowledge source, or add the field to the passages"
            )
        pages[passage.id] = str(page).strip()
    return pages


def _are_page_lists(provenance: object) -> bool:
    """Returns whether a metadata value is a list of lists of page ids."""
    return isinstance(provenance, list) and all(
        isinstance(pages, list) and all(type(page) in (str, int) for page in pages) for pages in provenance
    )


class PageRPrecision(MetadataMetric):
    """The metric PageRprec, KILT's R-precision of pages."""

    form = "PageRprec"  # Rprec is the name of ir-measures' R-precision of judged passages
    summary = "KILT's R-precision, of the pages of the hits and the provenance of the query"
    metadata_name = "provenance"

    def read(self, queries: Queries, ids: Sequence[str]) -> dict[str, list[frozenset[str]]]:
        """Returns the provenance sets of each query by id; errors as for `page_sets`."""
        return page_sets(queries, ids)

    def values(
        self, run: pa.Table, metadata: Mapping[str, Sequence[frozenset[str]]], corpus: Corpus, names: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Returns the R-precision of each query; see MetadataMetric."""
        by_query = page_r_precision(ranked_hits(run, metadata), metadata, corpus)
        values = np.array([by_query[id] for id in metadata])
        return dict.fromkeys(names, values)


PAGE_R_PRECISION = PageRPrecision()
