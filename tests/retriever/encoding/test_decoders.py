"""Decoder embedders in their published layouts: vectors, end tokens, and deep prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoder_folders import INSTRUCTION, LENGTH, save_e5_mistral, save_qwen3_embedding
from sentence_transformers import SentenceTransformer
from training_cases import CPU, gradients, make_data
from transformers import DynamicCache

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.encoding.saving import save_encoder
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.model.weights import load_model
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer

FLOAT32 = EncoderOptions(dtype="float32", compile="never")
KINDS: dict[str, Callable[..., Path]] = {"qwen3": save_qwen3_embedding, "mistral": save_e5_mistral}
ENDS = {"qwen3": "<|endoftext|>", "mistral": "</s>"}
# The published tokenizer.json of E5-Mistral adds no end token, and transformers 5 does not obey add_eos_token in
# tokenizer_config.json. With these arguments it adds both tokens, as transformers 4 did without them.
PEER: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"processor_kwargs": {"add_bos_token": True, "add_eos_token": True}},
}
TEXTS = [
    "the in",
    "",
    "hello world , another one",
    "x",
    "\u00e9 \u6f22\u5b57 \U0001f600",
    "on and on " * 60,
    "then the error " * 6,
]
SIDES = ["padded left", "side not named"]


def save(folder: Path, kind: str, side: str = "side not named", **options: Any) -> Path:
    return KINDS[kind](folder, **({"padding_side": "left"} if side == "padded left" else {}), **options)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_layout_gives_the_vectors_of_sentence_transformers(tmp_path: Path, kind: str, side: str) -> None:
    folder = save(tmp_path / kind, kind, side)
    peer = SentenceTransformer(str(folder), device="cpu", **PEER[kind])
    settings = describe(folder)
    query = peer.prompts["query"]
    assert query.startswith(INSTRUCTION)
    assert {name: settings[name] for name in ("pooling", "head", "query_prefix", "passage_prefix")} == {
        "pooling": "last",
        "head": ["normalize"],
        "query_prefix": query,
        "passage_prefix": peer.prompts["document"],
    }
    assert (settings["query_length"], settings["passage_length"]) == (LENGTH, LENGTH) == (peer.max_seq_length,) * 2
    assert settings["padding_side"] == peer.tokenizer.padding_side == ("left" if side == "padded left" else "right")

    encoder = Encoder(str(folder), FLOAT32)
    assert encoder.similarity == "cosine"
    end, lengths = peer.tokenizer.convert_tokens_to_ids(ENDS[kind]), set()
    for name, prefix, encode in (("query", query, peer.encode_query), ("passage", "", peer.encode_document)):
        tokens = encoder.tokenize(TEXTS, side=name)  # type: ignore[arg-type]
        for text, start, length in zip(TEXTS, tokens.starts, tokens.lengths, strict=True):
            ids = tokens.ids[start : start + length].tolist()
            assert ids == peer.tokenizer(prefix + text, truncation=True)["input_ids"]
            assert ids[-1] == end  # also of a text that was cut
            lengths.add(length)
        together = encoder.encode(TEXTS, side=name)  # type: ignore[arg-type]
        np.testing.assert_allclose(together, encode(TEXTS), atol=1e-5)
        for row, text in enumerate(TEXTS):
            found = encoder.encode([text], side=name)  # type: ignore[arg-type]
            np.testing.assert_allclose(found, encode([text]), atol=1e-5)
            np.testing.assert_allclose(found[0], together[row], atol=1e-5)
    assert len(lengths) > 5
    assert max(lengths) == LENGTH
    difference = encoder.encode(TEXTS[:1]) - encoder.encode(TEXTS[:1], side="passage")
    assert np.abs(difference).max() > 1e-2


def test_an_end_token_that_the_tokenizer_adds_is_not_added_twice(tmp_path: Path) -> None:
    """The option asks for what the folder says already; the settings of both are the same."""
    folder = save(tmp_path / "mistral", "mistral")
    plain, explicit = Encoder(str(folder), FLOAT32), Encoder(str(folder), replace(FLOAT32, append_eos=True))
    assert plain.config == explicit.config
    assert plain.config["append_eos"] is True
    assert explicit.tokenize(["the"], side="passage").ids.tolist().count(2) == 1
    off = save(tmp_path / "off", "mistral", add_eos_token=False)
    assert describe(off)["append_eos"] is False
    assert 2 not in Encoder(str(off), FLOAT32).tokenize(["the"], side="passage").ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_decoder_ends_texts_in_every_library(tmp_path: Path, kind: str) -> None:
    """A trained encoder is saved with a tokenizer that adds the end token by itself."""
    folder, saved = save(tmp_path / kind, kind), tmp_path / "saved"
    recipe = read_recipe(folder, FLOAT32)
    model, _ = load_model(transformers.AutoModel, folder, dtype=torch.float32)
    save_encoder(saved, recipe, model)
    expected = Encoder(str(folder), FLOAT32)
    found, peer = Encoder(str(saved), FLOAT32), SentenceTransformer(str(saved), device="cpu")
    for side, encode in (("query", peer.encode_query), ("passage", peer.encode_document)):
        vectors = expected.encode(TEXTS, side=side)  # type: ignore[arg-type]
        np.testing.assert_allclose(found.encode(TEXTS, side=side), vectors, atol=1e-5)  # type: ignore[arg-type]
        np.testing.assert_allclose(encode(TEXTS), vectors, atol=1e-5)


def test_bad_folders_are_one_line(tmp_path: Path, documented: Callable[..., None]) -> None:
    folder = save(tmp_path / "mistral", "mistral", eos_token=None)
    with pytest.raises(InputError) as error:
        Encoder(str(folder), FLOAT32)
    documented("Models", "a tokenizer that is to end texts (add_eos_token) and has no end token", str(error.value), 1)

    pooling = folder / "1_Pooling" / "config.json"
    for content, case in (
        ({"pooling_mode": "weightedmean"}, "a pooling mode that is not supported"),
        ({"pooling_mode": "lastword"}, "an unknown pooling mode"),
        ({"pooling_mode_last_token": True}, "an unknown pooling mode in a separate field"),
    ):
        pooling.write_text(json.dumps({"word_embedding_dimension": 32, **content}))
        with pytest.raises(InputError) as error:
            describe(folder)
        assert "\n" not in str(error.value)
        documented("Models", case, str(error.value), 1)


def test_prompts_under_other_names_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """E5-Mistral's folder has an instruction for each of its tasks, and none for queries in general."""
    prompts = {"web_search_query": f"{INSTRUCTION} ", "sts_query": "Instruct: Retrieve similar text.\nQuery: "}
    folder = save(tmp_path / "mistral", "mistral", prompts=prompts)
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(str(folder), FLOAT32)
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("riptide.retriever")]
    assert "prompts web_search_query, sts_query" in message
    assert "query_prefix" in message
    caplog.clear()
    peer = SentenceTransformer(str(folder), device="cpu", **PEER["mistral"])
    np.testing.assert_allclose(encoder.encode(TEXTS), peer.encode_query(TEXTS), atol=1e-5)
    with caplog.at_level(logging.WARNING):
        prefixed = Encoder(str(folder), replace(FLOAT32, query_prefix=prompts["web_search_query"]))
        Encoder(str(save(tmp_path / "qwen3", "qwen3")), FLOAT32)
    assert not [record for record in caplog.records if record.name.startswith("riptide.retriever")]
    expected = peer.encode(TEXTS, prompt_name="web_search_query")
    np.testing.assert_allclose(prefixed.encode(TEXTS), expected, atol=1e-5)


def slow_vector(folder: Path, ids: np.ndarray, matrix: torch.Tensor | None, offset: int, window: int | None) -> Any:
    """Returns a text's vector from transformers' own forward pass in float64 over a cache of keys and values.

    The mask is explicit: each token attends to the whole prompt, and to at most `window` tokens up to itself.
    """
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    length, cache, past = len(ids), DynamicCache(), 0
    if matrix is not None:
        past = matrix.shape[3]
        for layer, (key, value) in enumerate(matrix.double()):
            cache.update(key[None], value[None], layer)
    ahead = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen = (ahead >= 0) & (ahead < (window or length))
    seen = torch.cat([torch.ones(length, past, dtype=torch.bool), seen], dim=1)[None, None]
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    with torch.no_grad():
        hidden = model.eval()(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            attention_mask=mask,
            position_ids=offset + torch.arange(length)[None],
            past_key_values=cache,
        ).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden, dim=0).numpy()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("kind", "window"), [("qwen3", None), ("mistral", 64), ("mistral", 5)])
def test_prompts_over_a_decoder_equal_a_slow_forward_pass(
    tmp_path: Path, kind: str, window: int | None, side: str
) -> None:
    """A batch mixes texts without a prompt, and prompts of several lengths with and without a position offset."""
    folder = save(tmp_path / kind, kind, side, **({} if window is None else {"window": window}))
    options = replace(FLOAT32, query_prefix="", query_length=60)
    encoder = Encoder(str(folder), options, tasks={})
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randn(2, 2, 2, length, 8, generator=generator) for length in (6, 21))
    matrices = {"usual": short, "later": short, "much later": long}
    for name, matrix in matrices.items():
        prompt = TaskPrompt(backbone_of(encoder.config), options, matrix, None, position_offset="later" in name)
        encoder.put_task(name, prompt)
    names = ["later", None, "usual", "much later"]
    texts = [*TEXTS, *TEXTS[:2]]
    tasks = [names[row % 4] for row in range(len(texts))]
    tokens = encoder.tokenize(texts, side="query")
    mixed = encoder.encode(texts, task=tasks)
    single = {name: encoder.encode(texts, task=name) for name in matrices}
    for row, task in enumerate(tasks):
        ids = tokens.ids[tokens.starts[row] :][: tokens.lengths[row]]
        expected = {
            name: slow_vector(folder, ids, matrices.get(name or ""), positions_before(name, matrices), window)
            for name in {task, "usual", "later"}
        }
        np.testing.assert_allclose(mixed[row], expected[task], atol=1e-5)
        for name in ("usual", "later"):
            np.testing.assert_allclose(single[name][row], expected[name], atol=1e-5)
    assert np.abs(single["later"] - single["usual"]).max() > 1e-2


def positions_before(name: str | None, matrices: dict[str, torch.Tensor]) -> int:
    """The positions before a text: as many as the prompt has tokens, if the task has an offset."""
    return matrices[name].shape[3] if name is not None and "later" in name else 0


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_a_prompt_over_a_decoder(tmp_path: Path, kind: str, offset: bool) -> None:
    """Gradients are finite and belong to the prompt alone; the saved prompt gives the vectors of training."""
    folder = save(tmp_path / kind, kind, "padded left")
    options = replace(FLOAT32, query_prefix="", query_length=24, passage_length=32)
    tuning = TuneOptions(
        length=4, batch=6, negatives_per_query=1, sides="untied", position_offset=offset, prompt_dropout=0.0
    )
    system = DualEncoderSystem(folder, options, tuning, make_data(12), device=CPU, dtype=torch.float32)
    frozen = {name: value.clone() for name, value in system.pooled.state_dict().items()}
    result = gradients(system)
    loss = result.pop("loss")
    assert np.isfinite(loss)
    assert sorted(result) == ["prompts.passage.embedding", "prompts.query.embedding"]
    for value in result.values():
        assert bool(torch.isfinite(value).all())
        assert bool((value.abs().amax(dim=1) > 0).all())  # of each of the prompt's tokens
    trainer = Trainer(system, LoopOptions(steps=2, lr=1e-2, warm_up=0.0), device=CPU, dtype=torch.float32)
    trainer.step(0)
    assert all(torch.equal(value, frozen[name]) for name, value in system.pooled.state_dict().items())
    prompt = system.prompt()
    encoder = Encoder(str(folder), options, tasks={"task": prompt})
    plain = encoder.encode(TEXTS)
    for side in ("query", "passage"):
        found = encoder.encode(TEXTS, side=side, task="task")  # type: ignore[arg-type]
        np.testing.assert_allclose(found, system.encode(TEXTS, side), atol=1e-5)  # type: ignore[arg-type]
    assert np.abs(encoder.encode(TEXTS, task="task") - plain).max() > 1e-3
