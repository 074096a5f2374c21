"""Random networks that compute prompts from queries."""

from __future__ import annotations

from typing import Any

import torch

from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.saved_synthesis import SavedSynthesis
from riptide.retriever.prompts.synthesiser import Synthesiser

SIZES: dict[str, Any] = {"prompts": 3, "length": 4, "hidden": 6, "bottleneck": 5, "temperature": 0.1}
SHAPE = PromptShape(layers=2, heads=4, head_dim=8)  # of tiny backbones


def random_synthesis(seed: int = 0, shape: PromptShape = SHAPE, width: int = 32, **options: Any) -> SavedSynthesis:
    """Returns the saved form of a random network, by default of a tiny backbone.

    Args:
        seed: Seed of its parameters.
        shape: The shape of the backbone's keys and values.
        width: Numbers of a word embedding.
        **options: Options of SynthesisOptions other than SIZES.
    """
    torch.manual_seed(seed)
    module = Synthesiser(shape, width, SynthesisOptions(**{**SIZES, **options}))
    with torch.no_grad():
        module.basic.mul_(4)  # so that the prompts of different queries differ
    return SavedSynthesis.from_module(module)
