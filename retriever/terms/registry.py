"""The registry of terms of the loss. To add a term, write its module and add its class to TERMS."""

from __future__ import annotations

from riptide.retriever.terms.categories import CategoryTerm
from riptide.retriever.terms.divergence import DivergenceTerm
from riptide.retriever.terms.flops import FlopsTerm
from riptide.retriever.terms.pairs import PairTerm
from riptide.retriever.terms.term import LossTerm
from riptide.retriever.terms.topics import TopicTerm

# They are added up in this order, which decides the rounding of the sum.
TERMS: list[type[LossTerm]] = [PairTerm, CategoryTerm, TopicTerm, DivergenceTerm, FlopsTerm]
