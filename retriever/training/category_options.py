"""Options of training on pairs with a common category."""

from __future__ import annotations

from dataclasses import dataclass

from retriever.errors import InputError

# The paper's weights stand in an appendix that was not published with it: this is our choice, a tenth for each of the
# two further terms of the loss.
WEIGHT = 0.1
FIELD = "categories"


@dataclass(frozen=True, kw_only=True)
class CategoryOptions:
    """Options of training on pairs with a common category (Topic-DPR).

    Attributes:
        weight: The weight of the loss of pairs of queries (alpha): that of queries and passages is 1 - 2 alpha.
        field: The metadata field of a passage with its categories.
    """

    weight: float = WEIGHT
    field: str = FIELD

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        if not 0 <= self.weight <= 0.5:
            raise InputError(
                f"parameter category_weight {self.weight:g}: expected 0 to 0.5, because the loss of queries and "
                "passages has the weight 1 - 2 times it"
            )
        if not self.field:
            raise InputError("parameter categories_field '': expected the name of a metadata field")
