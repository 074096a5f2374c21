"""How a field declares an option; the options of an encoder and of a re-ranker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, Literal, get_args

from retriever.errors import InputError

Side = Literal["query", "passage"]
SIDES: tuple[Side, Side] = ("query", "passage")
PLURALS: dict[Side, str] = {"query": "queries", "passage": "passages"}
Pooling = Literal["cls", "mean", "last", "splade"]
VECTORS: dict[str, str] = {"cls": "dense", "mean": "dense", "last": "dense", "splade": "sparse"}
"""The kind of the vectors that each pooling makes."""
TitlePolicy = Literal["space", "newline", "sep", "none"]


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | Any = MISSING,
    flag: str = "",
    group: str = "",
    help: str = "",
    metavar: str = "",
    hidden: bool = False,
    positional: bool = False,
    repeated: bool = False,
) -> Any:
    """Declares a field of a dataclass that is an option of a job, for what its name, type and docstring do not say.

    A field that is a dataclass is a group of options. The heading of the options of a class is its class variable
    GROUP.

    Args:
        default: The default; without one and without `default_factory`, the option is required.
        default_factory: Makes the default.
        flag: Name of the option without dashes in front; default: the name of the field.
        group: Heading under which --help lists the option, or the options of the group; default: that of the class.
        help: Replaces the docstring below the field.
        metavar: Stands for the value in --help, for example FILE; default: that of the type.
        hidden: Leave the option out of --help.
        positional: The value is given without a name.
        repeated: Each value of a tuple is given by an option of its own.
    """
    settings = {
        "flag": flag,
        "group": group,
        "help": help,
        "metavar": metavar,
        "hidden": hidden,
        "positional": positional,
        "repeated": repeated,
    }
    metadata = {name: value for name, value in settings.items() if value}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How text becomes a vector. None: the setting of the model folder, or the default named here.

    pooling: the token vectors that become the text's vector: the first, the mean, or the last (default: mean).
        "splade": the weights of the vocabulary's words by the masked-language-model head (retriever.sparse).
    normalize: scale vectors to length 1 (default: no).
    query_prefix, passage_prefix: text in front of every query and of every passage (default: none).
    title: how a passage's title and text are joined: by a space, a newline, or the tokenizer's separator token; "none"
        leaves the title out.
    query_length, passage_length: tokens, special tokens included; longer texts are cut (default: the tokenizer's
        limit, at most the backbone's positions, or 512).
    dimension: keep this many leading numbers of a vector, then normalise again (Matryoshka models).
    append_eos: end every text with the end-of-sequence token if the tokenizer does not add it (default: no, unless
        tokenizer_config.json says add_eos_token).
    padding_side: the side on which a batch is padded (default: the tokenizer's).
    dtype: of the backbone; "auto" is bfloat16 on CUDA and on CPUs with bfloat16 products, otherwise float32. Pooling
        and the layers after it are float32.
    compile: "auto" compiles if bfloat16 is used and a compiler is available, except for BERT-family models on a CPU,
        which are faster without (see retriever.forward.packing); "always" raises if compiling fails.
    query_terms, passage_terms: with pooling "splade", keep this many words with the largest weights (default:
        max_active_dims of the model folder, or all).
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
    query_terms: int | None = None
    passage_terms: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that no model accepts."""
        allowed = {
            "pooling": (None, *VECTORS),
            "title": get_args(TitlePolicy),
            "padding_side": (None, "right", "left"),
            "dtype": ("auto", "float32", "bfloat16"),
            "compile": ("auto", "never", "always"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(str, values))}")
        for name in ("query_length", "passage_length", "dimension", *LATER_OPTIONS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")

    def stored(self) -> dict[str, Any]:
        """Returns the options for a record, JSON-able.

        Options that came later are in it only if they are set, so that records of other encoders keep their bytes.
        """
        return {name: value for name, value in asdict(self).items() if name not in LATER_OPTIONS or value is not None}


LATER_OPTIONS = ("query_terms", "passage_terms")
DEFAULT_OPTIONS = EncoderOptions()


@dataclass(frozen=True, kw_only=True)
class RerankerOptions:
    """How a pair becomes a probability. None: the setting of the model folder, or the default named here.

    max_length: tokens of query and passage together, special tokens included; the longer text is cut first (default:
        the tokenizer's limit, at most the model's positions, or 512).
    title: how a passage's title and text are joined, as in EncoderOptions.
    positive_label: the label that means "relevant", for a model with several (default: 1 of two; required for more).
    dtype: as in EncoderOptions; the step from logits to a probability is float32.
    compile: "auto" compiles if bfloat16 is used and a compiler is available; "always" raises if compiling fails. It
        takes about 15 s, so it pays for more than about a thousand pairs.
    """

    max_length: int | None = None
    title: TitlePolicy = "space"
    positive_label: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "never", "always"] = "never"

    def __post_init__(self) -> None:
        """Raises InputError for a value that no model accepts."""
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
