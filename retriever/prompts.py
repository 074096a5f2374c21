"""Deep prompts (DPTDR, section 3.1): what is trained of one, and what is kept: keys and values for every layer.

A task's folder holds

    prompt.json          the backbone that it is for, how texts become vectors, and which sides have which prompt
    prompt.safetensors   "query" and "passage", or "both": [layers, 2, heads, l, head_dim] each
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from retriever.attention import PromptShape
from retriever.errors import InputError
from retriever.files import sha256_of
from retriever.options import EncoderOptions, Side

Parametrisation = Literal["embedding", "mlp"]
Sides = Literal["tied", "untied", "query"]

FORMAT = 1
WEIGHTS, SETTINGS = "prompt.safetensors", "prompt.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of a prompt that is saved
BOTTLENECK = 512  # of `mlp`: the authors' prefix_hidden_size
INIT = 0.02  # standard deviation of a fresh prompt's numbers: that of the backbones' own weights
# What of an encoder's configuration is the backbone: a prompt fits where these are equal.
_BACKBONE = ("model_type", "backbone", "weights", "tokenizer", "tokenizer_args", "lower_case", "head")


class DeepPrompt(nn.Module):
    """The trained form of one prompt; called, it gives [layers, 2, 1, heads, l, head_dim], with dropout in training.

    `embedding`: the matrix itself (the paper's choice). `mlp` (Li & Liang 2021): an embedding [l, hidden] through
    512 units and tanh; what is kept is the matrix that it produces. dropout: of single numbers, the same for all rows
    of a batch.
    """

    def __init__(
        self, shape: PromptShape, length: int, parametrisation: Parametrisation = "embedding", dropout: float = 0.1
    ):
        super().__init__()
        if length < 1 or not 0 <= dropout < 1:
            raise InputError(f"prompt length {length}, dropout {dropout}: expected 1 or more, and 0 to less than 1")
        self.shape, self.length = shape, length
        hidden = shape.heads * shape.head_dim
        size = shape.layers * 2 * hidden
        if parametrisation == "embedding":
            self.embedding = nn.Parameter(INIT * torch.randn(length, size))
            self.mlp = None
        else:
            self.embedding = nn.Parameter(torch.randn(length, hidden))
            self.mlp = nn.Sequential(nn.Linear(hidden, BOTTLENECK), nn.Tanh(), nn.Linear(BOTTLENECK, size))
        self.dropout = nn.Dropout(dropout)

    def start(self, matrix: torch.Tensor | None) -> None:
        """Begin from a trained matrix [layers, 2, heads, l, head_dim]. Raises InputError for none, or another shape."""
        layers, heads, head_dim = self.shape
        expected = (layers, 2, heads, self.length, head_dim)
        if self.mlp is not None:
            raise InputError("a prompt to begin from gives numbers, not an mlp that makes them: take embedding")
        if matrix is None or tuple(matrix.shape) != expected:
            found = "none for this side" if matrix is None else tuple(matrix.shape)
            raise InputError(f"the prompt to begin from is {found}, expected {expected}: take its length")
        with torch.no_grad():
            self.embedding.copy_(matrix.permute(3, 0, 1, 2, 4).reshape(self.length, -1))

    def forward(self) -> torch.Tensor:
        return self.dropout(self._matrix())[:, :, None]

    def matrix(self) -> torch.Tensor:
        """What is kept: [layers, 2, heads, l, head_dim], float32."""
        with torch.no_grad():
            return self._matrix().float().contiguous()

    def _matrix(self) -> torch.Tensor:
        flat = self.embedding if self.mlp is None else self.mlp(self.embedding)
        layers, heads, head_dim = self.shape
        return flat.view(self.length, layers, 2, heads, head_dim).permute(1, 2, 3, 0, 4)


@dataclass(frozen=True)
class TaskPrompt:
    """A task's prompt, trained. query, passage: [layers, 2, heads, l, head_dim], float32; passage is None where that
    side has none, and the very same tensor as query where they are tied. backbone: what it fits (backbone_of).
    options: how its texts become vectors."""

    backbone: dict[str, Any]
    options: EncoderOptions
    query: torch.Tensor | None
    passage: torch.Tensor | None

    def of(self, side: Side) -> torch.Tensor | None:
        return self.query if side == "query" else self.passage

    def save(self, folder: Path) -> None:
        """Write the two files; the same prompt gives the same bytes."""
        tied = self.query is not None and self.query is self.passage
        names = {"query": "both", "passage": "both"} if tied else {"query": "query", "passage": "passage"}
        matrices = {"query": self.query, "passage": self.passage}
        tensors = {names[side]: m.contiguous() for side, m in matrices.items() if m is not None}
        save_file(tensors, folder / WEIGHTS)
        said = {
            "format": FORMAT,
            "backbone": self.backbone,
            "options": asdict(self.options),
            "sides": {side: {"tensor": name, "length": tensors[name].shape[3]} if name in tensors else None
                      for side, name in names.items()},
            "sha256": sha256_of(folder / WEIGHTS),
        }  # fmt: skip
        (folder / SETTINGS).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_prompt(folder: Path) -> TaskPrompt:
    """Open a task's folder. Raises InputError naming the file where it is no prompt, damaged, or not finite."""
    file = folder / SETTINGS
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise InputError(f"{file}: is of format {said['format']}, this release reads {FORMAT}")
        if said["sha256"] != sha256_of(folder / WEIGHTS):
            raise InputError(f"{folder / WEIGHTS}: its sha256 is not the one in {SETTINGS}: copy both files again")
        options = EncoderOptions(**said["options"])
        with safe_open(folder / WEIGHTS, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        sides = {side: tensors[place["tensor"]] if place else None for side, place in said["sides"].items()}
        backbone = dict(said["backbone"])
        query, passage = sides["query"], sides["passage"]
    except FileNotFoundError as error:
        raise InputError(f"{error.filename or folder}: no such file, so no task's prompt") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise InputError(f"{file}: not a prompt's: {type(error).__name__}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.ndim != 5 or tensor.shape[1] != 2 or tensor.dtype not in _DTYPES:
            raise InputError(f"{folder / WEIGHTS}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32, "
                             "float16 or bfloat16 [layers, 2, heads, l, head_dim]")  # fmt: skip
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{folder / WEIGHTS}: {name} holds numbers that are not finite")
    for side, matrix in sides.items():
        if matrix is not None and said["sides"][side].get("length") != matrix.shape[3]:
            raise InputError(f"{file}: another length of the {side}'s prompt than its {matrix.shape[3]} tokens")
    return TaskPrompt(backbone, options, query, passage)


def backbone_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of an encoder's configuration a prompt depends on."""
    return {name: config[name] for name in _BACKBONE}


def check_backbone(prompt: TaskPrompt, config: Mapping[str, Any], shape: PromptShape | None = None) -> None:
    """Raises InputError where the prompt was trained for another backbone than the configuration's."""
    found = backbone_of(config)
    if differ := [name for name in _BACKBONE if prompt.backbone.get(name) != found[name]]:
        raise InputError(f"the prompt is for another backbone ({', '.join(differ)} differ): open the one that it was "
                         "trained over, or train one for this")  # fmt: skip
    for matrix in (prompt.query, prompt.passage):
        if shape and matrix is not None and (matrix.shape[0], matrix.shape[2], matrix.shape[4]) != tuple(shape):
            raise InputError(f"the prompt is of shape {tuple(matrix.shape)}, the backbone has {shape.layers} layers, "
                             f"{shape.heads} heads of {shape.head_dim}")  # fmt: skip
