"""Prints and reads the counts of queries and pairs that a length limit cuts or that a tokenizer breaks."""

from __future__ import annotations

from collections.abc import Iterable

from riptide.base.cuts import Cuts
from riptide.base.wording import Parameter
from riptide.indexing.hit_sources.source_kind import SearchContext
from riptide.indexing.search.runs import SearchCuts, search_cuts
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactPart, sum_cuts
from riptide.jobs.common.printing import WARNING, say

PAIRS = "pairs of a query and a passage"


def stored_counts(artifact: Artifact) -> list[str]:
    """Returns the counts that embeddings, scores, a run or candidates store, as sentences; [] if there are none."""
    parts = artifact.numbered_parts("part")
    search = search_cuts(part.facts for part in parts)
    counts = {f"queries of embeddings/{name}": cuts for name, cuts in search.queries.items()} | {PAIRS: search.pairs}
    if artifact.kind in ("embeddings", "scores"):
        counts = {"passages" if artifact.kind == "embeddings" else PAIRS: sum_cuts(parts)}
    return [cuts.sentence(noun) for noun, cuts in counts.items() if cuts.texts]


def print_part_cuts(parts: Iterable[ArtifactPart], sources: SearchContext) -> None:
    """Prints the counts that the parts of a run or of candidates hold. sources: the sources that were searched."""
    print_search_cuts(search_cuts(part.facts for part in parts), sources)


def print_search_cuts(cuts: SearchCuts, sources: SearchContext) -> None:
    """Prints how many queries, and how many pairs of the re-ranker, a search cut to a length limit.

    Warns of a tokenizer that breaks many of the queries that are encoded now.
    """
    say(*(f"{WARNING}{warning}" for warning in sources.describe_broken()))
    for name, queries in cuts.queries.items():
        if queries.cut_texts:
            remedy = (
                f"encode the corpus under another {Parameter('name')} with a larger {Parameter('query_length')} "
                f"than {name} has"
            )
            say(queries.line("queries", remedy, sources.query_length_limit(name), "shorten the queries"))
    print_pair_cuts(cuts.pairs)


def print_pair_cuts(pairs: Cuts) -> None:
    """Prints the counts of cut texts among the pairs that a re-ranker scored."""
    if pairs.cut_texts:
        say(pairs.line(PAIRS, f"train a re-ranker with a larger {Parameter('max_length')}"))
