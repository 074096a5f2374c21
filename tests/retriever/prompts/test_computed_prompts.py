"""Prompts that are computed from queries: saved, mixed with fixed ones in an encoder, refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from synthesisers import SHAPE, random_synthesis
from tiny import add_masked_head

from riptide.base.errors import InputError, TextsError
from riptide.retriever.encoding import encoder_tasks as tasks_module
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.encoding.sparse_encoder import SparseEncoder
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.prompts.prompt_table import PromptSnapshot, task_config
from riptide.retriever.prompts.synthesiser import KeptSynthesiser, max_embedding
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of, load_prompt

Tiny = Callable[..., Path]
Words = Callable[[np.ndarray], torch.Tensor]
FLOAT32 = EncoderOptions(dtype="float32", compile="never")
KINDS = {"bert": FLOAT32, "t5": FLOAT32, "roberta": replace(FLOAT32, pooling="cls")}


def computed(encoder: Encoder, **changes: Any) -> TaskPrompt:
    return TaskPrompt(backbone_of(encoder.config), encoder.options, None, None, synthesis=random_synthesis(**changes))


def fixed(encoder: Encoder, length: int) -> TaskPrompt:
    generator = torch.Generator().manual_seed(length)
    matrix = torch.randn(SHAPE.layers, 2, SHAPE.heads, length, SHAPE.head_dim, generator=generator)
    return TaskPrompt(backbone_of(encoder.config), encoder.options, matrix, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_texts_on_their_own(tiny: Tiny, texts: list[str], kind: str) -> None:
    texts = texts[:40]  # the others have no words
    encoder = Encoder(str(tiny(kind)), KINDS[kind], tasks={})
    encoder.put_task("before", computed(encoder))
    encoder.put_task("after", computed(encoder, mix="after", length=9, seed=1))
    encoder.put_task("fixed", fixed(encoder, 6))
    encoder.put_task("short", fixed(encoder, 1))
    names = ["before", "after", "fixed", None, "short"]
    tasks = [names[row % 5] for row in range(len(texts))]
    mixed = encoder.encode(texts, task=tasks)
    for name in names:
        rows = [row for row, task in enumerate(tasks) if task == name]
        single = encoder.encode([texts[row] for row in rows], task=name)
        np.testing.assert_allclose(mixed[rows], single, atol=1e-5, rtol=1e-5)
    plain = encoder.encode(texts)
    assert (np.abs(plain - mixed).max(1)[[task is not None for task in tasks]] > 1e-4).all()
    np.testing.assert_array_equal(
        encoder.encode(texts, side="passage", task="before"), encoder.encode(texts, side="passage")
    )
    encoder.drop_task("after")
    np.testing.assert_allclose(encoder.encode(texts[:1], task="before"), mixed[:1], atol=1e-5, rtol=1e-5)


def test_it_is_the_prompt_of_the_trained_module(tiny: Tiny, texts: list[str]) -> None:
    """Against the module and the backbone called with one text; special tokens are no words."""
    texts = texts[:40]
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    prompt = computed(encoder)
    encoder.put_task("task", prompt)
    vectors = encoder.encode(texts, task="task")
    assert prompt.synthesis is not None
    module, backbone = prompt.synthesis.open(SHAPE), encoder._eager.backbone
    assert enable_prompts(backbone) == SHAPE
    for row, text in enumerate(texts):
        tokens = encoder.tokenize([text], side="query")
        ids = torch.from_numpy(tokens.ids.astype(np.int64))[None]
        embeddings = backbone.get_input_embeddings()(ids)
        rows, _ = module(max_embedding(embeddings, torch.from_numpy(encoder._tokenizer.are_words(tokens.ids))[None]))
        with torch.no_grad():
            vector = encoder._head(encoder._eager(ids, torch.tensor([ids.shape[1]]), rows))
        np.testing.assert_allclose(vectors[row], vector[0].numpy(), atol=1e-5, rtol=1e-5)


def test_it_is_saved_and_opened(tiny: Tiny, tmp_path: Path) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    prompt = computed(encoder, mix="after")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prompt.save(tmp_path / name)
    for file in ("prompt.json", "prompt.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    loaded = load_prompt(tmp_path / "one")
    assert loaded.synthesis is not None
    assert prompt.synthesis is not None
    assert loaded.synthesis.options == prompt.synthesis.options
    assert all(torch.equal(loaded.synthesis.tensors[name], tensor) for name, tensor in prompt.synthesis.tensors.items())
    assert task_config(encoder.config, loaded, "query") == task_config(encoder.config, prompt, "query")
    assert task_config(encoder.config, loaded, "query") != task_config(encoder.config, computed(encoder), "query")
    assert task_config(encoder.config, loaded, "passage") == encoder.config


def test_a_query_without_a_known_word_is_refused(tiny: Tiny, texts: list[str]) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    encoder.put_task("task", computed(encoder))
    queries = [texts[0], "", texts[1]]
    with pytest.raises(TextsError, match=r"^text 1 of 3 has no word that the backbone knows") as raised:
        encoder.encode(queries, task="task")
    assert [*raised.value.reasons] == [1]
    assert raised.value.reasons[1].startswith("the text has no word that the backbone knows")
    tokens = encoder.tokenize(queries, side="query")
    assert [*encoder.unusable_texts(tokens, task="task")] == [1]
    assert encoder.unusable_texts(tokens, task=["task", None, "task"]) == {}
    assert encoder.unusable_texts(tokens) == {}
    vectors = encoder.forward(encoder.tokenize(queries, side="query"), task="task", check=False)
    assert np.isfinite(vectors).all(axis=1).tolist() == [True, False, True]
    assert np.isfinite(encoder.encode(queries, task=["task", None, "task"])).all()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompts": 4}, r"synthesis.basic is torch.float32 \(3, 4, 32\), expected float32 \(4, 4, 32\)"),
        ({"prompts": 0}, r"prompt\.json: synthesis.prompts 0: expected at least 1"),
        ({"hidden": 0}, "synthesis.hidden 0: expected at least 1"),
        ({"temperature": 0.0}, "synthesis.temperature 0.0: expected more than 0"),
        ({"temperature": 1e9}, "synthesis.temperature 1000000000.0: expected at most 1,000,000"),
        ({"mix": "between"}, "synthesis.mix 'between': expected one of before, after"),
        ({"length": "long"}, "synthesis.length: expected int, got"),
        ({"other": 1}, "synthesis.other: unknown field; expected prompts, bottleneck"),
    ],
)
def test_damaged_settings_are_refused(tiny: Tiny, tmp_path: Path, change: dict[str, object], expected: str) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32)
    computed(encoder).save(tmp_path)
    file = tmp_path / "prompt.json"
    settings = json.loads(file.read_text())
    settings["synthesis"] |= change
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=expected):
        load_prompt(tmp_path)


def test_a_synthesiser_of_another_backbone_is_refused(tiny: Tiny) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    wrong = computed(encoder, shape=PromptShape(3, 4, 8))
    with pytest.raises(
        InputError, match=r"^the prompt of a query has 192 numbers per token, expected those of a backbone of 2 layers"
    ):
        encoder.put_task("task", wrong)


def test_a_synthesiser_of_other_word_embeddings_is_refused(tiny: Tiny) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    wrong = computed(encoder, width=64)
    with pytest.raises(
        InputError, match=r"computed from word embeddings of 64 numbers, expected 32 as the backbone's have$"
    ):
        encoder.put_task("task", wrong)


@pytest.mark.parametrize("mix", ["before", "after"])
def test_what_does_not_fit_into_memory_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, mix: str) -> None:
    encoder = Encoder(str(tiny("bert")), FLOAT32, tasks={})
    prompt = computed(encoder, mix=mix)
    assert prompt.synthesis is not None
    network = KeptSynthesiser(prompt.synthesis.open(SHAPE), encoder.dtype, encoder.device)
    tensors = [network._keys, network._bank, network._up, *network._network.parameters()]
    kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    assert kept_bytes == 4 * prompt.synthesis.count_kept_numbers()
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 2 * kept_bytes - 1)
    with pytest.raises(InputError, match=r"^the synthesiser of the prompts takes 0\.0 GiB, expected up to the 0\.0"):
        encoder.put_task("task", prompt)
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 2 * kept_bytes)
    encoder.put_task("task", prompt)
    # The synthesiser fits, and so does the prompt of passages, but not both of them.
    passage = torch.zeros((SHAPE.layers, 2, SHAPE.heads, 64, SHAPE.head_dim))
    both = replace(prompt, passage=passage)
    size = encoder._tasks.tables["passage"].bytes_needed(64)
    monkeypatch.setattr(
        "riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 2 * kept_bytes + size - 1
    )
    with pytest.raises(InputError, match=r"^with a prompt of 64 tokens the table of all prompts takes"):
        encoder.put_task("both", both)
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 2 * kept_bytes + size)
    encoder.put_task("both", both)


@pytest.mark.parametrize("kind", ["bert", "t5"])  # packed and padded
def test_a_batch_whose_prompts_take_much_memory_is_cut(
    tiny: Tiny, texts: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    texts = texts[:40]
    encoder = Encoder(str(tiny(kind)), KINDS[kind], tasks={})
    encoder.put_task("computed", computed(encoder, mix="after"))
    encoder.put_task("fixed", fixed(encoder, 6))
    tasks = ["computed", "fixed", None, "computed"] * 10
    whole = encoder.encode(texts, task=tasks)
    sizes: list[int] = []
    original = PromptSnapshot.rows

    def rows(prompts: PromptSnapshot, slots: np.ndarray, words: Words) -> PromptRows | None:
        sizes.append(len(slots))
        return original(prompts, slots, words)

    monkeypatch.setattr(PromptSnapshot, "rows", rows)
    bytes_per_token = 4 * 2 * SHAPE.layers * SHAPE.heads * SHAPE.head_dim
    monkeypatch.setitem(tasks_module._COMPUTED_BYTES, "cpu", 5 * 6 * bytes_per_token)
    np.testing.assert_allclose(encoder.encode(texts, task=tasks), whole, atol=1e-5, rtol=1e-5)
    assert max(sizes) <= 7  # 5 of the longest prompt, 7 where all are computed
    sizes.clear()
    encoder.encode(texts, task="fixed")
    assert max(sizes) > 7


def test_a_sparse_encoder_names_the_texts_without_words(tiny: Tiny, texts: list[str]) -> None:
    options = replace(FLOAT32, pooling="splade")
    encoder = SparseEncoder(str(add_masked_head(tiny("bert"))), options, tasks={})
    encoder.put_task("task", computed(encoder.dense))
    dense = encoder.dense.encode(texts[:3], task="task")
    np.testing.assert_allclose(encoder.encode(texts[:3], task="task").dense(), dense, atol=1e-6)
    with pytest.raises(TextsError, match=r"^text 1 of 3 has no word that the backbone knows") as raised:
        encoder.encode([texts[0], " ", ""], task="task")
    assert [*raised.value.reasons] == [1, 2]


@pytest.mark.long
def test_the_model_is_compiled_when_the_first_task_is_added(tiny: Tiny, texts: list[str]) -> None:
    """Further tasks, batches and lengths need no compilation."""
    options = replace(FLOAT32, compile="always", dtype="bfloat16", normalize=True, query_length=20)
    folder = str(tiny("bert"))
    encoder = Encoder(folder, options, tasks={})
    exact = Encoder(folder, replace(options, compile="never", dtype="float32"), tasks={})
    texts = texts[:12]
    for one in (encoder, exact):
        one.put_task("before", computed(one))
        one.put_task("later", replace(fixed(one, 7), position_offset=True))
    with torch._dynamo.config.patch(error_on_recompile=True):  # type: ignore[attr-defined]
        for one in (encoder, exact):
            one.put_task("after", computed(one, mix="after", length=9, seed=1))
            one.put_task("fixed", fixed(one, 11))
        for names in (["before"], ["after", "fixed"], ["before", "later", None], ["before", "after", "fixed", "later"]):
            tasks = [names[row % len(names)] for row in range(len(texts))]
            for count in (1, 2, 12):
                vectors = encoder.encode(texts[:count], task=tasks[:count])
                assert ((vectors * exact.encode(texts[:count], task=tasks[:count])).sum(1) > 0.998).all()
