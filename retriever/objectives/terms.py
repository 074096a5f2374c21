"""The terms of the loss. To add a term, write its module, with its options, and add its class to TERMS."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from riptide.retriever.objectives.category_term import CategoryTerm
from riptide.retriever.objectives.divergence_term import DivergenceTerm
from riptide.retriever.objectives.flops_term import FlopsTerm
from riptide.retriever.objectives.loss_term import LossTerm
from riptide.retriever.objectives.pair_term import PairTerm
from riptide.retriever.objectives.topic_term import TopicTerm

# They are added up in this order, which decides the rounding of the sum.
TERMS: list[type[LossTerm[Any]]] = [PairTerm, CategoryTerm, TopicTerm, DivergenceTerm, FlopsTerm]

# The options of all terms, a group for each, as options of a job.
AllTermOptions = make_dataclass(
    "AllTermOptions",
    [
        (each.OPTIONS.NAME, each.OPTIONS, field(default_factory=each.OPTIONS))
        for each in TERMS
        if each.OPTIONS is not None
    ],
    frozen=True,
    kw_only=True,
)
