"""The passages that a comparison shows: titles, texts and grades."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from riptide.indexing.corpus.corpus import Corpus


@dataclass(frozen=True)
class ShownPassage:
    """A passage or document to show, with its grade for the query.

    Attributes:
        id: Its id.
        grade: Its judgement for the query; None: not judged.
        title: Its title; None: the corpus lacks it.
        text: Its text; None: the corpus lacks it.
    """

    id: str
    grade: int | None
    title: str | None
    text: str | None


class ShownTexts:
    """Titles and texts of passages or documents, by id. A document has those of its first passage.

    Args:
        corpus: The corpus.
        ids: The ids.

    Attributes:
        missing: The ids that the corpus lacks, sorted.
    """

    def __init__(self, corpus: Corpus, ids: Collection[str]):
        names = sorted(set(ids))
        rows = corpus.rows_of(names, with_deleted=True)
        if corpus.is_split:
            rows = np.where(rows < 0, corpus.rows_of_documents(names)[0], rows)
        known = np.flatnonzero(rows >= 0)
        passages = corpus.passages(rows[known])
        self._texts = {names[at]: (each.title, each.text) for at, each in zip(known, passages, strict=True)}
        self.missing = [name for name in names if name not in self._texts]
        self._count = len(names)

    def missing_message(self, url: str) -> str:
        """Returns how many passages the corpus of the store at a URL lacks, for a warning."""
        return (
            f"{len(self.missing):,} of {self._count:,} passages (such as {self.missing[0]!r}) are not in the corpus of "
            f"{url}, and are shown without text"
        )

    def shown_passage(self, id: str, grades: Mapping[str, int], passage: str | None = None) -> ShownPassage:
        """Returns a hit or a judged passage with its title, text and grade.

        Args:
            id: Its id.
            grades: The judgements of the query.
            passage: Id of the passage that stands for a document; None: the document's first one.
        """
        title, text = self._texts.get(passage or id, (None, None))
        return ShownPassage(id, grades.get(id), title, text)
