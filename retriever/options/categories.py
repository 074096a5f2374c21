"""Options of training on pairs with a common category."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.options import option
from riptide.base.wording import Parameter

FIELD = "categories"  # the metadata field of a passage with its categories


@dataclass(frozen=True, kw_only=True)
class CategoryOptions:
    """Options of training on pairs with a common category (Topic-DPR)."""

    GROUP: ClassVar = "positives of categories"

    weight: float = option(0.1, flag="category-weight")
    """With --positives categories: the weight alpha of the loss of pairs of queries, which share the categories of
    their passages; the loss of queries and passages has the weight 1 - 2 alpha. 0 leaves it out; at most 0.5. (Our
    choice: a tenth for each of the two further terms of the loss; the paper does not print its own.)"""
    field: str = option(FIELD, flag="categories-field")
    """With --positives categories: the metadata field of a passage with its categories, a list of names."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        if not 0 <= self.weight <= 0.5:
            raise InputError(
                f"{Parameter('category_weight', f'{self.weight:g}')}: expected 0 to 0.5, because the loss of queries "
                "and passages has the weight 1 - 2 times it"
            )
        if not self.field:
            raise InputError(f"{Parameter('categories_field')} '': expected the name of a metadata field")
