"""The sizes of backbones: floating-point operations per token, and bytes of weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from riptide.base.yaml_files import read_yaml

# Operations per weight and token: forward; also with gradients of activations; also with gradients of weights.
FORWARD, FROZEN, TRAINED = 2, 4, 6
KNOWN = Path(__file__).with_name("backbone_sizes.yaml")
# Names of one size in the config.json of different model types.
_FIELDS = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
    "width": ("hidden_size", "d_model", "dim"),
    "inner": ("intermediate_size", "d_ff", "hidden_dim"),
    "words": ("vocab_size",),
}


class Backbone(BaseModel):
    """The size of a backbone.

    Attributes:
        millions: Millions of weights that each token is multiplied with, without embeddings.
        layers: Number of layers.
        width: Size of a token's vector.
        words: Size of the vocabulary.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    millions: float
    layers: int
    width: int
    words: int

    @property
    def parameters(self) -> float:
        """The number of weights, with the embeddings of words."""
        return self.millions * 1e6 + self.words * self.width

    def flops(self, tokens: float, length: float, per_weight: int = FORWARD, head: float = 0.0) -> float:
        """Returns the floating-point operations for some tokens.

        Attention multiplies each token of a layer with the keys and values of its text: 2 x width products per token
        of the text.

        Args:
            tokens: The number of tokens.
            length: The mean number of tokens of a text.
            per_weight: FORWARD, FROZEN or TRAINED, plus FORWARD for activation checkpointing.
            head: Weights of a head that each token is also multiplied with.
        """
        return per_weight * tokens * (self.millions * 1e6 + head + 2 * self.layers * self.width * length)


@functools.cache
def known_backbones() -> dict[str, Backbone]:
    """Reads the sizes of the backbones that are known by their Hugging Face name."""
    return TypeAdapter(dict[str, Backbone]).validate_python(read_yaml(str(KNOWN), "expected the sizes of backbones"))


def find_backbone(name: str, folder: Path | None = None) -> Backbone | None:
    """Returns the size of a backbone; None if it is unknown.

    Args:
        name: Its name, which may be known, or its folder.
        folder: Its folder, if there is one, whose config.json has the sizes.
    """
    if name in known_backbones():
        return known_backbones()[name]
    config = (folder or Path(name)) / "config.json"
    if not config.is_file():
        return None
    document = json.loads(config.read_text(encoding="utf-8"))
    sizes = {size: next((document[key] for key in keys if key in document), 0) for size, keys in _FIELDS.items()}
    if not all(isinstance(each, int) and each > 0 for each in sizes.values()):
        return None
    layers, width, inner, words = sizes.values()
    heads, head_dim = (document.get(keys) for keys in ("num_heads", "d_kv"))  # T5's heads may be wider than its tokens
    attention = heads * head_dim if heads and head_dim else width
    products = 3 if document.get("is_gated_act") or document.get("hidden_act") in ("silu", "swiglu") else 2
    weights = layers * (4 * width * attention + products * width * inner)
    return Backbone(millions=weights / 1e6, layers=layers, width=width, words=words)
