"""Prompts of tasks in an encoder: batches of many tasks equal batches of one, and nothing else changes a vector."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from riptide.base.errors import InputError
from riptide.jobs.common.starting import COMMAND_LINE
from riptide.retriever.encoding.backbones import load_backbone
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward import packing
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.prompts.deep_prompt import MatrixPrompt
from riptide.retriever.prompts.prompt_table import PromptTable, task_config
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of, check_initial_prompt, load_prompt

Tiny = Callable[..., Path]
FLOAT32 = EncoderOptions(dtype="float32", compile="never")
KINDS = {
    "bert": (PromptShape(2, 4, 8), {}, FLOAT32),
    "roberta": (PromptShape(2, 4, 8), {}, replace(FLOAT32, pooling="cls")),
    "t5": (PromptShape(2, 4, 8), {}, FLOAT32),
    "qwen3": (PromptShape(2, 2, 8), {"padding_side": "left"}, replace(FLOAT32, pooling="last")),
}


def matrix(shape: PromptShape, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randn(shape.layers, 2, shape.heads, length, shape.head_dim, generator=generator)


def open_encoder(tiny: Tiny, kind: str = "bert") -> tuple[Encoder, Callable[..., TaskPrompt]]:
    """An encoder without a task yet, and prompts for it: prompt(query=length, passage=length, seed=0)."""
    shape, tokenizer, options = KINDS[kind]
    encoder = Encoder(str(tiny(kind, **tokenizer)), options, tasks={})

    def prompt(query: int | None, passage: int | None = None, seed: int = 0) -> TaskPrompt:
        sides = [None if length is None else matrix(shape, length, seed) for length in (query, passage)]
        return TaskPrompt(backbone_of(encoder.config), options, *sides)

    return encoder, prompt


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_texts_on_their_own(tiny: Tiny, texts: list[str], kind: str) -> None:
    """Against the backbone called with one text, unpadded, and with one task's matrix as it was put in."""
    encoder, prompt = open_encoder(tiny, kind)
    plain = Encoder(str(encoder._recipe.folder), encoder.options)
    np.testing.assert_allclose(encoder.encode(texts), plain.encode(texts), atol=1e-6)
    lengths = {"one": 1, "short": 3, "long": 9}
    prompts = {name: prompt(length, 2 * length) for name, length in lengths.items()}
    for name, one in prompts.items():
        encoder.put_task(name, one)
    encoder.put_task("passages only", prompt(None, 4))
    assert encoder.tasks == ("long", "one", "passages only", "short")
    names = ["short", None, "long", "one", "passages only"]
    tasks = [names[row % len(names)] for row in range(len(texts))]
    mixed = encoder.encode(texts, task=tasks)

    shape, backbone = KINDS[kind][0], load_backbone(encoder._recipe, torch.float32).eval()
    assert enable_prompts(backbone) == shape
    tokens = encoder.tokenize(texts, side="query")
    pooling = encoder._recipe.pooling
    for row, task in enumerate(tasks):
        ids = torch.from_numpy(tokens.ids[tokens.starts[row] :][: tokens.lengths[row]].astype(np.int64))[None]
        own = prompts[task].query if task in prompts else None
        extra = {} if own is None else {"prompt": PromptRows(own[:, :, None])}
        with torch.no_grad():
            hidden = backbone(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).last_hidden_state[0]
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        np.testing.assert_allclose(mixed[row], expected.numpy(), atol=1e-5, rtol=1e-5)
    for task in prompts:
        single = encoder.encode(texts, task=task)
        at = [row for row, name in enumerate(tasks) if name == task]
        np.testing.assert_allclose(mixed[at], single[at], atol=1e-5, rtol=1e-5)
        assert np.abs(single - plain.encode(texts)).max() > 1e-3
        assert np.abs(single - encoder.encode(texts, side="passage", task=task)).max() > 1e-3
    assert encoder.encode(texts, task="passages only").tobytes() == encoder.encode(texts).tobytes()


def test_neither_batch_mates_nor_padding_change_a_vector(tiny: Tiny, texts: list[str]) -> None:
    encoder, prompt = open_encoder(tiny)
    encoder.put_task("short", prompt(3))
    encoder.put_task("long", prompt(40))
    alone = encoder.encode(["the river bank"], task="short")
    for mates, task in [(texts, "long"), (texts, None), (["a"], "long"), (["bank " * 60], None)]:
        found = encoder.encode([*mates, "the river bank"], task=[*([task] * len(mates)), "short"])
        np.testing.assert_allclose(found[-1:], alone, atol=1e-5, rtol=1e-5)
    encoder.put_task("longer", prompt(60))  # the table grows
    encoder.drop_task("long")
    assert encoder.encode(["the river bank"], task="short").tobytes() == alone.tobytes()


def test_tied_prompts_and_one_replaced(tiny: Tiny, texts: list[str]) -> None:
    encoder, prompt = open_encoder(tiny)
    tied = replace(prompt(5), passage=(first := prompt(5)).query)
    encoder.put_task("tied", tied)
    found = encoder.encode(texts, task="tied")
    assert found.tobytes() == encoder.encode(texts, side="passage", task="tied").tobytes()
    encoder.put_task("tied", prompt(2))
    encoder.put_task("again", first)
    assert encoder.encode(texts, task="again").tobytes() == found.tobytes()
    assert encoder.encode(texts, side="passage", task="tied").tobytes() == encoder.encode(texts).tobytes()
    assert np.abs(encoder.encode(texts, task="tied") - found).max() > 1e-3


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("layout", ["packed", "padded right", "padded left"])
def test_texts_start_after_their_prompts(
    tiny: Tiny, texts: list[str], monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    """Against transformers' own forward pass with past_key_values, which counts positions from the end of the cache.

    A batch mixes prompts with and without an offset, of different lengths, and texts without a prompt.
    """
    options = replace(FLOAT32, pooling="cls", query_length=20)
    if layout != "packed":
        monkeypatch.setattr(packing, "load_kernel", lambda: None)
        options = replace(options, padding_side="left" if layout == "padded left" else "right")
    folder, shape = tiny(kind), KINDS[kind][0]
    encoder = Encoder(str(folder), options, tasks={})
    assert (" packed " in encoder.numerics) == (layout == "packed")
    prompts: dict[str | None, TaskPrompt] = {
        name: TaskPrompt(backbone_of(encoder.config), options, matrix(shape, length), None, name != "usual")
        for name, length in {"later": 5, "usual": 5, "much later": 21, "one": 1}.items()
    }
    for name, prompt in prompts.items():
        assert name is not None
        encoder.put_task(name, prompt)
    texts = [*texts, "[PAD] the [PAD] river"]
    names = ["later", None, "usual", "much later", "one"]
    tasks = [names[row % len(names)] for row in range(len(texts))]
    found = {task: encoder.encode(texts, task=task) for task in ("later", "one")}
    found["mixed"] = encoder.encode(texts, task=tasks)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = encoder.tokenize(texts, side="query")

    def expected(row: int, task: str | None) -> np.ndarray:
        ids = torch.from_numpy(tokens.ids[tokens.starts[row] :][: tokens.lengths[row]].astype(np.int64))[None]
        own = None if task is None else prompts[task]
        cache, past = DynamicCache(), 0
        if own is not None and own.query is not None:
            past = own.query.shape[3]
            for layer, (key, value) in enumerate(own.query):
                cache.update(key[None], value[None], layer)
        extra: dict[str, Any] = {"past_key_values": cache} if past else {}
        if task == "usual":
            padding = 0 if kind == "roberta" else -1
            counted = (ids != padding).long()
            extra["position_ids"] = counted.cumsum(1) * counted + padding
        with torch.no_grad():
            mask = torch.ones(1, past + ids.shape[1], dtype=torch.int64)
            return model(input_ids=ids, attention_mask=mask, **extra).last_hidden_state[0, 0].numpy()

    for row, task in enumerate(tasks):
        np.testing.assert_allclose(found["mixed"][row], expected(row, task), atol=1e-5, rtol=1e-5)
        for name in ("later", "one"):
            np.testing.assert_allclose(found[name][row], expected(row, name), atol=1e-5, rtol=1e-5)
    usual = [row for row, task in enumerate(tasks) if task == "usual"]
    assert np.abs(found["mixed"][usual] - found["later"][usual]).max() > 1e-3


def test_a_text_that_would_start_too_late_is_refused(tiny: Tiny, documented: Callable[..., None]) -> None:
    encoder, prompt = open_encoder(tiny)
    encoder.put_task("fits", replace(prompt(None), position_offset=True))
    with pytest.raises(InputError) as error:
        encoder.put_task("long", replace(prompt(3), position_offset=True))
    line = str(error.value)
    assert line == (
        "parameter position_offset: parameter query_length 61 and a prompt of 3 tokens need 64 positions, and the "
        "backbone has 61: use parameter query_length 58 or less, or a shorter prompt"
    )
    assert COMMAND_LINE.render(f"{error.value}").startswith("--position-offset: --query-length 61 and a prompt of 3")
    documented("Models", "a prompt with a position offset, and texts too long for it", f"{error.value}", 1)
    with pytest.raises(InputError, match="passage_length 61 and a prompt of 2 tokens"):
        encoder.put_task("long", replace(prompt(None, 2), position_offset=True))
    relative, other = open_encoder(tiny, "t5")
    with pytest.raises(InputError, match="position_offset: a T5EncoderModel takes no positions"):
        relative.put_task("t5", replace(other(3), position_offset=True))
    assert (encoder.tasks, relative.tasks) == (("fits",), ())


def test_scaling_of_vectors_is_not_part_of_the_backbone(tiny: Tiny) -> None:
    """Training may start from a prompt that was trained with the other scaling; an encoder does not take it."""
    encoder, prompt = open_encoder(tiny)
    scaled = Encoder(str(encoder._recipe.folder), replace(FLOAT32, normalize=True), tasks={})
    one, other = prompt(3), replace(prompt(3), backbone=backbone_of(scaled.config), options=scaled.options)
    for initial, target in ((one, scaled), (other, encoder)):
        check_initial_prompt(initial, target.config, KINDS["bert"][0])
    for wrong, target, says in (
        (one, scaled, "trained for unscaled vectors, and the encoder makes vectors of length 1"),
        (replace(one, options=scaled.options), scaled, "trained for unscaled vectors"),
        (other, encoder, "trained for vectors of length 1, and the encoder makes unscaled vectors"),
        (replace(other, options=FLOAT32), encoder, "trained for vectors of length 1"),
    ):
        with pytest.raises(InputError, match=says):
            target.put_task("squad", wrong)
    dense = {**encoder.config, "head": [{"activation": "Tanh", "size": 8, "weights": ["0"]}]}
    with pytest.raises(InputError, match=r"another backbone \(head differ\)"):
        check_initial_prompt(one, dense)


def test_unknown_tasks_and_wrong_counts_are_refused(tiny: Tiny) -> None:
    encoder, prompt = open_encoder(tiny)
    with pytest.raises(InputError, match="task 'nq': no such task; there are: none"):
        encoder.encode(["a"], task="nq")
    encoder.put_task("squad", prompt(3))
    encoder.put_task("fiqa", prompt(3))
    with pytest.raises(InputError, match="task 'nq': no such task; there are: fiqa, squad"):
        encoder.encode(["a", "b"], task=["squad", "nq"])
    with pytest.raises(InputError, match="one for each of the 2 texts, found 1"):
        encoder.encode(["a", "b"], task=["squad"])
    with pytest.raises(InputError, match="'nq'"):
        encoder.drop_task("nq")
    encoder.drop_task("squad")
    with pytest.raises(InputError, match="task 'squad'"):
        encoder.encode(["a"], task="squad")
    plain = Encoder(str(encoder._recipe.folder), FLOAT32)
    assert plain.tasks == ()
    with pytest.raises(InputError, match="opened without tasks"):
        plain.put_task("squad", prompt(3))
    for call in (partial(plain.encode, ["a"], task="squad"), partial(plain.drop_task, "squad")):
        with pytest.raises(
            InputError, match="task 'squad': the encoder was opened without tasks; open it with this one"
        ):
            call()


def test_an_encoder_with_tasks_is_freed_without_a_search_for_cycles(tiny: Tiny) -> None:
    """A server freezes its objects, so a cycle would keep the weights of an earlier release."""
    encoder, prompt = open_encoder(tiny)
    encoder.put_task("squad", prompt(3))
    encoder.encode(["a", "b"], task=["squad", None])
    weights = weakref.ref(encoder._eager)
    gc.disable()
    try:
        del encoder, prompt  # which refers to the encoder
        assert weights() is None
    finally:
        gc.enable()


def test_a_prompt_of_another_backbone_or_other_settings_is_refused(tiny: Tiny) -> None:
    encoder, prompt = open_encoder(tiny)
    other = Encoder(str(tiny("bert", name="other", seed=1)), FLOAT32, tasks={})
    with pytest.raises(InputError, match=r"another backbone \(weights differ\)"):
        other.put_task("squad", prompt(3))
    wrong = replace(prompt(3), query=matrix(PromptShape(3, 4, 8), 3))
    with pytest.raises(InputError, match="expected that of a backbone of 2 layers, 4 heads of 8"):
        encoder.put_task("squad", wrong)
    for change, says in [
        ({"pooling": "cls"}, "pooling 'cls' instead of 'mean'"),
        ({"normalize": True}, "normalize True instead of False"),
        ({"query_prefix": "query : "}, "query_prefix 'query : ' instead of ''"),
        ({"title": "sep"}, "title 'sep'"),
        ({"query_length": 20}, "query_length 20 instead of 61"),
        ({"dimension": 8}, "dimension 8 instead of None"),
        ({"append_eos": True}, "append_eos"),
        ({"padding_side": "left"}, "padding_side"),
    ]:
        differing = replace(prompt(3), options=replace(FLOAT32, **change))
        with pytest.raises(InputError, match=f"^the prompt was trained with .*{says}"):
            encoder.put_task("squad", differing)
    assert encoder.tasks == ()
    # Options that say the same in other words, and options of speed alone, are not refused.
    same = EncoderOptions(pooling="mean", query_length=61, query_prefix="", dtype="bfloat16", compile="always")
    encoder.put_task("squad", replace(prompt(3), options=same))
    with pytest.raises(InputError, match=r"^task 'squad': the prompt is for another backbone"):
        Encoder(str(other._recipe.folder), FLOAT32, tasks={"squad": prompt(3)})


def test_saved_and_opened_again(tiny: Tiny, tmp_path: Path, texts: list[str]) -> None:
    encoder, prompt = open_encoder(tiny)
    untied, tied = prompt(5, 7), prompt(6)
    tied = replace(tied, passage=tied.query)
    vectors = []
    options = replace(FLOAT32, query_length=40, passage_length=40)
    encoder = Encoder(str(encoder._recipe.folder), options, tasks={})
    offset = replace(prompt(5, 7, seed=3), position_offset=True)
    prompts = {"untied": untied, "tied": tied, "query": prompt(2), "offset": offset}
    for name, one in prompts.items():
        one = replace(one, options=options)
        folder = tmp_path / name
        folder.mkdir()
        one.save(folder)
        again = load_prompt(folder)
        assert (again.backbone, again.options) == (one.backbone, one.options)
        assert (again.passage is again.query) == (name == "tied")
        assert again.position_offset == (name == "offset")
        assert ("position_offset" in json.loads((folder / "prompt.json").read_text())) == (name == "offset")
        again.save(tmp_path)
        for file in ("prompt.json", "prompt.safetensors"):
            assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
        for side in ("query", "passage"):
            encoder.put_task(name, one)
            kept = encoder.encode(texts, side=side, task=name)
            encoder.put_task(name, again)
            assert encoder.encode(texts, side=side, task=name).tobytes() == kept.tobytes()
            vectors.append(kept.tobytes())
            assert task_config(encoder.config, one, side) == task_config(encoder.config, again, side)
    assert len(set(vectors)) == 7  # both sides of the tied one are the same


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("no settings", "prompt.json: no such file"),
        ("no weights", "prompt.safetensors: no such file"),
        ("another file", "prompt.json: backbone: missing"),
        ("cut", "sha256 is not the one"),
        ("a bit", "sha256 is not the one"),
        ("not finite", "query holds numbers that are not finite"),
        ("flat", "expected float32, float16 or bfloat16"),
        ("format", "is of format 2, this release reads 1"),
    ],
)
def test_what_is_no_prompt_is_refused(tiny: Tiny, tmp_path: Path, damage: str, says: str) -> None:
    _, prompt = open_encoder(tiny)
    prompt(5).save(tmp_path)
    settings, weights = tmp_path / "prompt.json", tmp_path / "prompt.safetensors"
    said, stored = json.loads(settings.read_text()), bytearray(weights.read_bytes())
    if damage == "no settings":
        settings.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "another file":
        settings.write_text('{"format": 1}')
    elif damage == "cut":
        weights.write_bytes(stored[:-4])
    elif damage == "a bit":
        stored[-1] ^= 1
        weights.write_bytes(stored)
    elif damage == "format":
        settings.write_text(json.dumps({**said, "format": 2}))
    else:
        from riptide.retriever.model.model_folder import sha256_of

        [tensor] = load_file(weights).values()
        tensor[0, 0, 0, 0, 0] = float("nan")
        save_file({"query": tensor if damage == "not finite" else torch.zeros(3)}, weights)
        settings.write_text(json.dumps({**said, "sha256": sha256_of(weights)}))
    with pytest.raises(InputError, match=says):
        load_prompt(tmp_path)


def test_a_snapshot_stays_as_it_is_and_slots_are_used_again() -> None:
    shape = PromptShape(2, 4, 8)
    table = PromptTable(shape, torch.float32, torch.device("cpu"))
    table.put("a", [matrix(shape, 3)])
    table.put("b", [matrix(shape, 4)])
    before = table.snapshot()
    slots = before.slots_of(["a", None, "b"])
    assert len(set(slots.tolist())) == 3
    table.drop("a")
    for seed in range(1, 4):
        table.put("c", [matrix(shape, 5, seed)])
    rows = before.rows(slots)
    assert rows is not None
    assert rows.rows is not None
    assert rows.is_prompt_token is not None
    assert rows.table.shape[4] == 4
    key, value = rows.keys_and_values(1, 3)
    assert torch.equal(key[0, :, :3], matrix(shape, 3)[1, 0])
    assert torch.equal(value[2], matrix(shape, 4)[1, 1])
    assert rows.is_prompt_token[rows.rows].sum(1).tolist() == [3, 0, 4]
    assert not table.snapshot().slots_of(["a"]).any()
    del before, rows
    capacity = table.snapshot().numbers.shape[3]
    for seed in range(50):
        table.put("c", [matrix(shape, 2, seed)])
    assert table.snapshot().numbers.shape[3] == capacity
    shared = table.snapshot().rows(table.snapshot().slots_of(["c"] * 4))
    assert shared is not None
    assert shared.rows is None
    assert torch.equal(shared.table[:, :, 0], matrix(shape, 2, 49))


def test_tasks_come_and_go_while_texts_are_encoded(tiny: Tiny, texts: list[str]) -> None:
    encoder, prompt = open_encoder(tiny)
    encoder.put_task("kept", prompt(4))
    encoder.put_task("two", prompt(6))
    texts = texts[:12]
    tasks = ["kept", "two", None] * 4
    # Cut to the longest of the batch, so that a longer prompt of no row changes nothing.
    expected, done, errors = encoder.encode(texts, task=tasks).tobytes(), threading.Event(), []

    def change() -> None:
        try:
            turn = 0
            while not done.is_set():
                encoder.put_task(f"other {turn % 5}", prompt(1 + turn % 20, seed=turn))
                encoder.put_task("kept", prompt(4))
                if turn % 3 == 0:
                    encoder.drop_task(f"other {turn % 5}")
                turn += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            assert encoder.encode(texts, task=tasks).tobytes() == expected
    finally:
        done.set()
        thread.join()
    assert not errors


def test_the_prompt_is_part_of_a_tasks_configuration_and_not_of_the_encoders(tiny: Tiny) -> None:
    encoder, prompt = open_encoder(tiny)
    config, plain = encoder.config, Encoder(str(encoder._recipe.folder), FLOAT32)
    encoder.put_task("squad", prompt(3))
    assert (encoder.config, encoder.fingerprint) == (plain.config, plain.fingerprint)
    assert task_config(config, None, "query") == task_config(config, prompt(3), "passage") == config
    found = {task_config(config, one, "query")["prompt"] for one in (prompt(3), prompt(4), prompt(3, seed=1))}
    assert len(found) == 3
    assert {**task_config(config, prompt(3), "query"), "prompt": 0} == {**config, "prompt": 0}
    assert json.loads(json.dumps(task_config(config, prompt(3), "query"))) == task_config(config, prompt(3), "query")
    offset = replace(prompt(3), position_offset=True)
    assert task_config(config, offset, "query") == {**task_config(config, prompt(3), "query"), "position_offset": 3}
    assert task_config(config, offset, "passage") == config


def test_a_prompt_is_under_half_a_percent_of_its_backbone() -> None:
    """RoBERTa-large and 32 positions a layer; the same number format for both."""
    config = transformers.RobertaConfig(
        vocab_size=50265,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    with torch.device("meta"):
        backbone = sum(parameter.numel() for parameter in transformers.RobertaModel(config).parameters())
        one_side = MatrixPrompt(PromptShape(24, 16, 64), 32).matrix().numel()
    assert backbone > 350_000_000
    assert one_side == 24 * 2 * 16 * 32 * 64
    assert one_side / backbone < 0.005


@pytest.mark.slow
def test_another_task_needs_no_compilation(tiny: Tiny, texts: list[str]) -> None:
    options = EncoderOptions(compile="always", dtype="bfloat16", normalize=True, query_length=20)
    folder = str(tiny("bert", layers=1))
    encoder = Encoder(folder, options, tasks={})
    exact = Encoder(folder, replace(options, compile="never", dtype="float32"), tasks={})
    assert " compiled " in encoder.numerics
    shape, backbone, texts = PromptShape(1, 4, 8), backbone_of(encoder.config), texts[:12]
    tasks: list[str | None] = [None, "later"]
    for one in (encoder, exact):  # the first prompt with a position offset is compiled when it is added
        one.put_task("later", TaskPrompt(backbone, options, matrix(shape, 7), None, position_offset=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert encoder.encode(texts).shape == (12, 32)
        for turn, length in enumerate((1, 2, 11, 5, 40, 8)):
            prompt = TaskPrompt(backbone, options, matrix(shape, length), None)
            for one in (encoder, exact):
                one.put_task(f"task {turn}", prompt)
            tasks.append(f"task {turn}")
            some = [tasks[row % len(tasks)] for row in range(len(texts))]
            last = tasks[-1]
            batches = [(texts, some), (texts, last), (texts[:1], last), (texts[:2], some[-2:]), (texts, "later")]
            for batch, task in batches:
                vectors = encoder.encode(batch, task=task)
                assert ((vectors * exact.encode(batch, task=task)).sum(1) > 0.998).all()
