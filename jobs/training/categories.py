"""Options of training on pairs with a common category, on the command line."""

from __future__ import annotations

from jobs.common.cli import Common

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retriever.errors import InputError
from retriever.training.category_options import FIELD, WEIGHT, CategoryOptions


@dataclass(frozen=True, kw_only=True)
class CategoryTraining(Common):
    """Options of jobs that can train on pairs with a common category."""

    positives: Literal["judged", "categories"] = "judged"
    """judged: the positives of a query are the passages that its judgements name; categories (Topic-DPR): all passages
    of the batch that share a category with its judged passage, each weighted by the overlap of their categories, and
    the other passages of the batch are its negatives. Without mined negatives; use a large --batch. The relevance of
    --dev-split is by category too."""
    categories_field: str | None = None
    """With --positives categories: the metadata field of a passage with its categories, a list of names. Default:
    categories."""
    category_weight: float | None = None
    """With --positives categories: the weight alpha of the loss of pairs of queries, which share the categories of
    their passages; the loss of queries and passages has the weight 1 - 2 alpha. 0 leaves it out; at most 0.5. Default:
    0.1 (our choice: the paper does not print its own)."""

    def categories(self, mining: Mapping[str, Any]) -> CategoryOptions | None:
        """Returns the options of category positives; None for judged ones.

        Args:
            mining: The options that ask for mined negatives, by name; None or 0 if they do not.

        Raises:
            InputError: If an option has a bad value, or does not fit the positives.
        """
        values = {"categories_field": self.categories_field, "category_weight": self.category_weight}
        if self.positives == "judged":
            for name, value in values.items():
                if value is not None:
                    raise InputError(
                        f"parameter {name} {value}: is for positives with a common category: give --positives "
                        "categories, or leave it out"
                    )
            return None
        for name, value in mining.items():
            if value:
                raise InputError(
                    f"--positives categories, parameter {name} {value}: the negatives are the passages of the batch "
                    "without a common category, and none are mined: leave it out"
                )
        return CategoryOptions(
            field=FIELD if self.categories_field is None else self.categories_field,
            weight=WEIGHT if self.category_weight is None else self.category_weight,
        )
