"""Options of the library: plain dataclasses without torch, whose fields are options of the jobs too.

A field is declared once: its type, its default, and the docstring below it, which is its help on the command line. None
stands for a default that depends on other options.

encoding      options of an encoder and of a re-ranker
loop          options of the training loop
tuning        options of the trained weights, the prompt and the batches of a retriever
synthesis     options of prompts that are computed from each query
topics        options of prompts of topics
lora          options of LoRA adapters
reranking     options of training a re-ranker
pretraining   options of pretraining
"""

from riptide.retriever.options.encoding import (
    DEFAULT_OPTIONS,
    LATER_OPTIONS,
    PLURALS,
    SIDES,
    VECTORS,
    EncoderOptions,
    EncoderPrecision,
    Pooling,
    Precision,
    RerankerOptions,
    RerankPrecision,
    Side,
    TextOptions,
    TitlePolicy,
)

__all__ = [
    "DEFAULT_OPTIONS",
    "LATER_OPTIONS",
    "PLURALS",
    "SIDES",
    "VECTORS",
    "EncoderOptions",
    "EncoderPrecision",
    "Pooling",
    "Precision",
    "RerankPrecision",
    "RerankerOptions",
    "Side",
    "TextOptions",
    "TitlePolicy",
]
