"""The saved form of a synthesiser: its options and weights, stored in a task's folder beside other prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.base.wording import list_first
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.model.json_fields import check_object, field_errors
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.synthesiser import Synthesiser

PREFIX = "synthesis."  # prefix of the synthesiser's tensor names in a task's file


@dataclass(frozen=True)
class SavedSynthesis:
    """The options and weights of a trained synthesiser.

    Attributes:
        options: Numbers, lengths and sizes.
        tensors: The weights by name, float32, as of `Synthesiser.state_dict`.
    """

    options: SynthesisOptions
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def from_module(cls, trained: Synthesiser) -> SavedSynthesis:
        """Copies the options and weights of a trained module."""
        state = trained.state_dict()
        return cls(trained.options, {name: tensor.detach().cpu().float().clone() for name, tensor in state.items()})

    @property
    def width(self) -> int:
        """The dimension of a word embedding."""
        return self.tensors["basic"].shape[2]

    @property
    def numbers_per_token(self) -> int:
        """The number of values per prompt token: layers * 2 * heads * head_dim."""
        return self.tensors["up.weight"].shape[0]

    def count_kept_numbers(self) -> int:
        """Returns the number of values that `KeptSynthesiser` keeps in memory."""
        options = self.options
        tokens, prefix_encoder = options.prompts * options.length, options.bottleneck * self.numbers_per_token
        banks = (
            tokens * self.numbers_per_token if options.mix == "after" else tokens * options.bottleneck + prefix_encoder
        )
        return banks + self.width * (options.prompts + 2 * options.hidden + 2)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in a task's file."""
        return {PREFIX + name: tensor.contiguous() for name, tensor in self.tensors.items()}

    def settings(self) -> dict[str, Any]:
        """Returns the options as JSON-serialisable values."""
        return asdict(self.options)

    def digest(self) -> str:
        """Returns the sha256 of the options and of the names, shapes and values of the weights."""
        digest = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def fits(self, shape: PromptShape) -> bool:
        """Whether the prompts have the size of a backbone's keys and values."""
        return self.numbers_per_token == 2 * shape.layers * shape.heads * shape.head_dim

    def open(self, shape: PromptShape) -> Synthesiser:
        """Builds the synthesiser module with these weights."""
        module = Synthesiser(shape, self.width, self.options)
        module.load_state_dict(dict(self.tensors))
        return module


def read_options(content: Any, file: Path) -> SynthesisOptions:
    """Reads the options from a task's settings. Raises InputError for invalid ones.

    Args:
        content: The object of the field `synthesis`.
        file: The file that it is from, for messages.

    Raises:
        InputError: If a field is unknown, missing, of a wrong type or out of range.
    """
    types = {field.name: type(field.default) for field in fields(SynthesisOptions)}
    check_object(content, types, "synthesis.", file)
    with field_errors(file, "synthesis.", SynthesisOptions):
        return SynthesisOptions(**content)


def parse_synthesis(options: SynthesisOptions, tensors: Mapping[str, torch.Tensor], file: Path) -> SavedSynthesis:
    """Builds the saved form from the tensors of a task's file, after checking their names and shapes.

    Args:
        options: What the file of settings says.
        tensors: The tensors whose names begin with PREFIX, without it.
        file: The file that they are from, for messages.

    Raises:
        InputError: If a tensor is missing, unknown, or has another shape than the options say, or is not finite.
    """
    basic, up = tensors.get("basic"), tensors.get("up.weight")
    if basic is None or basic.ndim != 3 or up is None or up.ndim != 2:
        raise InputError(
            f"{file}: holds {list_first(sorted(tensors)) or 'no tensor'} of a synthesiser: expected basic [N, m, d] "
            "and up.weight [layers * 2 * heads * head_dim, d_p] among them"
        )
    width, hidden, bottleneck = basic.shape[2], options.hidden, options.bottleneck
    expected = {
        "basic": (options.prompts, options.length, width),
        "adapter.0.weight": (hidden, width),
        "adapter.2.weight": (width, hidden),
        "norm.weight": (width,),
        "norm.bias": (width,),
        "down.weight": (bottleneck, width),
        "up.weight": (up.shape[0], bottleneck),
    }
    if set(tensors) != set(expected):
        raise InputError(
            f"{file}: a synthesiser of {list_first(sorted(tensors))}: expected {', '.join(sorted(expected))}"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
            raise InputError(
                f"{file}: {PREFIX}{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 "
                f"{expected[name]}, as the settings say"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{file}: {PREFIX}{name} holds numbers that are not finite")
    return SavedSynthesis(options, dict(tensors))
