"""The topic model of a corpus, and the inference of a text's topic."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import list_first
from riptide.retriever.model.json_fields import format_json
from riptide.retriever.topics.words import topic_words

NO_TOPIC = -1  # topic of a text that contains no word of the vocabulary
MAX_WORDS = 1 << 20  # maximum vocabulary size of a loaded model
_TYPES = {"path_topics": np.int64, "log_prior": np.float32, "log_words": np.float32, "vocabulary": np.uint8}


@dataclass(frozen=True, eq=False)
class TopicModel:
    """The topics of a corpus as a tree of words: each topic has one or more paths from the root to a leaf.

    The topic of a text with the words w_1 … w_n is that of its most probable path c:
    argmax_c log p(c) + sum_i log p(w_i | c). Words outside the vocabulary do not count.

    Attributes:
        vocabulary: The words that count.
        words: The most probable words of each topic, the most probable one first; K tuples.
        path_topics: int64 [paths], the topic of each path.
        log_prior: float32 [paths], log p(c).
        log_words: float32 [paths, vocabulary], log p(w | c), a mixture over the levels of the path.

    Raises:
        InputError: If the types, shapes or numbers do not fit together.
    """

    vocabulary: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    path_topics: np.ndarray
    log_prior: np.ndarray
    log_words: np.ndarray

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise InputError(f"topic model: {problem}")

    @property
    def num_topics(self) -> int:
        """The number of topics, K."""
        return len(self.words)

    def infer(self, texts: Sequence[str]) -> np.ndarray:
        """Infers the topic of each text.

        Args:
            texts: The texts, for example queries, or passages with their titles.

        Returns:
            int64 [texts]; NO_TOPIC (-1) for a text without a word of the vocabulary. Of equally probable paths the
            first one counts.
        """
        return np.array([self._infer_words(topic_words(text)) for text in texts], np.int64)

    def _infer_words(self, words: Sequence[str]) -> int:
        known = [self._numbers[word] for word in words if word in self._numbers]
        if not known:
            return NO_TOPIC
        scores = self.log_prior.astype(np.float64) + self._rows[known].sum(0)
        return int(self.path_topics[scores.argmax()])

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """The vocabulary index of each word."""
        return {word: number for number, word in enumerate(self.vocabulary)}

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        """Log probabilities as float64 [vocabulary, paths], so that the values of a word are adjacent in memory."""
        return np.ascontiguousarray(self.log_words.T, np.float64)

    def arrays_by_name(self) -> dict[str, np.ndarray]:
        """Returns the arrays for a safetensors file by name: the attributes, and `vocabulary` as UTF-8 lines, uint8."""
        return {
            "path_topics": self.path_topics,
            "log_prior": self.log_prior,
            "log_words": self.log_words,
            "vocabulary": np.frombuffer("\n".join(self.vocabulary).encode(), np.uint8),
        }

    def json_fields(self) -> dict[str, Any]:
        """Returns the non-array attributes for a JSON file: the words of each topic."""
        return {"words": [list(words) for words in self.words]}

    def fingerprint(self) -> str:
        """Returns the sha256 of the model's contents."""
        digest = hashlib.sha256()
        for piece in json.JSONEncoder(sort_keys=True).iterencode(self.json_fields()):
            digest.update(piece.encode())
        for name, array in sorted(self.arrays_by_name().items()):
            digest.update(f"{name} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    @classmethod
    def from_arrays(cls, arrays_by_name: Mapping[str, np.ndarray], json_fields: Any, file: Path | str) -> TopicModel:
        """Builds a model from the results of `arrays_by_name()` and `json_fields()`.

        Args:
            arrays_by_name: The arrays by name.
            json_fields: The fields as read from JSON.
            file: Where they are from, for messages.

        Raises:
            InputError: If an array or a field is missing, unknown, of another type or shape, or not finite.
        """
        where = f"{file}: topic model:"
        if not isinstance(json_fields, dict) or set(json_fields) != {"words"}:
            raise InputError(f"{where} expected an object with the field words, got {format_json(json_fields)}")
        words = json_fields["words"]
        if not isinstance(words, list) or not all(_is_words(topic) for topic in words):
            raise InputError(f"{where} words: expected a list of words for each topic, got {format_json(words)}")
        if set(arrays_by_name) != set(_TYPES):
            raise InputError(
                f"{where} holds {list_first(sorted(arrays_by_name)) or 'no array'}: expected "
                f"{', '.join(sorted(_TYPES))}"
            )
        for name, dtype in _TYPES.items():
            if arrays_by_name[name].dtype != dtype:
                raise InputError(f"{where} {name} is {arrays_by_name[name].dtype}, expected {np.dtype(dtype)}")
        try:
            vocabulary = _split_words(arrays_by_name["vocabulary"])
            arrays = {name: arrays_by_name[name] for name in ("path_topics", "log_prior", "log_words")}
            return cls(vocabulary, tuple(map(tuple, words)), **arrays)
        except UnicodeDecodeError as error:
            raise InputError(f"{where} vocabulary: not UTF-8 text") from error
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    def _problem(self) -> str | None:
        """Returns a description of the first inconsistency between the attributes; None if they are consistent."""
        paths, size = self.path_topics.shape, len(self.vocabulary)
        if not self.words or not all(self.words):
            return "expected at least one topic, and at least one word for each"
        if "" in self._numbers or len(self._numbers) != size or not size:
            return "vocabulary: expected at least one word, each once"
        if self.path_topics.dtype != np.int64 or len(paths) != 1 or not paths[0]:
            return f"path_topics is {self.path_topics.dtype} {paths}, expected int64 [paths]"
        for name, array, shape in (
            ("log_prior", self.log_prior, paths),
            ("log_words", self.log_words, (*paths, size)),
        ):
            if array.dtype != np.float32 or array.shape != shape:
                return f"{name} is {array.dtype} {array.shape}, expected float32 {shape}"
            if not np.isfinite(array).all():
                return f"{name} holds numbers that are not finite"
        if self.path_topics.min() < 0 or self.path_topics.max() >= self.num_topics:
            return f"path_topics: expected topics from 0 to {self.num_topics - 1}"
        return None


def with_default_topic(topics: np.ndarray, model: TopicModel) -> np.ndarray:
    """Replaces NO_TOPIC in topics of passages, int64 [n], by the topic of the most probable path."""
    return np.where(topics == NO_TOPIC, model.path_topics[model.log_prior.argmax()], topics)


def _split_words(lines: np.ndarray) -> tuple[str, ...]:
    """Splits UTF-8 text, uint8 [n], into lines. Raises InputError above MAX_WORDS, or UnicodeDecodeError."""
    content = np.ascontiguousarray(lines).reshape(-1)
    ends = np.flatnonzero(content == ord("\n"))
    if len(ends) >= MAX_WORDS:
        raise InputError(f"topic model: vocabulary: {len(ends) + 1:,} words, expected up to {MAX_WORDS:,}")
    words: list[str] = []
    begin, view = 0, content.data
    for block in np.array_split(np.append(ends, len(content)), 1 + len(ends) // 4096):
        for end in block.tolist():
            words.append(str(view[begin:end], "utf-8"))
            begin = end + 1
    return tuple(words)


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_word, value))


def _is_word(value: Any) -> bool:
    """Whether a value is a non-empty string that UTF-8 can encode, without unpaired surrogates."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)
