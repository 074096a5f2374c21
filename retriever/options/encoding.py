"""Options of an encoder and of a re-ranker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from riptide.base.arguments import refuse_unknown_names
from riptide.base.option_fields import OptionGroup, option, stored_options

Side = Literal["query", "passage"]
SIDES: tuple[Side, Side] = ("query", "passage")
PLURALS: dict[Side, str] = {"query": "queries", "passage": "passages"}
DensePooling = Literal["cls", "mean", "last"]
SparsePooling = Literal["splade"]
Pooling = Literal[DensePooling, SparsePooling]
VECTORS = {**dict.fromkeys(get_args(DensePooling), "dense"), **dict.fromkeys(get_args(SparsePooling), "sparse")}
"""The kind of the vectors that each pooling makes."""
TitlePolicy = Literal["space", "newline", "sep", "none"]
Precision = Literal["auto", "float32", "bfloat16"]
EncoderPrecision = Literal[Precision, "int8"]
Compile = Literal["auto", "never", "always"]


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """Options that shape the vector of a text. None: the setting of the model folder, or the default in the help."""

    GROUP: ClassVar = "texts and vectors"

    pooling: Pooling | None = option(None, choices=VECTORS)
    """Pooling of token vectors. Default: the setting in the backbone's folder, or mean. splade: sparse vectors, which
    hold weights of the vocabulary's words by the backbone's masked-language-model head. This and the next options shape
    the vectors: use the values with which the store's embeddings were made."""
    normalize: bool | None = None
    """Scale vectors to length 1. Default: the setting in the backbone's folder, or no."""
    query_prefix: str | None = None
    """Text in front of each query. Default: the setting in the backbone's folder, or none."""
    passage_prefix: str | None = None
    """Text in front of each passage. Default: the setting in the backbone's folder, or none."""
    title: TitlePolicy = "space"
    """Separator between a passage's title and its text: a space, a newline, or the tokenizer's separator token; none:
    leave out the title."""
    query_length: int | None = option(None, minimum=1)
    """Maximum number of tokens per query, special tokens included. Longer queries are cut; the job says how many.
    Default: the setting in the backbone's folder, which is at most the number of its positions, or 512; 256 in training
    of sparse vectors (naver/splade) if the folder is no SPLADE model."""
    passage_length: int | None = option(None, minimum=1)
    """Maximum number of tokens per passage, special tokens included; default: as for queries. Longer passages are cut;
    the job says how many."""
    dimension: int | None = option(None, minimum=1)
    """Keep this many leading dimensions of each vector, then normalise again, for Matryoshka models. Default: all."""
    append_eos: bool = False
    """End every text with the end-of-sequence token if the tokenizer does not add it. The setting add_eos_token in
    tokenizer_config.json has the same effect."""
    padding_side: Literal["left", "right"] | None = None
    """The side on which batches are padded. Default: the tokenizer's."""


@refuse_unknown_names
@dataclass(frozen=True, kw_only=True)
class EncoderOptions(TextOptions):
    """Options of an encoder. None: the setting of the model folder, or the default in the help."""

    GROUP: ClassVar = TextOptions.GROUP

    dtype: EncoderPrecision = "auto"
    """The dtype of the backbone's matrix products. auto: bfloat16 on CUDA; on a CPU, the faster of bfloat16 and
    float32. int8: for BERT-family models on a CPU; faster, and vectors have a cosine of 0.998 to those of float32
    (MiniLM). Pooling and the layers after it are float32."""
    compile: Compile = "auto"
    """torch.compile; auto: if bfloat16 is used and a compiler is available, except for BERT-family models on a CPU,
    which are faster without it; always: an error if compiling fails."""
    query_terms: int | None = option(None, minimum=1, later=True)
    """With sparse vectors: keep this many words of a query, those with the largest weights. Default: the setting
    max_active_dims in the model's folder, or all."""
    passage_terms: int | None = option(None, minimum=1, later=True)
    """With sparse vectors: keep this many words of a passage. Default: as for queries."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON-serialisable values for a record; see `stored_options`."""
        return stored_options(self)


LATER_OPTIONS = ("query_terms", "passage_terms")
DEFAULT_OPTIONS = EncoderOptions()


@dataclass(frozen=True, kw_only=True)
class RerankPrecision:
    """The precision of the re-ranker of a job or a service."""

    GROUP: ClassVar = "re-ranking"

    rerank_dtype: EncoderPrecision = "auto"
    """The dtype of the re-ranker's matrix products. auto: bfloat16 on CUDA; on a CPU, the faster of bfloat16 and
    float32, which is measured once per machine. int8: for BERT-family models on a CPU; faster, and probabilities differ
    from those of float32 by about 0.001 (MiniLM). The classification head is float32 then."""


@refuse_unknown_names
@dataclass(frozen=True, kw_only=True)
class RerankerOptions(OptionGroup):
    """Options that shape the probability of a pair. None: the setting of the model folder, or the default named here.

    max_length: tokens of query and passage together, special tokens included; the longer text is cut first (default:
        the tokenizer's limit, at most the model's positions, or 512).
    title: how a passage's title and text are joined, as in EncoderOptions.
    positive_label: the label that means "relevant", for a model with several (default: 1 of two; required for more).
    dtype: as in `RerankPrecision`, which is the option of jobs.
    compile: "auto" compiles if bfloat16 is used and a compiler is available; "always" raises if compiling fails. It
        takes about 15 s, so it pays for more than about a thousand pairs.
    """

    max_length: int | None = option(None, minimum=1)
    title: TitlePolicy = "space"
    positive_label: int | None = option(None, minimum=0)
    dtype: EncoderPrecision = "auto"
    compile: Compile = "never"
