"""The settings that shape an encoder's vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from retriever.errors import InputError

Side = Literal["query", "passage"]
SIDES: tuple[Side, Side] = ("query", "passage")
Pooling = Literal["cls", "mean", "last"]
TitlePolicy = Literal["space", "newline", "sep", "none"]


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How text becomes a vector. None means: what the model's own folder says, else the default named here.

    pooling: the first token, the mean of all, or the last one (default: mean).
    normalize: scale vectors to length 1 (default: no).
    query_prefix, passage_prefix: put in front of every text of that side (default: none).
    title: how a passage's title and text are joined: by a space, a newline, the tokenizer's separator token, or the
        title is left out.
    query_length, passage_length: in tokens, special ones included; longer texts are cut (default: the tokenizer's
        limit, at most the backbone's positions, else 512).
    dimension: keep this many leading numbers of a vector, then normalise again (Matryoshka models).
    append_eos: end every text with the end-of-sequence token, where the tokenizer does not do so itself.
    padding_side: on which side a batch is filled up (default: the tokenizer's).
    dtype: of the backbone; "auto" is bfloat16 on CUDA and on processors with bfloat16 products, else float32. Pooling
        and all that follows is float32.
    compile: "auto" compiles where bfloat16 is used and a compiler is there, but for what is faster without (BERT and
        its kin on a processor, see retriever.packing); "always" raises where that fails.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    title: TitlePolicy = "space"
    query_length: int | None = None
    passage_length: int | None = None
    dimension: int | None = None
    append_eos: bool = False
    padding_side: Literal["right", "left"] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "never", "always"] = "auto"

    def __post_init__(self) -> None:
        """Raises InputError for a value that no model could take."""
        allowed = {
            "pooling": (None, *get_args(Pooling)),
            "title": get_args(TitlePolicy),
            "padding_side": (None, "right", "left"),
            "dtype": ("auto", "float32", "bfloat16"),
            "compile": ("auto", "never", "always"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(str, values))}")
        for name in ("query_length", "passage_length", "dimension"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")


DEFAULT_OPTIONS = EncoderOptions()
