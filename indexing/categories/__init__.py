"""Categories of passages, read from their metadata."""

from indexing.categories.rows import categories_of_rows, category_names
from retriever.categories.table import CategoryTable

__all__ = ["CategoryTable", "categories_of_rows", "category_names"]
