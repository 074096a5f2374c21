"""Deep prompts over a T5 encoder, compared with a slow forward pass in float64 that is written from T5's definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from t5_folders import save_gtr, save_t5
from training_cases import CPU, make_data
from transformers import T5Config

from riptide.retriever.encoding.backbones import load_backbone
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptRows, PromptShape
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer

LAYERS, HEADS, HEAD_DIM, PROMPT = 3, 4, 8, 5
FLOAT32 = EncoderOptions(dtype="float32", compile="never")


def bucket(distance: int, buckets: int, farthest: int) -> int:
    """The bucket of a key that is `distance` tokens after the query (T5, section 2.1): half of them for each direction,
    one for each distance up to a quarter of all, then wider and wider ones up to `farthest`."""
    half = buckets // 2
    start, away = (half if distance > 0 else 0), abs(distance)
    exact = half // 2
    if away < exact:
        return start + away
    wide = exact + int(math.log(away / exact) / math.log(farthest / exact) * (half - exact))
    return start + min(wide, half - 1)


def slow_forward(
    weights: dict[str, np.ndarray], config: T5Config, ids: list[int], prompt: np.ndarray | None
) -> np.ndarray:
    """Returns the last hidden states of one text, float64 [tokens, hidden].

    Products of queries and keys are not scaled. The keys of the prompt, [layers, 2, heads, l, head_dim], come first and
    have no bias; the bias of the first layer's table is added to those of the text in every layer.
    """

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        return weights[name] * values / np.sqrt((values**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)

    table = weights["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    tokens = len(ids)
    hidden = weights["shared.weight"][ids]
    for layer in range(config.num_layers):
        at = f"encoder.block.{layer}.layer"
        inputs = norm(hidden, f"{at}.0.layer_norm.weight")
        query, key, value = (inputs @ weights[f"{at}.0.SelfAttention.{name}.weight"].T for name in "qkv")
        merged = np.zeros_like(query)
        for head in range(config.num_heads):
            part = slice(head * config.d_kv, (head + 1) * config.d_kv)
            for row in range(tokens):
                scores, values = [], []
                if prompt is not None:
                    for place in range(prompt.shape[3]):
                        scores.append(float(query[row, part] @ prompt[layer, 0, head, place]))
                        values.append(prompt[layer, 1, head, place])
                for column in range(tokens):
                    number = bucket(
                        column - row, config.relative_attention_num_buckets, config.relative_attention_max_distance
                    )
                    scores.append(float(query[row, part] @ key[column, part]) + table[number, head])
                    values.append(value[column, part])
                odds = np.exp(np.array(scores) - max(scores))
                merged[row, part] = (odds / odds.sum()) @ np.array(values)
        hidden = hidden + merged @ weights[f"{at}.0.SelfAttention.o.weight"].T
        inputs = norm(hidden, f"{at}.1.layer_norm.weight")
        inner = f"{at}.1.DenseReluDense"
        if config.is_gated_act:
            x = inputs @ weights[f"{inner}.wi_0.weight"].T
            gelu = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            wide = gelu * (inputs @ weights[f"{inner}.wi_1.weight"].T)
        else:
            wide = np.maximum(inputs @ weights[f"{inner}.wi.weight"].T, 0)
        hidden = hidden + wide @ weights[f"{inner}.wo.weight"].T
    return norm(hidden, "encoder.final_layer_norm.weight")


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    stored = folder / "model.safetensors"
    tensors = load_file(stored) if stored.exists() else torch.load(folder / "pytorch_model.bin")
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def matrix(length: int = PROMPT, seed: int = 0) -> torch.Tensor:
    """A prompt whose scores are as large as those of the text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, length, HEAD_DIM, generator=generator)


@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
def test_a_prompt_has_no_bias_and_no_scaling(tmp_path: Path, form: str) -> None:
    """Long texts reach all buckets of distances, and padding and batch-mates change nothing."""
    folder = save_t5(
        tmp_path / "t5",
        layers=LAYERS,
        feed_forward_proj=form,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
    backbone = load_backbone(read_recipe(folder, FLOAT32), torch.float32).eval()
    weights, config = weights_of(folder), backbone.config
    assert enable_prompts(backbone) == PromptShape(LAYERS, HEADS, HEAD_DIM)
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, config.vocab_size, size=length).tolist() for length in (24, 3, 1)]
    ids = torch.zeros(3, 24, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    mask = (torch.arange(24) < torch.tensor([[24], [3], [1]])).long()
    table = torch.stack([matrix(), matrix(seed=1)], dim=2)
    shorter = torch.tensor([[True] * PROMPT, [True] * 2 + [False] * 3])
    cases = {
        "none": (None, [None] * 3),
        "shared": (PromptRows(table[:, :, :1]), [table[:, :, 0]] * 3),
        "mixed": (
            PromptRows(table, torch.tensor([1, 0, 1]), shorter),
            [table[:, :, 1, :, :2], table[:, :, 0], table[:, :, 1, :, :2]],
        ),
    }
    vectors = {}
    for name, (rows, prompts) in cases.items():
        extra = {} if rows is None else {"prompt": rows}
        with torch.no_grad():
            found = backbone(input_ids=ids, attention_mask=mask, **extra).last_hidden_state
        for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            expected = slow_forward(weights, config, text, None if prompt is None else prompt.double().numpy())
            np.testing.assert_allclose(found[row, : len(text)], expected, atol=1e-5, rtol=1e-5)
        vectors[name] = found[0]
    assert (vectors["shared"] - vectors["none"]).abs().max() > 0.1


def test_a_task_over_a_gtr_folder_gives_the_slow_vectors(tmp_path: Path) -> None:
    """Through pooling, projection and scaling; each text of a batch has its own task."""
    folder = save_gtr(tmp_path / "gtr", layers=LAYERS)
    encoder = Encoder(str(folder), FLOAT32, tasks={})
    prompts = {"a": matrix(), "b": matrix(3, seed=1)}
    for name, values in prompts.items():
        encoder.put_task(name, TaskPrompt(backbone_of(encoder.config), FLOAT32, values, None))
    texts = ["the river bank flows fast", "money", "query : the answer of a title", "alpha beta"]
    tasks = ["a", "b", None, "b"]
    weights = weights_of(folder)
    config = T5Config.from_pretrained(folder)
    dense = torch.load(folder / "2_Dense" / "pytorch_model.bin")["linear.weight"].double().numpy()
    tokens = encoder.tokenize(texts, side="query")
    found = encoder.encode(texts, task=tasks)
    for row, task in enumerate(tasks):
        ids = tokens.ids[tokens.starts[row] : tokens.starts[row] + tokens.lengths[row]].tolist()
        prompt = None if task is None else prompts[task].double().numpy()
        vector = dense @ slow_forward(weights, config, ids, prompt).mean(axis=0)
        np.testing.assert_allclose(found[row], vector / np.linalg.norm(vector), atol=1e-5)


def test_a_prompt_is_trained_over_a_frozen_gtr(tmp_path: Path) -> None:
    """The trained system gives the vectors of the encoder with the saved prompt."""
    folder = save_gtr(tmp_path / "gtr", layers=LAYERS)
    options = TuneOptions(length=PROMPT, batch=8, loss="symmetric-sum", temperature=0.01, prompt_dropout=0.0)
    system = DualEncoderSystem(folder, FLOAT32, options, make_data(20), device=CPU, dtype=torch.float32)
    trainer = Trainer(system, LoopOptions(steps=5, lr=1e-2), device=CPU, dtype=torch.float32)
    before = {name: value.clone() for name, value in system.pooled.state_dict().items()}
    start = system.prompt().fixed_matrix("query")
    for step in range(3):
        system.module.train()
        trainer.step(step)
    system.module.eval()
    torch.testing.assert_close(system.pooled.state_dict(), before, atol=0, rtol=0)
    prompt = system.prompt()
    matrices = prompt.fixed_matrix("query"), start
    assert matrices[0] is not None
    assert matrices[1] is not None
    changed = (matrices[0] - matrices[1]).abs().amax(dim=(1, 2, 3, 4))
    assert bool((changed > 1e-4).all()), "a layer's prompt is not trained"
    texts = ["the river bank flows fast", "money"]
    encoder = Encoder(str(folder), FLOAT32, tasks={"t": prompt})
    np.testing.assert_allclose(encoder.encode(texts, task="t"), system.encode(texts, "query"), atol=1e-5)
