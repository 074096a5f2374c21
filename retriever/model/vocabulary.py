"""Loads a tokenizer, and checks that it has a vocabulary and that its ids fit the embedding table of the model."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.retriever.model.failures import readable_errors
from riptide.retriever.model.json_fields import format_json, read_field, read_object
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.model_folder import tokenizer_files

_TOKENIZER_CLASS = re.compile(r"(?!Auto)\w*(Tokenizer|TokenizerFast|Backend)")
# Fields of tokenizer_config.json for which transformers would open other files or build other objects.
_REFUSED = ("fast_tokenizer_files", "gguf_file", "init_inputs", "tokenizer_object", "transformers_weights")
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer*.model",
    "vocab*",
    "merges.txt",
    "*.spm",
    "*spm*.model",
    "spiece.model",
    "sentencepiece*.model",
    "bpe.codes",
    "*.tiktoken",
    "tekken.json",
)
_MAX_EXPANSION = 64  # factor of the length of a text by a normaliser; those of published ones have 1 or 2
_PROBED_TOKENS = 8
# Contains letters of several kinds; hardly any vocabulary has all of them.
_PROBE = "The Bank, of a caf\u00e9 1998 \u0378 \U0010fffd"


def load_tokenizer(
    folder: Path, *, vocabulary_size: int | None, trust_remote_code: bool = False, **arguments: Any
) -> Any:
    """Loads the fast tokenizer of a model folder with transformers.

    Args:
        folder: The folder with the tokenizer's files.
        vocabulary_size: Rows of the model's table of embeddings; None if unknown.
        trust_remote_code: Whether code in the folder may run.
        arguments: Values that override those of tokenizer_config.json.

    Raises:
        InputError: For missing or damaged files, for a tokenizer without a vocabulary, for one that is not fast, and if
            its ids exceed the table of embeddings.
    """
    transformers = import_transformers()

    check_vocabulary(folder)
    _check_documents(folder, trust_remote_code)
    _check_tokens(arguments, folder)
    with readable_errors(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **arguments)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{folder}: {type(tokenizer).__name__} is no fast tokenizer: save one (tokenizer.json)")
    backend = tokenizer.backend_tokenizer
    with readable_errors(folder):
        _check_expansion(backend, folder)
        padding, truncation = backend.padding, backend.truncation
        backend.no_padding()  # Padding to a large length would take the memory that it names.
        backend.no_truncation()
        inserted = backend.encode(_PROBE).ids
        is_blind = _is_blind(backend)
        if padding is not None:
            backend.enable_padding(**padding)
        if truncation is not None:
            backend.enable_truncation(**truncation)
        ids = set(backend.get_vocab(with_added_tokens=False).values())
        special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        _check_same(folder, backend, arguments)
    if not ids - special - set(tokenizer.all_special_ids):
        raise InputError(
            f"{folder}: the tokenizer's vocabulary holds special tokens only: its files "
            f"({', '.join(file.name for file in tokenizer_files(folder)) or 'none'}) are incomplete; copy "
            "tokenizer.json again"
        )
    if is_blind:
        raise InputError(
            f"{folder / 'tokenizer.json'}: gives a text only special tokens, so all texts have the same vector: copy "
            "the file again, or use another model"
        )
    largest = max(ids.union(inserted))
    if vocabulary_size is not None and largest >= vocabulary_size:
        raise InputError(
            f"{folder}: the tokenizer's ids reach {largest}, and the model has {vocabulary_size} token "
            "embeddings: the tokenizer is another model's; copy both again"
        )
    return tokenizer


def _is_blind(backend: Any) -> bool:
    """Returns whether a tokenizer gives only special tokens for _PROBE and for some tokens of its vocabulary."""
    added = {str(token) for token in backend.get_added_tokens_decoder().values()}
    words = (token for token in backend.get_vocab(with_added_tokens=False) if token not in added)
    tokens = itertools.islice(words, _PROBED_TOKENS)
    return all(all(backend.encode(text).special_tokens_mask) for text in (_PROBE, *tokens))


def _check_expansion(backend: Any, folder: Path) -> None:
    """Raises InputError if the replacements of a normaliser can make a text more than _MAX_EXPANSION times as long.

    A replacement multiplies the length by that of its content if it can match what earlier ones have inserted.
    Otherwise each match takes a character of the text itself, and the larger of both factors bounds the length.
    """
    factor, inserted = 1, ""
    for step in _normalizer_steps(json.loads(backend.normalizer.__getstate__()) if backend.normalizer else {}):
        content, pattern = step.get("content", ""), step.get("pattern", {}).get("String")
        matches_inserted = pattern is None or set(pattern) <= set(inserted)
        factor = factor * max(1, len(content)) if matches_inserted else max(factor, len(content))
        if factor > _MAX_EXPANSION:
            raise InputError(
                f"{folder / 'tokenizer.json'}: normalizer: its replacements can make a text {factor:,} times as long, "
                f"expected at most {_MAX_EXPANSION} times: use another model"
            )
        for form in (content, content.lower(), content.upper()):
            inserted += form + unicodedata.normalize("NFKC", form) + unicodedata.normalize("NFKD", form)


def _normalizer_steps(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normaliser in their order."""
    yield step
    for part in step.get("normalizers", []):
        yield from _normalizer_steps(part)


def append_eos_token(tokenizer: Any, folder: Path, setting: str) -> None:
    """Makes a fast tokenizer end every text, also a truncated one, with its end-of-sequence token, if it does not yet.

    Args:
        tokenizer: transformers' tokenizer. Its post-processor is replaced.
        folder: The model folder.
        setting: The setting that asks for the token, for the message.

    Raises:
        InputError: If the tokenizer has no end-of-sequence token.
    """
    from tokenizers.processors import TemplateProcessing

    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: no eos_token, and {setting} asks for one after every text: add the "
            f"field, or remove {setting}"
        )
    backend = tokenizer.backend_tokenizer
    encoding, bare = backend.encode("a"), backend.encode("a", add_special_tokens=False)
    if encoding.ids[-1:] == [end]:
        return
    # A second template would treat the special tokens of the first as text, so one template adds all of them.
    before = next((place for place, special in enumerate(encoding.special_tokens_mask) if not special), 0)
    tokens = [*encoding.tokens[:before], *encoding.tokens[before + len(bare.ids) :], backend.id_to_token(end)]
    ids = {token: backend.token_to_id(token) for token in tokens}

    def around(text: str, kind: int) -> list[str]:
        return [f"{token}:{kind}" for token in (*tokens[:before], text, *tokens[before:])]

    backend.post_processor = TemplateProcessing(
        single=around("$A", 0), pair=[*around("$A", 0), *around("$B", 1)], special_tokens=list(ids.items())
    )


def _check_same(folder: Path, backend: Any, arguments: Mapping[str, Any]) -> None:
    """Raises InputError if tokenizer_config.json is missing and the loaded tokenizer differs from tokenizer.json.

    Without that file, transformers takes the defaults of the architecture's tokenizer, for example for lower case.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if arguments or (folder / "tokenizer_config.json").exists() or not file.exists():
        return
    stored, loaded = Tokenizer.from_file(str(file)), Tokenizer.from_str(backend.to_str())
    for tokenizer in (stored, loaded):
        tokenizer.no_padding()
        tokenizer.no_truncation()
    if stored.encode(_PROBE).ids != loaded.encode(_PROBE).ids:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: no such file, and without it the tokenizer gives other tokens than "
            "tokenizer.json; copy it again"
        )


def check_vocabulary(folder: Path) -> None:
    """Raises InputError if a model folder contains no tokenizer vocabulary."""
    if not any(path.is_file() for pattern in _VOCABULARY_FILES for path in folder.glob(pattern)):
        raise InputError(f"{folder}: no tokenizer.json and no other tokenizer vocabulary; copy the model folder again")


def check_ids(ids: np.ndarray, lengths: np.ndarray, vocabulary_size: int | None) -> None:
    """Raises InputError, naming the text, if a token id has no embedding, as for tokens added to a tokenizer later.

    Args:
        ids: Token ids of some texts, concatenated, int32 [total].
        lengths: Tokens of each text, int64 [texts].
        vocabulary_size: Rows of the model's table of embeddings; None if unknown.
    """
    if vocabulary_size is None or not len(ids) or int(ids.max()) < vocabulary_size:
        return
    place = int(np.flatnonzero(ids >= vocabulary_size)[0])
    text = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
    raise InputError(
        f"text {text} of {len(lengths)}: token id {int(ids[place])} has no embedding (the model has "
        f"{vocabulary_size}): the tokenizer has tokens that the model was not trained with"
    )


def _check_documents(folder: Path, trust_remote_code: bool) -> None:
    """Raises InputError for damaged tokenizer JSON files, and for fields that load other files or classes."""
    file = folder / "tokenizer_config.json"
    content = read_object(file)
    for name in _REFUSED:
        if content.get(name):
            raise InputError(f"{file}: {name}: {format_json(content[name])} is not supported; remove it")
    _check_tokens(content, file)
    for source, settings in ((file, content), (folder / "config.json", read_object(folder / "config.json"))):
        kind = read_field(settings, "tokenizer_class", str, source)
        if kind is not None and not trust_remote_code and not _TOKENIZER_CLASS.fullmatch(kind):
            raise InputError(f"{source}: tokenizer_class: {format_json(kind)} is no tokenizer of transformers")
    for name in ("special_tokens_map.json", "added_tokens.json"):
        _check_tokens(read_object(folder / name), folder / name)


def _check_tokens(content: Mapping[str, Any], file: Path) -> None:
    """Raises InputError for an empty token for unknown words, with which tokenizers fail."""
    value = content.get("unk_token")
    if (value.get("content") if isinstance(value, dict) else value) == "":
        raise InputError(f"{file}: unk_token: expected a token, got an empty text; remove it")
