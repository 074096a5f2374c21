"""A forward pass of BERT and RoBERTa with a deep prompt, written from the papers in loops over float64 numbers.

It shares no code with the project: prompts are indexed in the rows in which DPTDR's authors and PEFT store them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def first_vector(
    state: dict[str, torch.Tensor], config: Any, ids: Sequence[int], rows: np.ndarray, *, first_position: int
) -> np.ndarray:
    """Returns the vector of the first token in the last layer (Devlin et al. 2019; Li & Liang 2021, Eq. 2).

    Args:
        state: The weights of a BertModel or RobertaModel of transformers.
        config: Its configuration.
        ids: The tokens of one text.
        rows: The prompt, [l, 2 * layers * hidden]: in row j, from 2 * i * hidden on, the key of layer i at prompt
            position j, head after head; then its value.
        first_position: The position of the first token.

    Returns:
        float64 [hidden].
    """
    weights = {name: value.double().numpy() for name, value in state.items()}
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = hidden // heads
    states = []
    for place, token in enumerate(ids):
        embedded = (
            weights["embeddings.word_embeddings.weight"][token]
            + weights["embeddings.position_embeddings.weight"][first_position + place]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        states.append(_norm(embedded, weights, "embeddings.LayerNorm", config.layer_norm_eps))
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}."
        project = {
            name: [_linear(state, weights, f"{prefix}attention.self.{name}") for state in states]
            for name in ("query", "key", "value")
        }
        attended = []
        for query in project["query"]:
            joined = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                keys, values = [], []
                for row in rows:
                    at = 2 * layer * hidden + head * size
                    keys.append(row[at : at + size])
                    values.append(row[at + hidden : at + hidden + size])
                keys += [key[part] for key in project["key"]]
                values += [value[part] for value in project["value"]]
                scores = [float(query[part] @ key) / math.sqrt(size) for key in keys]
                powers = [math.exp(score - max(scores)) for score in scores]
                joined.append(sum(power / sum(powers) * value for power, value in zip(powers, values, strict=True)))
            attended.append(np.concatenate(joined))
        after = []
        for state, vector in zip(states, attended, strict=True):
            mixed = _linear(vector, weights, f"{prefix}attention.output.dense") + state
            mixed = _norm(mixed, weights, f"{prefix}attention.output.LayerNorm", config.layer_norm_eps)
            wide = _linear(mixed, weights, f"{prefix}intermediate.dense")
            wide = np.array([0.5 * number * (1 + math.erf(number / math.sqrt(2))) for number in wide])
            deep = _linear(wide, weights, f"{prefix}output.dense") + mixed
            after.append(_norm(deep, weights, f"{prefix}output.LayerNorm", config.layer_norm_eps))
        states = after
    return states[0]


def _linear(vector: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]


def _norm(vector: np.ndarray, weights: dict[str, np.ndarray], name: str, epsilon: float) -> np.ndarray:
    centred = vector - vector.mean()
    scaled = centred / math.sqrt((centred**2).mean() + epsilon)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
