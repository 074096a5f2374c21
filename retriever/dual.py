"""Training of the dual encoder (DPTDR, Eq. 1 and 3): deep prompts or an adapter of a frozen backbone, or all of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from retriever.attention import PromptShape, reach
from retriever.batching import TextTokenizer, Tokens, padded, plan
from retriever.encoder import open_pooled
from retriever.errors import Diverged, InputError
from retriever.evaluation.workers import share_items
from retriever.kernels import attention_dropouts, remove_dropout, swap_dropout
from retriever.loading.configuration import load_config
from retriever.lora.adapter import FOLDER as ADAPTER_FOLDER
from retriever.lora.adapter import add_adapter, merge_adapter, save_adapter
from retriever.lora.options import LoraOptions
from retriever.losses import (
    DISTILLATION,
    MAX_SCALE,
    Labels,
    LearnedTemperature,
    Loss,
    NegativesFrom,
    batch_loss,
    teacher_logits,
)
from retriever.optimizers.groups import ParameterGroup
from retriever.options import SIDES, EncoderOptions, Side
from retriever.pooling import Head, Pooled
from retriever.prompts import (
    PROVIDERS,
    Parametrisation,
    PromptInputs,
    PromptProvider,
    Sides,
    TaskPrompt,
    backbone_of,
    check_initial_prompt,
    check_offsets,
)
from retriever.recipe import Recipe, read_recipe, settings_of, with_projection
from retriever.reranker_data import NegativeDraw, PositiveDraw, TrainingData, batch_at
from retriever.saving import restored, save_encoder
from retriever.sparse.flops import MIN_WORDS, FlopsOptions, flops, mean_words
from retriever.synthesis.divergence import regulariser
from retriever.synthesis.options import DivergenceOptions, SynthesisOptions
from retriever.synthesis.provider import SynthesisedPrompt
from retriever.synthesis.task_prompts import TaskPrompts
from retriever.synthesis.words import no_words
from retriever.system import Batch, Chunk, Output, checkpoint_activations

Method = Literal["prompt", "lora", "finetune"]

COSINE_TEMPERATURE = 0.05  # as in sentence-transformers' and SimCSE's cosine losses; inner products use 1 (DPTDR)
# AdamW changes log T by about this much in a step, so T can change by a factor of e in 1,000 steps. The learning rates
# of weights do not suit it: 2e-5 of fine-tuning changes T by 2 % in as many steps.
TEMPERATURE_LR = 1e-3
_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens per chunk, padding included
# The output of a batch that is the sum of the sparse vectors of a side.
_TOTALS: dict[Side, str] = {"query": "query_total", "passage": "passage_total"}
_ATTENTION = "attention"  # the output of a batch that holds the weights of the basic prompts of each query
_COMPUTED: tuple[Parametrisation, ...] = ("synthesised", "per-task")  # prompts of queries alone, by networks
TASKS = "tasks"  # the folder with the prompt of each task
_QUERIES = 4096  # queries that are checked at a time
_STEP = 16


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the trained weights and the batches.

    Attributes:
        method: "prompt" trains deep prompts only, "lora" an adapter of the backbone, "finetune" all weights.
        sides: "tied" trains one prompt, or one encoder, for queries and passages, "untied" one for each (DPR; DPTDR on
            NQ; HYPER, Eq. 8), "query" one for queries only.
        length: Tokens of a prompt (DPTDR: 32; 128 on MS MARCO).
        parametrisation: "embedding" trains the prompt's values, "mlp" a network that computes them, "synthesised" a
            network that computes a prompt for each query (HYPER), "per-task" a prompt for each task.
        prompt_dropout: Fraction of the prompt's values that are dropped out, with a separate mask for each text.
        position_offset: The positions of a text start after the prompt; False: at their usual place.
        projection: Numbers of a vector after a new linear layer over the pooled vector, without bias and in float32
            (GTR: 768); None: there is no new layer. Method "finetune" only.
        dropout: Train with the backbone's dropout of hidden states; False: without (GTR).
        batch: Queries per step over all workers, each with one positive and `negatives_per_query` mined negatives.
        negatives_from: "batch": the other passages of the batch are negatives of the contrastive loss too; "own": only
            the query's mined ones are (HYPER, Eq. 6).
        negatives_per_query: Mined negatives per query.
        draw_positive: Which positive a query brings: "random" in each epoch, "weighted" by the weights of the
            positives, or always the "first".
        draw_negatives: Which mined negatives a query brings: "random" in each epoch, or "windows" of one shuffled
            order.
        loss: The loss of a batch; "kl" and "margin-mse" need the teacher scores of a re-ranker.
        contrastive_weight: A distillation loss is increased by this times the contrastive loss.
        temperature: Similarities are divided by it (None: 1, or 0.05 for cosines).
        learn_temperature: Train the temperature, from that value, with 1 / temperature at most 100.
        temperature_lr: Peak learning rate of a learned temperature (None: 1e-3).
        seed: Seed of all random numbers.
        lora: Options of the adapter; None unless the method is "lora".
        flops: Options of the regulariser of sparse vectors; None for dense ones.
        synthesis: Options of prompts that are computed from each query, among them their length, or of prompts of each
            task, whose number is that of the tasks; None unless the parametrisation is "synthesised" or "per-task".
        divergence: Options of the regulariser of these prompts; None: there is none.
    """

    method: Method = "prompt"
    sides: Sides = "tied"
    length: int = 32
    parametrisation: Parametrisation = "embedding"
    prompt_dropout: float = 0.1
    position_offset: bool = False
    projection: int | None = None
    dropout: bool = True
    batch: int = 32
    negatives_from: NegativesFrom = "batch"
    negatives_per_query: int = 1
    draw_positive: PositiveDraw = "random"
    draw_negatives: NegativeDraw = "random"
    loss: Loss = "contrastive"
    contrastive_weight: float = 0.0
    temperature: float | None = None
    learn_temperature: bool = False
    temperature_lr: float | None = None
    seed: int = 0
    lora: LoraOptions | None = None
    flops: FlopsOptions | None = None
    synthesis: SynthesisOptions | None = None
    divergence: DivergenceOptions | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        for name, allowed in (
            ("method", get_args(Method)),
            ("sides", get_args(Sides)),
            ("parametrisation", get_args(Parametrisation)),
            ("negatives_from", get_args(NegativesFrom)),
            ("draw_positive", get_args(PositiveDraw)),
            ("draw_negatives", get_args(NegativeDraw)),
            ("loss", get_args(Loss)),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.length < 1 or self.batch < 1 or self.negatives_per_query < 0 or self.seed < 0:
            raise InputError(f"length={self.length} batch={self.batch} negatives_per_query={self.negatives_per_query} "
                             f"seed={self.seed}: expected counts")  # fmt: skip
        if not 0 <= self.prompt_dropout < 1 or (self.temperature is not None and not self.temperature > 0):
            raise InputError(f"prompt_dropout={self.prompt_dropout} temperature={self.temperature}: expected a share, "
                             "and more than 0")  # fmt: skip
        if not (self.contrastive_weight >= 0 and math.isfinite(self.contrastive_weight)):
            raise InputError(f"contrastive_weight={self.contrastive_weight}: expected 0 or more")
        if self.contrastive_weight and not self.distills:
            raise InputError(f"contrastive_weight={self.contrastive_weight} loss={self.loss}: expected a distillation "
                             f"loss, to which it is added: {' or '.join(DISTILLATION)}")  # fmt: skip
        if self.distills and not self.negatives_per_query:
            raise InputError(f"loss={self.loss} negatives_per_query=0: expected at least 1 negative, whose score is "
                             "compared with the teacher's")  # fmt: skip
        has_contrastive = not self.distills or self.contrastive_weight
        if self.negatives_from == "own" and (not self.negatives_per_query or "symmetric" in self.loss):
            raise InputError(f"parameter negatives_from own, parameter negatives_per_query {self.negatives_per_query}, "
                             f"parameter loss {self.loss}: expected at least 1 negative, and no symmetric loss, whose "
                             "negatives are those of the batch")  # fmt: skip
        if self.negatives_from == "own" and not has_contrastive:
            raise InputError(f"parameter negatives_from own, parameter loss {self.loss}: expected a contrastive loss, "
                             "whose negatives they are, or parameter contrastive_weight above 0")  # fmt: skip
        if self.learn_temperature and self.temperature is not None and self.temperature * MAX_SCALE < 1:
            raise InputError(f"learn_temperature temperature={self.temperature}: expected at least {1 / MAX_SCALE}, "
                             "below which a learned temperature does not fall")  # fmt: skip
        if self.temperature_lr is not None and not self.learn_temperature:
            raise InputError(f"temperature_lr={self.temperature_lr} learn_temperature=False: expected a learned "
                             "temperature, whose learning rate it is")  # fmt: skip
        if self.temperature_lr is not None and not (self.temperature_lr > 0 and math.isfinite(self.temperature_lr)):
            raise InputError(f"temperature_lr={self.temperature_lr}: expected more than 0")
        if self.method != "prompt" and self.position_offset:
            raise InputError(f"position_offset: method {self.method} trains no prompt after which a text could start")
        if self.projection is not None and (self.method, self.sides == "query") != ("finetune", False):
            raise InputError(
                f"projection={self.projection} method={self.method} sides={self.sides}: expected method finetune, "
                "which trains the new layer, and both sides, whose vectors it changes"
            )
        if self.projection is not None and self.projection < 1:
            raise InputError(f"projection={self.projection}: expected at least 1")
        if (self.method == "lora") != (self.lora is not None):
            raise InputError(
                f"method {self.method} lora={self.lora}: expected options of the adapter for method lora alone"
            )
        self._check_synthesis()
        if self.flops is not None and self.flops.passages and self.sides == "query":
            raise InputError(f"sides=query flops_passages={self.flops.passages:g}: vectors of passages are stored, and "
                             "no regulariser changes them: expected 0")  # fmt: skip

    def _check_synthesis(self) -> None:
        """Raises InputError for options that prompts of queries cannot be trained with."""
        if (self.parametrisation in _COMPUTED) != (self.synthesis is not None):
            raise InputError(f"parametrisation={self.parametrisation} synthesis={self.synthesis}: expected options of "
                             f"computed prompts for parametrisation {' and '.join(_COMPUTED)} alone")  # fmt: skip
        if self.divergence is not None and self.parametrisation != "synthesised":
            raise InputError(f"parametrisation={self.parametrisation} divergence={self.divergence}: regularises "
                             "prompts that are computed from each query: use synthesised")  # fmt: skip
        if self.synthesis is None:
            return
        if (self.method, self.sides) != ("prompt", "query"):
            raise InputError(f"parametrisation={self.parametrisation} method={self.method} sides={self.sides}: "
                             "expected method prompt and sides query, because only queries have computed "
                             "prompts")  # fmt: skip
        if self.position_offset:
            raise InputError(f"parametrisation={self.parametrisation} position_offset=True: a text starts at its usual "
                             "position after a computed prompt: leave out position_offset")  # fmt: skip
        if self.divergence is not None and self.synthesis.attention == "uniform":
            raise InputError("attention=uniform with a prompt regulariser: all queries have the same weights, which it "
                             "cannot change: give it weight 0")  # fmt: skip

    @property
    def distills(self) -> bool:
        """Whether the loss needs the teacher scores of a re-ranker."""
        return self.loss in DISTILLATION


class DualSystem:
    """A System: one backbone for both sides or one for each, with or without prompts, its data and its loss.

    With dtype bfloat16, a frozen backbone is stored in bfloat16, and the adapter of LoRA in float32; a trained backbone
    is stored in float32 and computes under autocast.

    Args:
        folder: Folder of the backbone.
        encoder: How text becomes a vector.
        tuning: Options of the trained weights and the batches.
        data: The training data; None if the system is not trained.
        device: The device of the model.
        dtype: The dtype of the forward and backward pass.
        checkpointing: Use activation checkpointing.
        start: Initial prompts.
        vectors: Returns the stored vectors of passages, int64 [n] -> float16 [n, dim]; passages are then never encoded.
            None: the model encodes them. Needed for training with sides "query".

    Raises:
        InputError: If the backbone or the initial prompt cannot be used, if stored vectors are missing, or if a
            training query has no word from which its prompt could be computed.
    """

    module: nn.Module

    def __init__(
        self, folder: Path, encoder: EncoderOptions, tuning: TuneOptions, data: TrainingData | None, *,
        device: torch.device, dtype: torch.dtype, checkpointing: bool = False, start: TaskPrompt | None = None,
        vectors: Callable[[np.ndarray], np.ndarray] | None = None,
    ):  # fmt: skip
        if tuning.sides == "query" and data is not None and vectors is None:
            raise InputError("sides='query': expected stored vectors of the passages (vectors), which are not trained")
        torch.manual_seed(tuning.seed)
        self.tuning, self.data, self.device, self.dtype, self.vectors = tuning, data, device, dtype, vectors
        self.encoder = encoder
        self.recipe = recipe = trained_recipe(folder, encoder, tuning)
        if recipe.is_sparse != (tuning.flops is not None):
            raise InputError(f"{folder}: pooling={recipe.pooling} flops={tuning.flops}: expected options of the FLOPS "
                             "regulariser for pooling=splade, and none for other vectors")  # fmt: skip
        self.tokenizer = TextTokenizer(recipe, encoder)
        if tuning.parametrisation == "synthesised" and data is not None:
            for first in range(0, len(data.queries), _QUERIES):
                texts = data.queries[first : first + _QUERIES]
                self._check_words(texts, self.tokenizer(texts, side="query"))
        self.autocast = tuning.method == "finetune" and dtype == torch.bfloat16
        self._dropouts = attention_dropouts(load_config(recipe.backbone, **recipe.config_args))
        self.pooled, self.head = self._open_encoder()
        self.encoders: dict[Side, tuple[Pooled, Head]] = dict.fromkeys(SIDES, (self.pooled, self.head))
        self.prompts = nn.ModuleDict()
        modules: dict[str, nn.Module] = {"backbone": self.pooled, "head": self.head, "prompts": self.prompts}
        if tuning.method == "prompt":
            shape = reach(self.pooled.backbone)
            names = {"tied": ["both"], "untied": ["query", "passage"], "query": ["query"]}[tuning.sides]
            if tuning.position_offset:
                self.pooled.check_offsets()
                check_offsets(recipe, offsets_of(tuning))
            if start is not None:
                check_initial_prompt(start, settings_of(recipe, encoder), shape)
            for name in names:
                side: Side = "passage" if name == "passage" else "query"
                self.prompts[name] = self._open_prompt(shape, side, start).to(device)
        elif tuning.sides == "untied":
            self.encoders["passage"] = self._open_encoder()
            modules["passage"] = nn.ModuleDict(dict(zip(("backbone", "head"), self.encoders["passage"], strict=True)))
        elif tuning.sides == "query":
            del self.encoders["passage"]  # the model of passages is the one that made the stored vectors
        if checkpointing:
            for model in {model for model, _ in self.encoders.values()}:
                checkpoint_activations(model.backbone)
        self.module = nn.ModuleDict(modules)
        cosine = self.head.normalized
        self.temperature = tuning.temperature or (COSINE_TEMPERATURE if cosine else 1.0)
        self.learned = LearnedTemperature(self.temperature).to(device) if tuning.learn_temperature else None
        if self.learned is not None:
            self.module["temperature"] = self.learned

    def parameter_groups(self) -> list[ParameterGroup]:
        """Returns the group of a learned temperature: AdamW with its own learning rate and without weight decay."""
        if self.learned is None:
            return []
        lr = TEMPERATURE_LR if self.tuning.temperature_lr is None else self.tuning.temperature_lr
        return [ParameterGroup(parameters=self.learned.parameters(), lr=lr, weight_decay=0.0, optimizer="adamw")]

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns the queries and passages of a step, each passage once; a worker gets every world-th of both."""
        assert self.data is not None
        options = self.tuning
        queries, rows = batch_at(
            self.data, options, step, draw_positive=options.draw_positive, draw_negatives=options.draw_negatives
        )
        passages, places = np.unique(rows, return_inverse=True)
        positives = places.reshape(rows.shape)[:, 0]
        ignored = np.zeros((len(queries), len(passages)), bool)
        for place, query in enumerate(queries):
            ignored[place] = np.isin(passages, self.data.relevant(query))
            ignored[place, positives[place]] = False
        chunks = self.chunks([self.data.queries[query] for query in queries[rank::world]], "query",
                             np.arange(rank, len(queries), world))  # fmt: skip
        if options.parametrisation == "per-task":
            chunks = [with_tasks(chunk, self.data.tasks_of(queries)) for chunk in chunks]
        chunks += self.passage_chunks(passages[rank::world], len(queries) + np.arange(rank, len(passages), world))
        labels = Labels(torch.from_numpy(positives), torch.from_numpy(ignored))
        if options.negatives_from == "own":
            labels = labels._replace(groups=torch.from_numpy(places.reshape(rows.shape)))
        if options.distills:
            scores = [self.data.teacher_scores(query, group) for query, group in zip(queries, rows, strict=True)]
            teacher = teacher_logits(torch.from_numpy(np.stack(scores)))
            labels = labels._replace(groups=torch.from_numpy(places.reshape(rows.shape)), teacher=teacher)
        outputs = {"dense": Output(self.recipe.dim, len(queries) + len(passages))}
        given = {"queries": len(queries), **labels._asdict()}
        if options.synthesis is not None and options.divergence is not None:
            outputs[_ATTENTION] = Output(options.synthesis.prompts, len(queries))
            given["tasks"] = torch.from_numpy(self.data.tasks_of(queries))
        if options.flops is not None:
            outputs |= {_TOTALS[side]: Output(self.recipe.dim) for side in self.encoded_sides}
            given["step"] = step
        return Batch(outputs, chunks, given)

    def compose(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of passages, with titles as the options say."""
        assert self.data is not None
        return self.tokenizer.compose(*self.data.passages(rows), self.encoder.title)

    def passage_chunks(self, passages: np.ndarray, rows: np.ndarray) -> list[Chunk]:
        """Cuts passages into chunks; `rows` are their positions in the batch. One chunk holds all stored vectors."""
        if self.vectors is None:
            return self.chunks(self.compose(passages), "passage", rows)
        if not len(passages):
            return []
        return [Chunk({"dense": rows}, torch.from_numpy(self.vectors(passages).astype(np.float32)))]

    def chunks(self, texts: Sequence[str], side: Side, rows: np.ndarray) -> list[Chunk]:
        """Cuts texts into chunks of nearly equal length; `rows` are their positions in the batch."""
        if not len(texts):
            return []
        tokens: Tokens = self.tokenizer(texts, side=side)
        if side == "query" and self.tuning.parametrisation == "synthesised":
            self._check_words(texts, tokens)
        names = ["dense"] if side == "passage" or self.tuning.divergence is None else ["dense", _ATTENTION]
        batches = plan(tokens.lengths, _CHUNK[self.device.type], _STEP, self.recipe.positions)
        filled = padded(tokens, batches, side=self.recipe.padding_side, pad_id=self.tokenizer.pad_id)
        return [
            Chunk(dict.fromkeys(names, rows[text_rows]), (side, ids, lengths), ids.numel())
            for text_rows, ids, lengths in filled
        ]

    def _check_words(self, texts: Sequence[str], tokens: Tokens) -> None:
        """Raises InputError for a query without a word, from which its prompt could be computed; names it."""
        words = np.add.reduceat(self.tokenizer.are_words(tokens.ids).astype(np.int64), tokens.starts)
        if not words.all():
            raise no_words(f"the query {texts[int(np.flatnonzero(words == 0)[0])][:80]!r}")

    def forward(self, chunk: Chunk) -> tuple[dict[str, torch.Tensor], None]:
        """Returns the vectors of a chunk for the loss as "dense", float32 [n, dim].

        They are scaled if the temperature is learned. Of sparse vectors, the batch also gets the sum of each side that
        is encoded. If prompts of queries are regularised, it gets the weights of the basic prompts as "attention".
        """
        vectors, weights = self._encode(chunk)
        outputs = {"dense": vectors if self.learned is None else vectors * self.learned()}
        if self.tuning.flops is not None and not isinstance(chunk.inputs, torch.Tensor):
            outputs[_TOTALS[chunk.inputs[0]]] = vectors.sum(0, keepdim=True)
        if _ATTENTION in chunk.rows:
            assert weights is not None
            outputs[_ATTENTION] = weights
        return outputs, None

    def _vectors(self, chunk: Chunk) -> torch.Tensor:
        """Returns the vectors of a chunk, float32 [n, dim]."""
        return self._encode(chunk)[0]

    def _encode(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the vectors of a chunk, float32 [n, dim], and the weights of the basic prompts, float32 [n, N].

        Stored vectors are constants. The weights are None unless prompts are computed from queries.
        """
        if isinstance(chunk.inputs, torch.Tensor):
            return chunk.inputs.to(self.device), None
        side, *texts = chunk.inputs
        inputs = PromptInputs(*(each.to(self.device) for each in texts))
        provider, (model, head) = self._prompt(side), self.encoders[side]
        rows = weights = None
        if isinstance(provider, SynthesisedPrompt):
            rows, weights = provider.synthesise(inputs)
        elif provider is not None:
            rows = provider(inputs)
        extra = {} if rows is None else {"prompt": rows}
        count = len(chunk.rows["dense"])  # a single text is repeated
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            pooled = model(inputs.ids, inputs.lengths, **extra)
        return head(pooled[:count]), None if weights is None else weights[:count]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the loss over all queries and passages of the batch."""
        options, queries, vectors = self.tuning, batch.given["queries"], outputs["dense"]
        labels = Labels(*(batch.given[name] for name in Labels._fields)).to(vectors.device)
        temperature = self.temperature if self.learned is None else 1.0  # `forward` has applied it
        loss = batch_loss(options.loss, vectors[:queries], vectors[queries:], labels, temperature,
                          options.contrastive_weight, options.negatives_from)  # fmt: skip
        if options.divergence is not None:
            tasks = batch.given["tasks"].to(vectors.device)
            loss = loss + regulariser(outputs[_ATTENTION], tasks, options.divergence)
        return loss if options.flops is None else loss + self._regulariser(options.flops, outputs, batch)

    def _regulariser(
        self, options: FlopsOptions, outputs: Mapping[str, torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """Returns the weighted FLOPS of queries and of passages, a scalar; stored passages have none.

        Raises:
            Diverged: If the vectors of one side have less than one word on average: then they find nothing.
        """
        step, queries = batch.given["step"], batch.given["queries"]
        parts = outputs["dense"].detach().split([queries, len(outputs["dense"]) - queries])
        sides = {side: part for side, part in zip(SIDES, parts, strict=True) if side in self.encoded_sides}
        for side, vectors in sides.items():
            if (words := mean_words(vectors)) < MIN_WORDS:
                name = "flops_queries" if side == "query" else "flops_passages"
                raise Diverged(
                    f"step {step + 1}: the sparse vectors of the {side} side have {words:.2f} non-zero words on "
                    f"average, expected at least {MIN_WORDS:g}: give a smaller parameter {name} than "
                    f"{getattr(options, name.removeprefix('flops_')):g}, or a smaller lr, under another name"
                )
        weights = {"query": options.queries, "passage": options.passages}
        terms = [weights[side] * flops(outputs[_TOTALS[side]], len(vectors)) for side, vectors in sides.items()]
        return options.ramp(step) * torch.stack(terms).sum()

    @property
    def encoded_sides(self) -> tuple[Side, ...]:
        """The sides whose texts are encoded in training: queries alone if vectors of passages are stored."""
        return SIDES if self.vectors is None else SIDES[:1]

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.recipe.dim

    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns vectors of the current model, float32 [n, dim]; workers share the texts, and all get the result."""
        return share_items(
            self.module,
            lambda rows: self.chunks([texts[row] for row in rows], side, rows),
            self._vectors,
            (len(texts), self.recipe.dim),
            device=self.device,
            rank=rank,
            world=world,
        )

    def encode_passages(self, passages: np.ndarray, rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns the vectors of passages by row, float32 [n, dim]: the stored ones, or those of the current model."""
        if self.vectors is not None:
            return self.vectors(passages).astype(np.float32)
        return self.encode(self.compose(passages), "passage", rank, world)

    def save(self, folder: Path) -> None:
        """Saves a task's prompt, or models for sentence-transformers: one, or untied ones in `query/`, `passage/`.

        If each task has a prompt, the saved one is their mean, and `tasks/NAME` holds that of a task.
        The model of an adapter has it merged into its weights, and in its folder `adapter/` in PEFT's format.
        """
        if self.tuning.method == "prompt":
            self.prompt().save(folder)
            for task, prompt in self.task_prompts().items():
                (place := folder / TASKS / task).mkdir(parents=True)
                prompt.save(place)
            return
        for side, (model, head) in self.encoders.items():
            if self.tuning.sides == "tied" and side == "passage":
                continue  # both sides have the same encoder
            place = folder if self.tuning.sides == "tied" else folder / side
            if self.tuning.method == "lora":
                save_adapter(place / ADAPTER_FOLDER, model.backbone)
                merged = open_pooled(self.recipe, torch.float32)
                merge_adapter(merged.backbone, place / ADAPTER_FOLDER)
                save_encoder(place, self.recipe, merged.saved)
                continue
            with restored(model.saved.config, self._dropouts):
                save_encoder(place, self.recipe, model.saved, head)

    def prompt(self) -> TaskPrompt:
        """Returns the current prompts, in the form in which they are saved."""
        prompts: dict[str, Any] = dict(self.prompts.items())
        backbone = backbone_of(settings_of(self.recipe, self.encoder))
        options = replace(self.encoder, compile="auto")
        if isinstance(provider := prompts.get("query"), SynthesisedPrompt):
            return TaskPrompt(backbone, options, None, None, synthesis=provider.saved())
        matrices = {name: prompt.matrix().cpu() for name, prompt in prompts.items()}
        query, passage = matrices.get("query", matrices.get("both")), matrices.get("passage", matrices.get("both"))
        return TaskPrompt(backbone, options, query, passage, self.tuning.position_offset)

    def task_prompts(self) -> dict[str, TaskPrompt]:
        """Returns the prompts of the tasks by name, of which `prompt` is the mean; empty unless each task has one."""
        prompts: dict[str, Any] = dict(self.prompts.items())
        if not isinstance(provider := prompts.get("query"), TaskPrompts):
            return {}
        mean = self.prompt()
        return {task: replace(mean, query=matrix.cpu()) for task, matrix in provider.matrices().items()}

    def _open_prompt(self, shape: PromptShape, side: Side, start: TaskPrompt | None) -> nn.Module:
        """Returns the provider of a side, which continues from `start`."""
        tuning = self.tuning
        if tuning.synthesis is not None:
            backbone: Any = self.pooled.backbone
            table = backbone.get_input_embeddings().weight
            if tuning.parametrisation == "per-task":
                return self._open_task_prompts(shape, table.shape[1], start)
            are_words = self.tokenizer.are_words(np.arange(len(table)))
            provider = SynthesisedPrompt(shape, table, are_words, self.recipe.padding_side, tuning.synthesis,
                                         tuning.prompt_dropout)  # fmt: skip
            if start is not None:
                provider.continue_from(start)
            return provider
        prompt = PROVIDERS[tuning.parametrisation](
            shape, tuning.length, tuning.prompt_dropout, position_offset=tuning.position_offset
        )
        if start is not None:
            if start.synthesis is not None:
                raise InputError("the prompt to begin from is computed from each query: use parametrisation "
                                 "synthesised, or another prompt")  # fmt: skip
            prompt.start(start.of(side))
        return prompt

    def _open_encoder(self) -> tuple[Pooled, Head]:
        """Returns an encoder with the backbone's weights, without attention dropout, which prevents fused kernels."""
        frozen = self.tuning.method != "finetune"
        off: dict[str, Any] = dict.fromkeys(self._dropouts, 0.0)
        pooled = open_pooled(self.recipe, self.dtype if frozen else torch.float32, **off).to(self.device)
        pooled.requires_grad_(not frozen)
        backbone: Any = pooled.backbone
        head = Head(self.recipe, self.encoder.dimension, self.tuning.seed).to(self.device).requires_grad_(not frozen)
        swap_dropout(pooled)
        if not self.tuning.dropout:
            remove_dropout(pooled)
        if self.tuning.lora is not None:
            add_adapter(backbone, self.tuning.lora)
        if self.tuning.method != "prompt":
            with contextlib.suppress(InputError):  # other architectures train with torch's own attention
                reach(backbone)
        return pooled, head

    def _prompt(self, side: Side) -> PromptProvider | None:
        prompts: dict[str, Any] = dict(self.prompts.items())
        provider: PromptProvider | None = prompts.get("both", prompts.get(side))
        return provider


    def _open_task_prompts(self, shape: PromptShape, width: int, start: TaskPrompt | None) -> TaskPrompts:
        """Returns the provider of a prompt for each task. Raises InputError for prompts that it cannot be used for."""
        assert self.tuning.synthesis is not None
        if start is not None:
            raise InputError("parametrisation per-task cannot start from an initial prompt: use embedding")
        names = () if self.data is None else self.data.task_names()
        if len(names) != self.tuning.synthesis.prompts:
            raise InputError(f"parametrisation per-task: {self.tuning.synthesis.prompts} prompts for {len(names)} "
                             f"tasks ({', '.join(names)}): expected a prompt for each")  # fmt: skip
        return TaskPrompts(shape, width, names, self.tuning.synthesis, self.tuning.prompt_dropout)


def with_tasks(chunk: Chunk, tasks: np.ndarray) -> Chunk:
    """Returns a chunk of queries with their tasks; tasks: of all queries of the batch, int64 [queries]."""
    side, ids, lengths = chunk.inputs
    of_rows = np.resize(tasks[chunk.rows["dense"]], len(ids))  # a single text is repeated
    return replace(chunk, inputs=(side, ids, lengths, torch.from_numpy(of_rows)))


def trained_recipe(folder: Path, encoder: EncoderOptions, tuning: TuneOptions) -> Recipe:
    """Returns how the trained system turns text into vectors: as the backbone's folder says, and by a new projection.

    Raises:
        InputError: If the folder cannot be used, or has layers after pooling already, or if vectors would be cut.
    """
    recipe = read_recipe(folder, encoder)
    if tuning.projection is None:
        return recipe
    if recipe.is_sparse:
        raise InputError(f"projection={tuning.projection} pooling={recipe.pooling}: sparse vectors have a number "
                         "for each word, which a layer would mix: leave out the projection")  # fmt: skip
    if encoder.dimension is not None:
        raise InputError(f"projection={tuning.projection} dimension={encoder.dimension}: vectors of a new layer are "
                         "not cut: give the projection the wanted size")  # fmt: skip
    return with_projection(recipe, tuning.projection)


def offsets_of(tuning: TuneOptions) -> dict[Side, int]:
    """Returns by how many positions the texts of each side start later than usual."""
    offset = tuning.length if tuning.position_offset else 0
    return {"query": offset, "passage": 0 if tuning.sides == "query" else offset}
