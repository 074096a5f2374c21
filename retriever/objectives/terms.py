"""The registry of loss terms. To add a term, write its module, with its options, and add its class to TERMS."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from riptide.retriever.objectives.category_term import CategoryTerm
from riptide.retriever.objectives.divergence_term import DivergenceTerm
from riptide.retriever.objectives.flops_term import FlopsTerm
from riptide.retriever.objectives.loss_term import LossTerm
from riptide.retriever.objectives.pair_term import PairTerm
from riptide.retriever.objectives.topic_term import TopicTerm

# The order of summation, which determines the rounding of the loss.
TERMS: list[type[LossTerm[Any]]] = [PairTerm, CategoryTerm, TopicTerm, DivergenceTerm, FlopsTerm]

# The options of all terms as options of a job, with one field and group per term.
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
