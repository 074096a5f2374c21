"""A damaged model folder ends encode_corpus with one line, and leaves the store as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from samples import files_of, save_tiny_bert, write_beir

Refused = Callable[..., str]
Damage = Callable[[Path], object]
NUMERICS = ("--dtype", "float32", "--compile", "never")


def configured(name: str, **changes: object) -> Damage:
    """Changes fields of a JSON file of the folder."""

    def damage(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | changes))

    return damage


def without(part: str) -> Damage:
    """Leaves the tensors out whose names contain `part`."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if part not in name}
        save_file(kept, file, metadata={"format": "pt"})

    return damage


def cut(name: str, size: int) -> Damage:
    """Cuts a file to its first bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def special_tokens_only(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {token: number for token, number in content["model"]["vocab"].items() if number < 5}
    file.write_text(json.dumps(content))


def passes_kernels_on(folder: Path) -> None:
    """Makes the folder a sentence-transformers model whose settings name a kernel of the hub."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    arguments = {"allow_all_kernels": True, "attn_implementation": "evil/kernel"}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"config_args": arguments}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "config.json with num_hidden_layers -1": (configured("config.json", num_hidden_layers=-1), "got -1"),
    'config.json with hidden_size "abc"': (configured("config.json", hidden_size="abc"), "got str (value: 'abc')"),
    "config.json that is cut": (cut("config.json", 40), "not JSON"),
    "config.json that names a kernel of the hub": (
        configured("config.json", _attn_implementation="evil/kernel"),
        "is not supported",
    ),
    "model.safetensors that is cut": (cut("model.safetensors", 2000), "cannot be loaded"),
    "an empty model.safetensors": (cut("model.safetensors", 0), "cannot be loaded"),
    "a model folder without a tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "a tokenizer with special tokens only": (special_tokens_only, "special tokens only"),
    "modules.json with a path that leaves the folder": (
        lambda folder: (folder / "modules.json").write_text(
            '[{"type": "sentence_transformers.models.Transformer", "path": "../.."}]'
        ),
        "leaves the model folder",
    ),
    "sentence_bert_config.json with an argument that loads code": (passes_kernels_on, "allow_all_kernels"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_model_leaves_the_store_as_it_was(
    world, refused: Refused, documented: Callable[..., None], tmp_path: Path, case: str
) -> None:
    folder = Path(save_tiny_bert(tmp_path / "model"))
    damage, message = DAMAGES[case]
    damage(folder)
    before = files_of(world.store)
    line = refused("encode_corpus", "--store", world.store, "--encoder", folder, "--name", "new", *NUMERICS)
    assert message in line
    assert str(folder) in line
    assert files_of(world.store) == before
    documented("Models", case, line, 1)


def test_the_refused_command_is_corrected_and_repeated(
    world, refused: Refused, done: Callable[..., str], documented: Callable[..., None], tmp_path: Path
) -> None:
    """Weights that are incomplete are found by a worker, after the embeddings were begun."""
    folder = Path(save_tiny_bert(tmp_path / "model"))
    whole, before = (folder / "model.safetensors").read_bytes(), files_of(world.store)
    command = ("encode_corpus", "--store", world.store, "--encoder", folder, "--name", "new", *NUMERICS)
    without("layer.1.")(folder)
    line = refused(*command)
    assert "the weights lack encoder.layer.1." in line
    assert files_of(world.store) == before
    documented("Models", "a model folder whose weights lack a layer", line, 1)
    (folder / "model.safetensors").write_bytes(whole)
    configured("config.json", num_hidden_layers=1)(folder)
    line = refused(*command)
    assert files_of(world.store) == before
    documented("Models", "config.json with fewer layers than the weights", line, 1)
    configured("config.json", num_hidden_layers=2)(folder)
    assert "embeddings/new/g0000: 240 vectors of 32" in done(*command)


def test_a_corpus_that_the_tokenizer_does_not_know(
    refused: Refused, done, documented: Callable[..., None], tmp_path: Path
) -> None:
    """The vectors are those of the encoder where they are allowed, and the option enters no fingerprint."""
    from riptide.indexing.corpus.corpus import Corpus
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.store.store import Store
    from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

    model = save_tiny_bert(tmp_path / "model")
    texts = ["漢字 汉字 かな bafa", "한국어 кириллица", "ελληνικά"]
    source = write_beir(tmp_path / "source", [{"_id": str(n), "text": text} for n, text in enumerate(texts)])
    store = tmp_path / "store"
    done("import_corpus", "--store", store, "--source", source)
    before = files_of(store)
    command = ("encode_corpus", "--store", store, "--encoder", model, "--name", "new", *NUMERICS)
    line = refused(*command)
    assert "8 of 12 tokens (67%)" in line
    assert files_of(store) == before
    documented("Models", "a corpus of which the tokenizer knows less than half of the tokens", line, 1)
    done(*command, "--allow-unknown-tokens")
    made = Embeddings.open(Store(str(store)), "new", Corpus.open(Store(str(store))))
    expected = Encoder(model, EncoderOptions(dtype="float32", compile="never")).encode(texts, side="passage")
    np.testing.assert_array_equal(made.vectors(made.parts[0]), expected.astype(np.float16))
    assert "unknown" not in json.dumps(made.config)
    assert "3 vectors of 32" in done(*command)  # found complete without the option
