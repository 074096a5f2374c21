"""Pairs of question and passage: the options of a cross-encoder, what its folder says, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from retriever.batching import Tokens
from retriever.errors import InputError
from retriever.files import read_json, sha256_of, tokenizer_files, weight_files
from retriever.options import TitlePolicy
from retriever.recipe import positions_of


@dataclass(frozen=True, kw_only=True)
class RerankerOptions:
    """How a pair becomes a probability. None means: what the model's own folder says, else the default named here.

    max_length: tokens of question and passage together, special ones included; of longer pairs the longer text is cut
        first (default: the tokenizer's limit, at most the model's positions, else 512).
    title: how a passage's title and text are joined, as in EncoderOptions.
    positive_label: the label that means "relevant" of a model with several (default: 1 of two; with more, name it).
    dtype: as in EncoderOptions; the step from logits to a probability is float32.
    compile: "auto" compiles where bfloat16 is used and a compiler is there; "always" raises where that fails. Compiling
        takes some 15 s, so it pays from some thousand pairs on.
    """

    max_length: int | None = None
    title: TitlePolicy = "space"
    positive_label: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "never", "always"] = "never"

    def __post_init__(self) -> None:
        """Raises InputError for a value that no model could take."""
        allowed = {
            "title": get_args(TitlePolicy),
            "dtype": ("auto", "float32", "bfloat16"),
            "compile": ("auto", "never", "always"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(values)}")
        for name, least in (("max_length", 1), ("positive_label", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}={value} must be at least {least}")


DEFAULT_OPTIONS = RerankerOptions()
_AT_ONCE = 4_096  # pairs that are tokenised together


class PairTokenizer:
    """A model's fast tokenizer for pairs of at most `max_length` tokens, the longer text cut first.

    types: whether the model was made for token types. Raises InputError for a tokenizer that cannot be used.
    """

    def __init__(self, folder: Path, max_length: int, *, trust_remote_code: bool = False):
        from transformers import AutoTokenizer

        try:
            slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (ValueError, OSError) as error:
            raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
        if not getattr(slow, "is_fast", False):
            raise InputError(f"{folder}: {type(slow).__name__} is no fast tokenizer: save one (tokenizer.json)")
        self.separator: str | None = slow.sep_token or slow.eos_token
        self.pad_id = int(slow.pad_token_id if slow.pad_token_id is not None else slow.eos_token_id or 0)
        self.types = "token_type_ids" in slow.model_input_names
        self._base = slow.backend_tokenizer
        self._base.no_padding()
        special = self._base.num_special_tokens_to_add(True)
        if max_length < special + 2:
            raise InputError(f"max_length={max_length} leaves no room beside {special} special tokens")
        self._base.enable_truncation(max_length, strategy="longest_first")

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> tuple[Tokens, Tokens]:
        """(token ids, token types) of each pair. Raises InputError that names a pair which is no two valid strings."""
        if len(queries) != len(passages):
            raise InputError(f"{len(queries)} queries and {len(passages)} passages: expected one passage for each")
        pairs = list(zip(queries, passages, strict=True))
        rows: list[tuple[list[int], list[int]]] = []
        try:
            for start in range(0, len(pairs), _AT_ONCE):  # an encoding takes some 20 kB until its ids are out
                # A tokenizer without special tokens makes nothing of two empty texts.
                rows += [
                    (encoding.ids, encoding.type_ids) if encoding.ids else ([self.pad_id], [0])
                    for encoding in self._base.encode_batch(pairs[start : start + _AT_ONCE])
                ]
        except (TypeError, UnicodeEncodeError) as error:
            for position, pair in enumerate(zip(queries, passages, strict=True)):
                try:
                    for text in pair:
                        text.encode("utf-8")
                except (AttributeError, UnicodeEncodeError) as fault:
                    raise InputError(f"pair {position} of {len(queries)} is no two valid strings: {fault}") from error
            raise
        lengths = np.fromiter((len(ids) for ids, _ in rows), np.int64, len(rows))
        ids, types = (np.fromiter(chain.from_iterable(row[k] for row in rows), np.int32) for k in (0, 1))
        return Tokens(ids, lengths), Tokens(types, lengths)

    def compose(self, titles: Sequence[str], texts: Sequence[str], policy: TitlePolicy) -> list[str]:
        """Passages' strings by the title policy; an empty title adds nothing."""
        if policy == "none":
            return list(texts)
        between = {"space": " ", "newline": "\n", "sep": f" {self.separator} "}[policy]
        return [title + between + text if title else text for title, text in zip(titles, texts, strict=True)]


@dataclass(frozen=True)
class PairRecipe:
    """What a cross-encoder's folder and the options together say. positive_label: None for a model of one label."""

    folder: Path
    model_type: str
    labels: int
    positive_label: int | None
    max_length: int
    positions: int | None


def read_pair_recipe(folder: Path, options: RerankerOptions, *, trust_remote_code: bool = False) -> PairRecipe:
    """Resolves the options against a model's folder. Raises InputError for what is no cross-encoder that we can run."""
    from transformers import AutoConfig

    file = folder / "modules.json"
    paths = [module["path"] for module in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else [""]
    if paths != [""] or (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: several modules or an adapter: a plain cross-encoder in one folder is expected")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds) or config.model_type == "xlnet":
        found = ", ".join(kinds) or "no architecture"
        raise InputError(f"{folder}: {found} is no cross-encoder: a model with a classification head is expected "
                         "(…ForSequenceClassification; XLNet's is not supported)")  # fmt: skip
    labels, label = int(config.num_labels), options.positive_label
    if label is not None and label >= labels:
        raise InputError(f"positive_label={label}: {folder.name} has {labels} label(s), counted from 0")
    if labels > 2 and label is None:
        names = ", ".join(f"{number} {name}" for number, name in sorted(config.id2label.items()))
        raise InputError(f"{folder}: {labels} labels ({names}): say with positive_label which one means relevant")
    positions = positions_of(config)
    if options.max_length is not None and positions is not None and options.max_length > positions:
        raise InputError(f"max_length={options.max_length} is more than the {positions} positions of {folder.name}")
    own = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    own = own or read_json(folder / "tokenizer_config.json").get("model_max_length") or 512
    own = 512 if own > 1_000_000 and positions is None else int(min(own, positions or own))
    return PairRecipe(
        folder=folder,
        model_type=config.model_type,
        labels=labels,
        positive_label=None if labels == 1 else 1 if label is None else label,
        max_length=options.max_length or own,
        positions=positions,
    )


def settings_of(recipe: PairRecipe, options: RerankerOptions) -> dict[str, Any]:
    """What enters a fingerprint: contents by their sha256, settings resolved; no paths, no device."""
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
