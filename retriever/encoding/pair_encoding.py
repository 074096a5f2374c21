"""Query-passage pairs of a cross-encoder: its options, the settings of its folder, and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.forward.batching import Tokens, readable_panics, tokens_to_cut, with_titles
from riptide.retriever.model.configuration import check_bidirectional, check_int8, load_config
from riptide.retriever.model.json_fields import read_count, read_document, read_object
from riptide.retriever.model.model_folder import sha256_of, tokenizer_files, weight_files
from riptide.retriever.model.recipe import (
    check_int8_options,
    first_position_of,
    max_positions_of,
    vocabulary_size_of,
)
from riptide.retriever.model.transformers_arguments import check_model_arguments, config_arguments, tokenizer_arguments
from riptide.retriever.model.vocabulary import check_ids, load_tokenizer
from riptide.retriever.model.weights import check_files
from riptide.retriever.options import RerankerOptions, TitlePolicy
from riptide.telemetry.phases import measured

DEFAULT_PAIR_OPTIONS = RerankerOptions()
_PAIRS_PER_CALL = 4_096


class PairTokenizer:
    """A fast tokenizer for query-passage pairs; cuts the longer text of a pair first.

    Attributes:
        types: Whether the model uses token types.

    Args:
        folder: The folder of the model.
        max_length: Maximum number of tokens of a pair.
        vocabulary_size: Rows of the model's table of token embeddings; None: unknown.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        InputError: If the tokenizer is damaged, has no vocabulary, or does not fit the model.
    """

    def __init__(
        self, folder: Path, max_length: int, *, vocabulary_size: int | None = None, trust_remote_code: bool = False
    ):
        slow = load_tokenizer(folder, vocabulary_size=vocabulary_size, trust_remote_code=trust_remote_code)
        self._vocabulary_size = vocabulary_size
        self.separator: str | None = slow.sep_token or slow.eos_token
        self.pad_id = int(slow.pad_token_id if slow.pad_token_id is not None else slow.eos_token_id or 0)
        self.types = "token_type_ids" in slow.model_input_names
        self._limit = max_length
        self._base = slow.backend_tokenizer
        self._base.no_padding()
        self._base.no_truncation()
        num_special_tokens = self._base.num_special_tokens_to_add(True)
        if max_length < num_special_tokens + 2:
            raise InputError(
                f"{Parameter('max_length', max_length)}: leaves no room beside {num_special_tokens} special tokens: "
                f"expected at least {num_special_tokens + 2}"
            )

    @measured("tokenise")
    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> tuple[Tokens, Tokens]:
        """Returns token ids and token types of pairs. Raises InputError that names the pair for an invalid string."""
        if len(queries) != len(passages):
            raise InputError(f"{len(queries)} queries and {len(passages)} passages: expected one passage for each")
        pairs = list(zip(queries, passages, strict=True))
        rows: list[tuple[list[int], list[int], int]] = []
        try:
            # An Encoding takes about 20 kB, so pairs are tokenised in blocks.
            for start in range(0, len(pairs), _PAIRS_PER_CALL):
                with readable_panics(len(pairs)):
                    encodings = self._base.encode_batch_fast(pairs[start : start + _PAIRS_PER_CALL])
                rows += map(self._cut_pair, encodings)
        except (TypeError, UnicodeEncodeError) as error:
            for position, pair in enumerate(zip(queries, passages, strict=True)):
                try:
                    for text in pair:
                        text.encode("utf-8")
                except (AttributeError, UnicodeEncodeError) as fault:
                    raise InputError(f"pair {position} of {len(queries)} is no two valid strings: {fault}") from error
            raise
        lengths = np.fromiter((len(ids) for ids, _, _ in rows), np.int64, len(rows))
        full_lengths = np.fromiter((length for _, _, length in rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(ids for ids, _, _ in rows), np.int32)
        types = np.fromiter(chain.from_iterable(types for _, types, _ in rows), np.int32)
        check_ids(ids, lengths, self._vocabulary_size)
        return Tokens(ids, lengths, full_lengths, self._limit), Tokens(types, lengths)

    def _cut_pair(self, encoding: Encoding) -> tuple[list[int], list[int], int]:
        """Returns the token ids and types of a pair, cut to the limit, and its token count before the cut."""
        ids, types = encoding.ids, encoding.type_ids
        if not ids:  # Without special tokens, two empty texts have no token.
            return [self.pad_id], [0], 1
        for tail in tokens_to_cut(encoding, self._limit):
            del ids[tail], types[tail]
        return ids, types, len(encoding)

    def compose(self, titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy) -> list[str]:
        """Joins titles and texts of passages as the policy says; see `with_titles`."""
        return with_titles(titles, texts, policy, self.separator)


@dataclass(frozen=True)
class PairRecipe:
    """The resolved settings by which a cross-encoder scores pairs: those of its folder, overridden by the options.

    Attributes:
        folder: The folder.
        model_type: The architecture.
        labels: Number of labels.
        positive_label: The label that means "relevant"; None for a model with one label.
        max_length: Maximum number of tokens of a pair.
        max_positions: Number of tokens for which the model has positions; None: any.
        first_position: The usual position of the first token of a pair.
        vocabulary_size: Rows of the table of token embeddings; None: unknown.
    """

    folder: Path
    model_type: str
    labels: int
    positive_label: int | None
    max_length: int
    max_positions: int | None
    first_position: int
    vocabulary_size: int | None


def read_pair_recipe(folder: Path, options: RerankerOptions, *, trust_remote_code: bool = False) -> PairRecipe:
    """Resolves the options against the settings of a model folder.

    Raises:
        InputError: For damaged or missing files, a model that is no cross-encoder, and settings it cannot take.
    """
    modules = read_document(folder / "modules.json", list)
    paths = [module.get("path") if isinstance(module, dict) else None for module in modules]
    if paths not in ([], [""]) or (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: several modules or an adapter: a plain cross-encoder in one folder is expected")
    file = folder / "sentence_bert_config.json"
    settings = read_object(file)
    if config_arguments(settings, file) or tokenizer_arguments(settings, file):
        raise InputError(
            f"{file}: arguments for a cross-encoder's configuration or tokenizer are not supported; put "
            "them into config.json and tokenizer_config.json"
        )
    check_model_arguments(settings, file)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    check_files(folder, config)
    kinds = list(map(str, config.architectures or []))
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds) or config.model_type == "xlnet":
        found = ", ".join(kinds) or "no architecture"
        raise InputError(
            f"{folder}: {found} is no cross-encoder: a model with a classification head is expected "
            "(…ForSequenceClassification; XLNet's is not supported)"
        )
    if options.dtype == "int8":
        check_int8_options(options, trust_remote_code=trust_remote_code)
        check_int8(config, folder / "config.json")
    if options.compile != "always" and not trust_remote_code:
        check_bidirectional(config, folder / "config.json")
    labels, label = int(config.num_labels), options.positive_label
    if label is not None and label >= labels:
        raise InputError(f"{Parameter('positive_label', label)}: the model has {labels} label(s), counted from 0")
    if labels > 2 and label is None:
        names = ", ".join(f"{number} {name}" for number, name in sorted(config.id2label.items()))
        raise InputError(
            f"{folder}: {labels} labels ({names}): say with {Parameter('positive_label')} which one means relevant"
        )
    positions = max_positions_of(config)
    if options.max_length is not None and positions is not None and options.max_length > positions:
        raise InputError(
            f"{Parameter('max_length', options.max_length)}: more than the {positions} positions of the model"
        )
    tokenizer_file = folder / "tokenizer_config.json"
    limit = read_count(settings, "max_seq_length", file)
    limit = limit or read_count(read_object(tokenizer_file), "model_max_length", tokenizer_file) or 512
    limit = 512 if limit > 1_000_000 and positions is None else min(limit, positions or limit)
    return PairRecipe(
        folder=folder,
        model_type=config.model_type,
        labels=labels,
        positive_label=None if labels == 1 else 1 if label is None else label,
        max_length=options.max_length or limit,
        max_positions=positions,
        first_position=first_position_of(config),
        vocabulary_size=vocabulary_size_of(config),
    )


def pair_settings(recipe: PairRecipe, options: RerankerOptions) -> dict[str, Any]:
    """Returns the settings for the fingerprint of an artifact: files by their sha256, without paths or device."""
    label = recipe.positive_label
    return {
        "model_type": recipe.model_type,
        "model": sha256_of(recipe.folder / "config.json"),
        "weights": [sha256_of(file) for file in weight_files(recipe.folder)],
        "tokenizer": [sha256_of(file) for file in tokenizer_files(recipe.folder)],
        "probability": "sigmoid" if label is None else f"softmax[{label}]",
        "title": options.title,
        "max_length": recipe.max_length,
        "truncation": "longest_first",
        "dtype": options.dtype,
    }
