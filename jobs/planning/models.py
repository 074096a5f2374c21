"""The models of jobs: sizes, limits of texts and mean numbers of tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.store.model_artifacts import resolve_model
from riptide.indexing.store.store import Store, generation
from riptide.jobs.planning.backbone_sizes import Backbone, find_backbone
from riptide.retriever.options import EncoderOptions, Side

SPLADE = "splade"  # the pooling of sparse vectors
LENGTHS = 64, 256  # tokens of a query and of a passage without a limit


PADDED_BATCHES = 16  # batches that are drawn from sampled texts to count the padding of a training


class TextBatch(NamedTuple):
    """The texts of one side in a step of a worker, and its device: "cpu" or "cuda"."""

    texts: int
    device: str


@dataclass(frozen=True)
class Model:
    """A model that a job runs or trains.

    Attributes:
        name: Its name.
        backbone: The size of its backbone.
        options: How it makes vectors.
        folder: Its folder; None: it is only known by its size, or will be made.
    """

    name: str
    backbone: Backbone
    options: EncoderOptions
    folder: Path | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """The largest numbers of tokens of a query and of a passage."""
        return self.options.query_length or LENGTHS[0], self.options.passage_length or LENGTHS[1]

    @property
    def head(self) -> float:
        """The weights of the head that a token is multiplied with: those of the vocabulary for SPLADE."""
        return self.backbone.width * self.backbone.words if self.options.pooling == SPLADE else 0.0

    @property
    def dim(self) -> int:
        """The dimensions of its dense vectors."""
        return self.options.dimension or self.backbone.width

    def flops(self, tokens: float, length: float, per_weight: int) -> float:
        """Returns the floating-point operations for some tokens; see `Backbone.flops`."""
        return self.backbone.flops(tokens, length, per_weight, self.head)

    def mean_tokens(
        self, titles_and_texts: Sequence[tuple[str, str]], side: Side = "passage", batch: TextBatch | None = None
    ) -> float:
        """Returns the mean number of tokens of texts after cutting; the limit without texts or without a folder.

        Args:
            titles_and_texts: The texts.
            side: Their side.
            batch: Counts the padding that a training adds to batches of such texts; None: counts none.
        """
        if self.folder is None or not titles_and_texts:
            return float(self.limits[side == "passage"])
        from riptide.retriever.forward.batching import BATCH_TOKENS, COLUMN_STEP, TextTokenizer, plan_padded
        from riptide.retriever.model.recipe import read_recipe

        recipe = read_recipe(self.folder, self.options)
        tokenizer = TextTokenizer(recipe, self.options)
        titles, texts = zip(*titles_and_texts, strict=True)
        lengths = tokenizer(tokenizer.compose(titles, texts, self.options.title), side=side, prefix=None).lengths
        if batch is None:
            return float(lengths.mean())
        random, padded = np.random.default_rng(0), 0
        for _ in range(PADDED_BATCHES):
            sample = random.choice(lengths, batch.texts)
            chunks = plan_padded(sample, BATCH_TOKENS[batch.device], COLUMN_STEP, recipe.max_positions)
            padded += sum(len(rows) * width for rows, width in chunks)
        return padded / (PADDED_BATCHES * batch.texts)


@dataclass
class Models:
    """The models that steps of a chain make or use, by store and name.

    Attributes:
        backbones: Name of the backbone of each trained artifact and of each embeddings.
        options: The options of their vectors.
        reads_stores: Whether existing artifacts of stores count.
    """

    reads_stores: bool = True
    backbones: dict[tuple[str, str], str] = field(default_factory=dict)
    options: dict[tuple[str, str], EncoderOptions] = field(default_factory=dict)

    def learn(self, store: str, name: str, model: str, options: EncoderOptions | None) -> None:
        """Records that a step makes an artifact with a backbone."""
        self.backbones[store, name] = self.resolve(store, model)
        if options is not None:
            self.options[store, name] = options

    def resolve(self, store: str, model: str) -> str:
        """Returns the backbone of a model or task of a store; another model is its own."""
        head, separator, name = model.rpartition("models/")
        if separator:
            store = head.rstrip("/") or store
        # A prompt that is trained together with a model has the name of the model and -prompt.
        return self.backbones.get((store, name)) or self.backbones.get((store, name.removesuffix("-prompt")), model)

    def is_sparse(self, store: str, embeddings: str) -> bool:
        """Returns whether embeddings are sparse, those of an earlier step or of the store."""
        if (options := self.options.get((store, embeddings))) is not None:
            return options.pooling == SPLADE
        with contextlib.suppress(InputError, OSError, IndexError):
            if self.reads_stores:
                config = Store(store).generations("embeddings", embeddings)[-1].config
                return bool(config["encoder"]["pooling"] == SPLADE)
        return False

    def find(self, store: str, model: str, options: EncoderOptions | None = None) -> Model | None:
        """Returns a model by its name, which may be that of a task or of embeddings; None if its size is unknown."""
        name = self.resolve(store, model)
        folder = _find_folder(store if self.reads_stores else None, model, name)
        backbone = find_backbone(name, folder)
        if backbone is None:
            return None
        return Model(name, backbone, options or self.options.get((store, model)) or EncoderOptions(), folder)


def _find_folder(store: str | None, model: str, backbone: str) -> Path | None:
    """Returns the folder of a model, or of the backbone of a task or of embeddings; None: it is missing."""
    from riptide.retriever.model.model_folder import find_model_folder

    places: list[Callable[[], str]] = []
    if store is not None:
        existing = Store(store)
        is_name = "/" not in model  # otherwise a folder, a Hugging Face name or models/NAME
        for key in (f"embeddings/{model}/{generation(0)}", f"prompts/{model}", f"models/{model}") if is_name else ():
            with contextlib.suppress(InputError, OSError):
                notes = (existing.manifest(key) or {}).get("notes", {})
                backbone = notes.get("encoder") or notes.get("backbone") or backbone
        places.append(lambda: resolve_model(existing, backbone))
    for place in [*places, lambda: backbone]:
        with contextlib.suppress(InputError, OSError):
            return find_model_folder(place())
    return None


def encoder_options(values: Mapping[str, Any]) -> EncoderOptions:
    """Returns the encoder options among the options of a job."""
    names = {each.name for each in dataclasses.fields(EncoderOptions)} & values.keys()
    return EncoderOptions(**{name: values[name] for name in names if values[name] is not None})
