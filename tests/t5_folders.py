"""Tiny random T5 encoders with a Unigram tokenizer, also in the layout of the published gtr-t5 folders.

Other modules import this one before torch, so each function imports torch and transformers itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny import WORDS

LENGTH = 40  # tokens of a text in the gtr-t5 layout
_SHAPE = {"d_kv": 8, "d_ff": 64, "num_heads": 4, "dropout_rate": 0.1}


def sample_texts() -> list[str]:
    """Returns texts of the words of `tiny`, w0 to w511 included, on which a tokenizer can be trained."""
    numbers = [" ".join(f"w{number}" for number in range(start, start + 16)) for start in range(0, 512, 16)]
    return [" ".join(WORDS[place:] + WORDS[:place]) for place in range(len(WORDS))] + numbers


def save_unigram_tokenizer(folder: Path, texts: Iterable[str] | None = None, *, pieces: int = 120) -> int:
    """Trains a Unigram tokenizer and saves it as T5's: <pad> 0, </s> 1, <unk> 2, and </s> after each text.

    The pieces can differ between two calls with the same texts.

    Args:
        folder: The folder to write to.
        texts: Texts to train on; None: `sample_texts`.
        pieces: Number of pieces, at most.

    Returns:
        The size of the vocabulary.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=pieces, special_tokens=special, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(sample_texts() if texts is None else texts, trainer)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    tokenizer = T5Tokenizer(vocab=[(piece, score) for piece, score in vocabulary], extra_ids=0)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return len(vocabulary)


def save_t5(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    decoder: bool = False,
    texts: Iterable[str] | None = None,
    **config: Any,
) -> Path:
    """Saves a random T5 encoder with a tokenizer of `save_unigram_tokenizer`.

    Args:
        folder: The folder to write to.
        seed: Seed of the weights.
        hidden: Hidden size.
        layers: Number of layers.
        decoder: Save both halves of T5.
        texts: Texts on which the tokenizer is trained; None: `sample_texts`.
        **config: Further values of the configuration.

    Returns:
        The folder.
    """
    import torch
    from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

    size = save_unigram_tokenizer(folder, texts)
    shape = T5Config(**{**_SHAPE, "d_model": hidden, "num_layers": layers, "vocab_size": size, **config})
    torch.manual_seed(seed)
    model = (T5ForConditionalGeneration if decoder else T5EncoderModel)(shape)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "layer_norm" in name:  # new ones are 1, which would hide a norm that is left out
                tensor.uniform_(0.5, 1.5)
            if "relative_attention_bias" in name:
                tensor.normal_(std=1.0)
    model.save_pretrained(folder)
    return folder


def save_gtr(folder: Path, *, size: int = 48, seed: int = 0, hidden: int = 32, **config: Any) -> Path:
    """Saves a random model with the files of sentence-transformers/gtr-t5-base.

    Its weights, and those of its projection, are pickled, as the published ones are.

    Args:
        folder: The folder to write to.
        size: Numbers of a vector.
        seed: Seed of the weights.
        hidden: Hidden size.
        **config: Further values of T5's configuration.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import load_file

    save_t5(folder, seed=seed, hidden=hidden, **config)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    dense = {
        "in_features": hidden,
        "out_features": size,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    pooling = {"cls_token": False, "mean_tokens": True, "max_tokens": False, "mean_sqrt_len_tokens": False}
    documents: dict[str, Any] = {
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(
                [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
            )
        ],
        "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "2.2.0", "transformers": "4.7.0", "pytorch": "1.9.0+cu102"}
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden,
            **{f"pooling_mode_{mode}": value for mode, value in pooling.items()},
        },
        "2_Dense/config.json": dense,
    }
    for name, document in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document))
    torch.manual_seed(seed + 1)
    torch.save({"linear.weight": torch.randn(size, hidden) / hidden**0.5}, folder / "2_Dense" / "pytorch_model.bin")
    (folder / "3_Normalize").mkdir()
    return folder
