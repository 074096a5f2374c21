"""How a model turns text into vectors: the settings of its folder, overridden by options; loads no weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.model.configuration import check_bidirectional, check_int8, load_config
from riptide.retriever.model.json_fields import format_json, read_count, read_field, read_object
from riptide.retriever.model.model_folder import find_model_folder, sha256_of, tokenizer_files, weight_files
from riptide.retriever.model.modules import ENCODER_CONFIG, SPLADE, DenseLayer, check_splade, read_modules
from riptide.retriever.model.transformers_arguments import check_model_arguments, config_arguments, tokenizer_arguments
from riptide.retriever.model.vocabulary import check_vocabulary
from riptide.retriever.model.weights import check_files
from riptide.retriever.options import DEFAULT_OPTIONS, EncoderOptions, Pooling, RerankerOptions

# `model_type` of models whose positions begin after the padding token's id.
OFFSET_POSITION_MODEL_TYPES = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "data2vec-text", "esm"}
)
# config.json keys that do not affect the backbone's output.
_IDLE_CONFIG_KEYS = {
    "_name_or_path",
    "architectures",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "gradient_checkpointing",
    "_attn_implementation_autoset",
}


@dataclass(frozen=True)
class Recipe:
    """The resolved settings by which a model turns text into vectors: those of its folder, overridden by the options.

    Attributes:
        folder: The model folder.
        backbone: The folder of the backbone.
        model_type: The architecture of the backbone.
        pooling: Pooling of token vectors.
        head: The steps after pooling, in order; "normalize" scales a vector to length 1.
        query_prefix: Text in front of each query.
        passage_prefix: Text in front of each passage.
        unused_prompts: Names of the folder's prompts if none of them is for queries; else empty.
        query_length: Maximum number of tokens of a query.
        passage_length: Maximum number of tokens of a passage.
        lower_case: Texts are converted to lower case.
        append_eos: Every text ends with the end-of-sequence token, which is added if the tokenizer does not.
        padding_side: The side on which batches are padded.
        hidden: Length of a token vector.
        dim: Length of a vector.
        max_positions: Number of tokens for which the backbone has positions; None if its positions are relative.
        first_position: The usual position of the first token of a text.
        vocabulary_size: Rows of the table of token embeddings; None: unknown.
        tokenizer_args: Arguments of the tokenizer, from the files of sentence-transformers.
        config_args: Arguments of the configuration, from the same files.
        query_terms: Maximum number of words of a sparse vector of a query; None: all.
        passage_terms: The same for passages.
    """

    folder: Path
    backbone: Path
    model_type: str
    pooling: Pooling
    head: tuple[DenseLayer | str, ...]
    query_prefix: str
    passage_prefix: str
    unused_prompts: tuple[str, ...]
    query_length: int
    passage_length: int
    lower_case: bool
    append_eos: bool
    padding_side: str
    hidden: int
    dim: int
    max_positions: int | None
    first_position: int
    vocabulary_size: int | None
    tokenizer_args: dict[str, Any]
    config_args: dict[str, Any]
    query_terms: int | None = None
    passage_terms: int | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether vectors hold weights of vocabulary words."""
        return self.pooling == SPLADE

    @property
    def pooled_dim(self) -> int:
        """The dimension of a vector after pooling, before the head."""
        return self.dim if self.is_sparse else self.hidden


def read_recipe(folder: Path, options: EncoderOptions, *, trust_remote_code: bool = False) -> Recipe:
    """Resolves the options against the settings of a Hugging Face or sentence-transformers model folder.

    Args:
        folder: The model folder.
        options: Values that override the folder's settings.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        InputError: For damaged or missing files, an unsupported module, pooling or setting, and lengths that the
            backbone has no positions for.
    """
    modules = read_modules(folder)
    backbone, file, settings = modules.backbone, modules.settings_file, modules.settings
    config_args = config_arguments(settings, file)
    tokenizer_args = tokenizer_arguments(settings, file)
    check_model_arguments(settings, file, trust_remote_code=trust_remote_code)
    config = load_config(backbone, trust_remote_code=trust_remote_code, **config_args)
    check_files(backbone, config)
    if options.dtype == "int8":
        check_int8_options(options, trust_remote_code=trust_remote_code)
        if (options.pooling or modules.pooling) == SPLADE:
            expected = f"expected a dense pooling with {Parameter('dtype', 'int8')}, or another dtype"
            raise InputError(f"{Parameter('pooling', SPLADE)}: {expected}")
        check_int8(config, backbone / "config.json")
    check_vocabulary(backbone)
    hidden, vocabulary_size = int(config.hidden_size), vocabulary_size_of(config)
    if modules.splade_file is not None:
        check_splade(modules.splade_file, vocabulary_size)
    pooling = options.pooling or modules.pooling
    if options.compile != "always" and not trust_remote_code:
        decoder_file = file if {"is_decoder", "is_causal"} & config_args.keys() else backbone / "config.json"
        check_bidirectional(config, decoder_file, "" if pooling == SPLADE else _remedy_for_decoder(options))
    head = _resolve_head(modules.head, pooling, options)
    dim = _dense_dim(folder, head, hidden, options)
    max_terms = read_count(read_object(folder / ENCODER_CONFIG), "max_active_dims", folder / ENCODER_CONFIG)
    query_terms = passage_terms = None
    if pooling == SPLADE:
        if vocabulary_size is None:
            raise InputError(f"{backbone / 'config.json'}: vocab_size: expected an integer, whose words get weights")
        dim = vocabulary_size
        query_terms, passage_terms = options.query_terms or max_terms, options.passage_terms or max_terms
    query_length, passage_length, padding_side = _length_limits(
        backbone, config, file, settings, tokenizer_args, options
    )
    query_prefix, passage_prefix, others = _read_prefixes(folder / ENCODER_CONFIG)
    return Recipe(
        folder=folder,
        backbone=backbone,
        model_type=config.model_type,
        pooling=pooling,
        head=head,
        query_prefix=query_prefix if options.query_prefix is None else options.query_prefix,
        passage_prefix=passage_prefix if options.passage_prefix is None else options.passage_prefix,
        unused_prompts=() if query_prefix or options.query_prefix is not None else others,
        query_length=query_length,
        passage_length=passage_length,
        lower_case=read_field(settings, "do_lower_case", bool, file, False),
        append_eos=options.append_eos or _adds_eos(backbone, tokenizer_args),
        padding_side=options.padding_side or padding_side,
        hidden=hidden,
        dim=dim,
        max_positions=max_positions_of(config),
        first_position=first_position_of(config),
        vocabulary_size=vocabulary_size,
        tokenizer_args=tokenizer_args,
        config_args=config_args,
        query_terms=query_terms,
        passage_terms=passage_terms,
    )


def _resolve_head(
    head: Sequence[DenseLayer | str], pooling: Pooling, options: EncoderOptions
) -> tuple[DenseLayer | str, ...]:
    """Returns the layers after pooling: those of the folder, unless the options say otherwise.

    Raises:
        InputError: If options do not fit the pooling.
    """
    if pooling == SPLADE:
        _check_sparse_options(options)
        return ()
    for name in ("query_terms", "passage_terms"):
        if (terms := getattr(options, name)) is not None:
            raise InputError(
                f"{Parameter(name, terms)}: is for {Parameter('pooling', SPLADE)}, and the pooling is {pooling}: leave "
                "it out"
            )
    steps = list(head)
    if options.normalize is not None:
        while steps and steps[-1] == "normalize":
            steps.pop()
        if options.normalize:
            steps.append("normalize")
    return tuple(steps)


def _dense_dim(folder: Path, head: Sequence[DenseLayer | str], hidden: int, options: EncoderOptions) -> int:
    """Returns the dimension of dense vectors. Raises InputError if the options request a larger dimension."""
    dim = next((step.size for step in reversed(head) if isinstance(step, DenseLayer)), hidden)
    if options.dimension is None:
        return dim
    if options.dimension > dim:
        raise InputError(f"{Parameter('dimension', options.dimension)}: more than the {dim} that the backbone makes")
    return options.dimension


def with_projection(recipe: Recipe, size: int) -> Recipe:
    """Returns the recipe with a new linear layer after pooling, without bias and before normalisation (GTR).

    Args:
        recipe: The recipe of a backbone.
        size: Length of a vector after the layer; it may be the backbone's hidden size.

    Raises:
        InputError: If the backbone has such layers already.
    """
    if present := [step.folder for step in recipe.head if isinstance(step, DenseLayer)]:
        raise InputError(
            f"{Parameter('projection', size)}: {recipe.folder} has a layer after pooling already ({present[0]}), which "
            "is trained further without the parameter: leave it out"
        )
    return replace(recipe, head=(DenseLayer(None, "Identity", size, bias=False), *recipe.head), dim=size)


def describe(name_or_path: str | Path, options: EncoderOptions = DEFAULT_OPTIONS) -> dict[str, Any]:
    """Returns an Encoder's `config`, the JSON-serialisable settings that shape the vectors, without loading a model."""
    return settings_of(read_recipe(find_model_folder(name_or_path), options), options)


def settings_of(recipe: Recipe, options: EncoderOptions) -> dict[str, Any]:
    """Returns the settings for the fingerprint of an artifact: files by their sha256, without paths or device."""
    content = read_object(recipe.backbone / "config.json", required=True)
    backbone = {key: value for key, value in content.items() if key not in _IDLE_CONFIG_KEYS}
    backbone |= recipe.config_args
    return {
        "model_type": recipe.model_type,
        "backbone": hashlib.sha256(json.dumps(backbone, sort_keys=True).encode()).hexdigest(),
        "weights": [sha256_of(file) for file in weight_files(recipe.backbone)],
        "tokenizer": [sha256_of(file) for file in tokenizer_files(recipe.backbone)],
        "tokenizer_args": recipe.tokenizer_args,
        "lower_case": recipe.lower_case,
        "pooling": recipe.pooling,
        "head": [
            step
            if isinstance(step, str)
            else {
                "activation": step.activation,
                "size": step.size,
                "weights": [sha256_of(f) for f in _dense_weight_files(recipe, step)],
            }
            for step in recipe.head
        ],
        "query_prefix": recipe.query_prefix,
        "passage_prefix": recipe.passage_prefix,
        "title": options.title,
        "query_length": recipe.query_length,
        "passage_length": recipe.passage_length,
        "dimension": options.dimension,
        "append_eos": recipe.append_eos,
        "padding_side": recipe.padding_side,
        "dtype": options.dtype,
        "dim": recipe.dim,
        **({"query_terms": recipe.query_terms, "passage_terms": recipe.passage_terms} if recipe.is_sparse else {}),
    }


def _dense_weight_files(recipe: Recipe, step: DenseLayer) -> list[Path]:
    """Returns the weight files of a dense layer that is stored in the model folder."""
    assert step.folder is not None
    return weight_files(recipe.folder / step.folder)


def fingerprint_of(config: dict[str, Any]) -> str:
    """Returns the sha256 of a `config` in hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def check_int8_options(options: EncoderOptions | RerankerOptions, *, trust_remote_code: bool) -> None:
    """Raises InputError for options that do not go together with int8."""
    int8 = Parameter("dtype", "int8")
    if options.compile == "always":
        raise InputError(f"{Parameter('compile', 'always')}: {int8} is not compiled: leave out {Parameter('compile')}")
    if trust_remote_code:
        raise InputError(f"{Parameter('trust_remote_code')}: code of a model folder does not run with {int8}")


def _remedy_for_decoder(options: EncoderOptions) -> str:
    """Returns the remedy for a decoder of the BERT family that is meant to be one: compiled, its mask is applied."""
    dtype = f" and another {Parameter('dtype')}" if options.dtype == "int8" else ""
    return f", or, if the model was trained so, encode with {Parameter('compile', 'always')}{dtype}"


def _check_sparse_options(options: EncoderOptions) -> None:
    """Raises InputError for options that do not apply to sparse (SPLADE) vectors."""
    if options.normalize or options.dimension is not None:
        raise InputError(
            f"{Parameter('normalize')}, {Parameter('dimension')}: expected neither with "
            f"{Parameter('pooling', SPLADE)}, as weights of words are not scaled to length 1, and have no leading "
            "dimensions"
        )
    if options.compile == "always":
        raise InputError(
            f"{Parameter('compile', 'always')}: expected auto or never with {Parameter('pooling', SPLADE)}, whose head "
            "is not compiled"
        )


def _read_prefixes(file: Path) -> tuple[str, str, tuple[str, ...]]:
    """Returns sentence-transformers' query prompt and passage prompt, and the names of all other prompts.

    A prompt that the file lacks is empty. The names are those of prompts that are not empty.
    """
    prompts = read_field(read_object(file), "prompts", dict, file, {})
    texts = {name: read_field(prompts, name, str, file, "") for name in prompts}
    of_passages = ("document", "passage", "corpus")
    passage = next((texts[name] for name in of_passages if texts.get(name)), "")
    others = tuple(name for name, text in texts.items() if text and name not in ("query", *of_passages))
    return texts.get("query", ""), passage, others


def _length_limits(
    backbone: Path,
    config: Any,
    file: Path,
    settings: dict[str, Any],
    tokenizer_args: dict[str, Any],
    options: EncoderOptions,
) -> tuple[int, int, str]:
    """Returns the maximum sequence lengths of queries and of passages, and the padding side of the tokenizer."""
    tokenizer_file = backbone / "tokenizer_config.json"
    tokenizer = read_object(tokenizer_file) | tokenizer_args
    positions = max_positions_of(config)
    limit = (
        read_count(settings, "max_seq_length", file) or read_count(tokenizer, "model_max_length", tokenizer_file) or 512
    )
    limit = 512 if limit > 1_000_000 and positions is None else min(limit, positions or limit)
    lengths = []
    for name, key in (("query_length", "query_length"), ("passage_length", "document_length")):
        chosen = getattr(options, name)
        if chosen is not None and positions is not None and chosen > positions:
            raise InputError(f"{Parameter(name, chosen)}: more than the {positions} positions of the backbone")
        length = read_count(settings, key, file)
        if length is not None and positions is not None and length > positions:
            raise InputError(f"{file}: {key}={length} is more than the {positions} positions of {backbone.name}")
        lengths.append(int(chosen or length or limit))
    side = read_field(tokenizer, "padding_side", str, tokenizer_file, "right")
    if side not in ("right", "left"):
        raise InputError(f"{tokenizer_file}: padding_side: expected right or left, got {format_json(side)}")
    return lengths[0], lengths[1], side


def _adds_eos(backbone: Path, tokenizer_args: dict[str, Any]) -> bool:
    """Whether the tokenizer's settings append the end-of-sequence token to texts.

    transformers before version 5 obeyed this field of tokenizer_config.json; later versions obey tokenizer.json alone,
    which E5-Mistral's folder leaves without the token that its vectors are taken from.
    """
    file = backbone / "tokenizer_config.json"
    return read_field(read_object(file) | tokenizer_args, "add_eos_token", bool, file, False)


def max_positions_of(config: Any) -> int | None:
    """Returns the number of tokens for which a backbone has positions; None if its positions are relative (T5)."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or (isinstance(positions, int) and positions < 0):
        return None
    first = first_position_of(config)
    if not isinstance(positions, int) or positions <= first:
        raise InputError(
            f"config.json: max_position_embeddings: expected an integer of at least {first + 1}, "
            f"got {format_json(positions)}"
        )
    return positions - first


def first_position_of(config: Any) -> int:
    """Returns the position of a text's first token: RoBERTa-family models start after the padding token's id."""
    if config.model_type not in OFFSET_POSITION_MODEL_TYPES:
        return 0
    if not isinstance(config.pad_token_id, int) or config.pad_token_id < 0:
        raise InputError(
            f"config.json: pad_token_id: expected an integer of at least 0, got {format_json(config.pad_token_id)}"
        )
    return config.pad_token_id + 1


def vocabulary_size_of(config: Any) -> int | None:
    """Returns the size of a backbone's token embedding table; None if its configuration does not give it."""
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None
