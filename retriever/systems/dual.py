"""Training of the dual encoder (DPTDR, Eq. 1 and 3): deep prompts or an adapter of a frozen backbone, or all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from retriever.encoding.encoder import open_pooled
from retriever.encoding.saving import restored, save_encoder
from retriever.errors import Diverged, InputError
from retriever.forward.attention import reach
from retriever.forward.batching import TextTokenizer, Tokens, padded, plan
from retriever.forward.kernels import attention_dropouts, remove_dropout, swap_dropout
from retriever.forward.pooling import Head, Pooled
from retriever.forward.prompt_rows import PromptInputs, PromptProvider, PromptShape
from retriever.losses import Labels, LearnedTemperature, batch_loss, category_loss, overlap, teacher_logits, topic_loss
from retriever.losses.divergence import regulariser
from retriever.losses.flops import MIN_WORDS, FlopsOptions, flops, mean_words
from retriever.model.configuration import load_config
from retriever.model.recipe import Recipe, read_recipe, settings_of, with_projection
from retriever.options import PLURALS, SIDES, EncoderOptions, Side
from retriever.prompts.prompts import PROVIDERS, TaskPrompt, backbone_of, check_initial_prompt, check_offsets
from retriever.prompts.query_words import NO_WORDS, count_words
from retriever.prompts.synthesis_provider import SynthesisedPrompt
from retriever.prompts.task_prompts import TaskPrompts
from retriever.systems.lora import FOLDER as ADAPTER_FOLDER
from retriever.systems.lora import add_adapter, merge_adapter, save_adapter
from retriever.topics.network import TopicPrompts, topic_tokens
from retriever.topics.saved import SavedTopics
from retriever.topics.training import TrainingTopics
from retriever.training.dev_workers import share_items
from retriever.training.parameter_groups import ParameterGroup
from retriever.training.reranker_data import TrainingData, batch_at
from retriever.training.system import Batch, Chunk, Output, checkpoint_activations
from retriever.training.tuning_options import TuneOptions, offsets_of

__all__ = ["DualSystem", "TuneOptions"]

COSINE_TEMPERATURE = 0.05  # as in sentence-transformers' and SimCSE's cosine losses; inner products use 1 (DPTDR)
# AdamW changes log T by about this much in a step, so T can change by a factor of e in 1,000 steps. The learning rates
# of weights do not suit it: 2e-5 of fine-tuning changes T by 2 % in as many steps.
TEMPERATURE_LR = 1e-3
PROMPT_LR = 1e-3  # of HYPER's modules, if the backbone is trained too
_CHUNK = {"cpu": 4096, "cuda": 65536}  # tokens per chunk, padding included
# Bytes of the prompts of a chunk whose prompts are computed from each query. At 65,536 tokens a chunk may hold 4,096
# queries, whose prompts of 100 tokens take 28 GiB over BERT-base.
_PROMPT_BYTES = 1 << 31
# The output of a batch that is the sum of the sparse vectors of a side.
_TOTALS: dict[Side, str] = {"query": "query_total", "passage": "passage_total"}
_ATTENTION = "attention"  # the output of a batch that holds the weights of the basic prompts of each query
_TOPICS = "topics"  # the output of a batch that holds the vectors of its passages under each of some topics
PROMPT = "prompt"  # the folder with the prompts over a trained backbone
TASKS = "tasks"  # the folder with the prompt of each task
_QUERIES = 4096  # queries that are checked at a time
_STEP = 16


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
        topics: The topics of queries and passages; needed for prompts of topics, also without training data.

    Raises:
        InputError: If the backbone or the initial prompt cannot be used, if stored vectors or topics are missing, or if
            a training query has no word from which its prompt could be computed.
    """

    module: nn.Module

    def __init__(
        self,
        folder: Path,
        encoder: EncoderOptions,
        tuning: TuneOptions,
        data: TrainingData | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        checkpointing: bool = False,
        start: TaskPrompt | None = None,
        vectors: Callable[[np.ndarray], np.ndarray] | None = None,
        topics: TrainingTopics | None = None,
    ):
        if tuning.sides == "query" and data is not None and vectors is None:
            raise InputError("sides='query': expected stored vectors of the passages (vectors), which are not trained")
        if (topics is None) != (tuning.topics is None):
            raise InputError(
                "parametrisation topics: expected the topics of queries and passages (topics), and for "
                "other parametrisations none"
            )
        torch.manual_seed(tuning.seed)
        self.topics = topics
        self.tuning, self.data, self.device, self.dtype, self.vectors = tuning, data, device, dtype, vectors
        self.encoder = encoder
        self.recipe = recipe = trained_recipe(folder, encoder, tuning)
        if recipe.is_sparse != (tuning.flops is not None):
            raise InputError(
                f"{folder}: pooling={recipe.pooling} flops={tuning.flops}: expected options of the FLOPS "
                "regulariser for pooling=splade, and none for other vectors"
            )
        self.tokenizer = TextTokenizer(recipe, encoder)
        if data is not None:
            self.check_queries(data.queries)
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
        elif tuning.topics is not None:
            self.prompts["both"] = self._open_prompt(reach(self.pooled.backbone), "query", None).to(device)
        elif tuning.sides == "untied":
            self.encoders["passage"] = self._open_encoder()
            if tuning.synthesis is not None:
                self.prompts["query"] = self._open_prompt(reach(self.pooled.backbone), "query", None).to(device)
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
        """Returns the groups of a learned temperature, and of prompts that are trained with the backbone.

        Both have AdamW with their own learning rate and without weight decay.
        """
        rates: list[tuple[nn.Module, float]] = []
        if self.learned is not None:
            lr = TEMPERATURE_LR if self.tuning.temperature_lr is None else self.tuning.temperature_lr
            rates.append((self.learned, lr))
        if self.tuning.method == "finetune" and len(self.prompts):
            rates.append((self.prompts, PROMPT_LR))
        return [
            ParameterGroup(parameters=module.parameters(), lr=lr, weight_decay=0.0, optimizer="adamw")
            for module, lr in rates
        ]

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns the queries and passages of a step, each passage once; a worker gets every world-th of both."""
        assert self.data is not None
        options = self.tuning
        queries, rows = batch_at(
            self.data, options, step, draw_positive=options.draw_positive, draw_negatives=options.draw_negatives
        )
        passages, places = np.unique(rows, return_inverse=True)
        groups = places.reshape(rows.shape)
        positives = groups[:, 0]
        ignored = np.zeros((len(queries), len(passages)), bool)
        for place, query in enumerate(queries):
            ignored[place] = np.isin(passages, self.data.relevant(query))
            ignored[place, positives[place]] = False
        chunks = self.chunks(
            [self.data.queries[query] for query in queries[rank::world]], "query", np.arange(rank, len(queries), world)
        )
        if options.parametrisation == "per-task":
            tasks = self.data.tasks_of(queries)
            chunks = [with_tasks(chunk, tasks[chunk.rows["dense"]]) for chunk in chunks]
        chunks += self.passage_chunks(passages[rank::world], len(queries) + np.arange(rank, len(passages), world))
        if self.topics is not None:
            of_queries = self.topics.of_queries(queries, passages[positives])
            of_rows = np.concatenate([of_queries, self.topics.passages[passages]])
            chunks = [with_tasks(chunk, of_rows[chunk.rows["dense"]]) for chunk in chunks]
        labels = Labels(torch.from_numpy(positives), torch.from_numpy(ignored))
        if options.negatives_from == "own" or options.distills:
            labels = labels._replace(groups=torch.from_numpy(groups))
        if options.distills:
            scores = [self.data.teacher_scores(query, group) for query, group in zip(queries, rows, strict=True)]
            labels = labels._replace(teacher=teacher_logits(torch.from_numpy(np.stack(scores))))
        if options.categories is not None:
            assert self.data.categories is not None, "positives by category need the categories of passages"
            rho = overlap(torch.from_numpy(self.data.categories.members(passages)))
            labels = labels._replace(rho=rho[labels.positives])  # a query has the categories of its positive
        outputs = {"dense": Output(self.recipe.dim, len(queries) + len(passages))}
        given = {"queries": len(queries), **labels._asdict()}
        if options.synthesis is not None and options.divergence is not None:
            outputs[_ATTENTION] = Output(options.synthesis.prompts, len(queries))
            given["tasks"] = torch.from_numpy(self.data.tasks_of(queries))
        if options.flops is not None:
            outputs |= {_TOTALS[side]: Output(self.recipe.dim) for side in self.encoded_sides}
            given["step"] = step
        if (sampled := self._sampled_topics(step)) is not None:
            outputs[_TOPICS] = Output(self.recipe.dim, len(sampled) * len(passages))
            given["topics"] = len(sampled)
            chunks += self._topic_chunks(passages, sampled, rank, world)
        return Batch(outputs, chunks, given)

    def _sampled_topics(self, step: int) -> np.ndarray | None:
        """Returns the topics of the loss of topics in a step; None if there is no such loss."""
        options = self.tuning
        if self.topics is None or options.topics is None or not options.topics_of_loss(self.topics.model.num_topics):
            return None
        return self.topics.sample(options.topics, options.seed, step)

    def _topic_chunks(self, passages: np.ndarray, topics: np.ndarray, rank: int, world: int) -> list[Chunk]:
        """Returns a worker's share of the passages of a batch under each of some topics; row k N + i is passage i of N
        under topic k."""
        rows, texts = np.arange(rank, len(topics) * len(passages), world), self.compose(passages)
        chunks = self.chunks([texts[row % len(passages)] for row in rows], "passage", rows, _TOPICS)
        return [with_tasks(chunk, topics[chunk.rows[_TOPICS] // len(passages)]) for chunk in chunks]

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

    def chunks(self, texts: Sequence[str], side: Side, rows: np.ndarray, output: str = "dense") -> list[Chunk]:
        """Cuts texts into chunks of nearly equal length; `rows` are their positions in an output of the batch."""
        if not len(texts):
            return []
        tokens: Tokens = self.tokenizer(texts, side=side)
        if side == "query" and self.tuning.parametrisation == "synthesised":
            self._check_words(texts, tokens)
        names = [output] if side == "passage" or self.tuning.divergence is None else [output, _ATTENTION]
        planned = plan(tokens.lengths, _CHUNK[self.device.type], _STEP, self.recipe.positions)
        batches = [(some, width) for text_rows, width in planned for some in self._cut(text_rows, side)]
        filled = padded(tokens, batches, side=self.recipe.padding_side, pad_id=self.tokenizer.pad_id)
        return [
            Chunk(
                dict.fromkeys(names, rows[text_rows]),
                (side, ids, lengths),
                ids.numel(),
                {} if output == _TOPICS else {PLURALS[side]: tokens.cuts(text_rows)},
            )
            for text_rows, ids, lengths in filled
        ]

    def _cut(self, texts: np.ndarray, side: Side) -> list[np.ndarray]:
        """Returns the texts of a chunk in several ones if their computed prompts would take too much memory."""
        provider = self._prompt(side)
        if not isinstance(provider, SynthesisedPrompt):
            return [texts]
        most = max(1, _PROMPT_BYTES // provider.bytes_per_query)
        return [texts[start : start + most] for start in range(0, len(texts), most)]

    def check_queries(self, texts: Sequence[str]) -> None:
        """Raises InputError for a query without a word, from which its prompt would be computed; names it.

        Other prompts need no words. Topics of training queries are given, and were checked.
        """
        if self.tuning.parametrisation != "synthesised":
            return
        for first in range(0, len(texts), _QUERIES):
            some = texts[first : first + _QUERIES]
            self._check_words(some, self.tokenizer(some, side="query"))

    def _check_words(self, texts: Sequence[str], tokens: Tokens) -> None:
        words = count_words(tokens, self.tokenizer.are_words)
        if not words.all():
            raise InputError(f"the query {texts[int(np.flatnonzero(words == 0)[0])][:80]!r} {NO_WORDS}")

    def forward(self, chunk: Chunk) -> tuple[dict[str, torch.Tensor], None]:
        """Returns the vectors of a chunk for the loss as "dense" or as "topics", float32 [n, dim].

        They are scaled if the temperature is learned. Of sparse vectors, the batch also gets the sum of each side that
        is encoded. If prompts of queries are regularised, it gets the weights of the basic prompts as "attention".
        """
        vectors, weights = self._encode(chunk)
        name = _TOPICS if _TOPICS in chunk.rows else "dense"
        outputs = {name: vectors if self.learned is None else vectors * self.learned()}
        if self.tuning.flops is not None and name == "dense" and not isinstance(chunk.inputs, torch.Tensor):
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
        count = len(next(iter(chunk.rows.values())))  # a single text is repeated
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            pooled = model(inputs.ids, inputs.lengths, **extra)
        return head(pooled[:count]), None if weights is None else weights[:count]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the loss over all queries and passages of the batch."""
        options, queries, vectors = self.tuning, batch.given["queries"], outputs["dense"]
        labels = Labels(*(batch.given[name] for name in Labels._fields)).to(vectors.device)
        temperature = self.temperature if self.learned is None else 1.0  # `forward` has applied it
        both = vectors[:queries], vectors[queries:]
        if options.categories is not None:
            assert labels.rho is not None
            loss = category_loss(
                *both, labels.rho, temperature, options.categories.weight, labels.positives, labels.ignored
            )
        else:
            loss = batch_loss(
                options.loss, *both, labels, temperature, options.contrastive_weight, options.negatives_from
            )
        if _TOPICS in outputs:
            assert options.topics is not None
            assert options.categories is not None
            under_topics = outputs[_TOPICS].unflatten(0, (batch.given["topics"], -1))
            loss = loss + options.categories.weight * topic_loss(under_topics, options.topics.margin)
        if options.divergence is not None:
            tasks = batch.given["tasks"].to(vectors.device)
            loss = loss + regulariser(outputs[_ATTENTION], tasks, options.divergence)
        return loss if options.flops is None else loss + self._regulariser(options.flops, outputs, batch)

    def _regulariser(self, options: FlopsOptions, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
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

    def encode(
        self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1, topics: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns vectors of the current model, float32 [n, dim]; workers share the texts, and all get the result.

        `topics`, int64 [n], are those of the texts; None: they are inferred, if the prompts are those of topics.
        """
        if self.topics is not None and topics is None:
            topics = self.topics.infer(texts, side)

        def make_chunks(rows: np.ndarray) -> list[Chunk]:
            chunks = self.chunks([texts[row] for row in rows], side, rows)
            return chunks if topics is None else [with_tasks(chunk, topics[chunk.rows["dense"]]) for chunk in chunks]

        return share_items(
            self.module,
            make_chunks,
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
        topics = None if self.topics is None else self.topics.passages[passages]
        return self.encode(self.compose(passages), "passage", rank, world, topics)

    def save(self, folder: Path) -> None:
        """Saves a task's prompt, or models for sentence-transformers: one, or untied ones in `query/`, `passage/`.

        If each task has a prompt, the saved one is their mean, and `tasks/NAME` holds that of a task.
        Prompts that are trained with the backbone, over the model of `query/` or the only one, are in `prompt/`.
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
        if len(self.prompts):
            (folder / PROMPT).mkdir()
            self.prompt(folder if self.tuning.sides == "tied" else folder / "query").save(folder / PROMPT)

    def prompt(self, backbone_folder: Path | None = None) -> TaskPrompt:
        """Returns the current prompts, in the form in which they are saved.

        Args:
            backbone_folder: The folder of their backbone, if it is trained too; None: the frozen one.
        """
        prompts: dict[str, Any] = dict(self.prompts.items())
        recipe = self.recipe if backbone_folder is None else read_recipe(backbone_folder, self.encoder)
        backbone = backbone_of(settings_of(recipe, self.encoder))
        options = replace(self.encoder, compile="auto")
        if isinstance(provider := prompts.get("query"), SynthesisedPrompt):
            return TaskPrompt(backbone, options, None, None, synthesis=provider.saved())
        if isinstance(provider := prompts.get("both"), TopicPrompts):
            assert self.topics is not None
            saved = SavedTopics(self.topics.model, provider.matrices().cpu(), self.topics.wordless)
            return TaskPrompt(backbone, options, None, None, self.tuning.position_offset, topics=saved)
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
        if tuning.topics is not None:
            return self._open_topic_prompts(shape, start)
        if tuning.synthesis is not None:
            backbone: Any = self.pooled.backbone
            table = backbone.get_input_embeddings().weight
            if tuning.parametrisation == "per-task":
                return self._open_task_prompts(shape, table.shape[1], start)
            are_words = self.tokenizer.are_words(np.arange(len(table)))
            provider = SynthesisedPrompt(
                shape, table, are_words, self.recipe.padding_side, tuning.synthesis, tuning.prompt_dropout
            )
            if start is not None:
                provider.continue_from(start)
            return provider
        prompt = PROVIDERS[tuning.parametrisation](
            shape, tuning.length, tuning.prompt_dropout, position_offset=tuning.position_offset
        )
        if start is not None:
            if start.synthesis is not None:
                raise InputError(
                    "the prompt to begin from is computed from each query: use parametrisation "
                    "synthesised, or another prompt"
                )
            if start.topics is not None:
                raise InputError("the prompt to begin from is one of several of topics: begin from another prompt")
            prompt.start(start.of(side))
        return prompt

    def _open_topic_prompts(self, shape: PromptShape, start: TaskPrompt | None) -> TopicPrompts:
        """Returns the provider of a prompt for each topic. Raises InputError for an initial prompt."""
        tuning, topics = self.tuning, self.topics
        assert tuning.topics is not None
        assert topics is not None
        if start is not None:
            raise InputError("parametrisation topics cannot start from an initial prompt: use embedding")
        backbone: Any = self.pooled.backbone
        table = backbone.get_input_embeddings().weight
        return TopicPrompts(
            shape,
            table,
            topic_tokens(self.tokenizer, topics.model.words, tuning.length),
            tuning.topics.hidden,
            tuning.prompt_dropout,
            position_offset=tuning.position_offset,
        )

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
            raise InputError(
                f"parametrisation per-task: {self.tuning.synthesis.prompts} prompts for {len(names)} "
                f"tasks ({', '.join(names)}): expected a prompt for each"
            )
        return TaskPrompts(shape, width, names, self.tuning.synthesis, self.tuning.prompt_dropout)


def with_tasks(chunk: Chunk, tasks: np.ndarray) -> Chunk:
    """Returns a chunk of texts with their tasks, or their topics: int64 [n]."""
    side, ids, lengths = chunk.inputs
    of_rows = np.resize(tasks, len(ids))  # a single text is repeated
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
        raise InputError(
            f"projection={tuning.projection} pooling={recipe.pooling}: sparse vectors have a number "
            "for each word, which a layer would mix: leave out the projection"
        )
    if encoder.dimension is not None:
        raise InputError(
            f"projection={tuning.projection} dimension={encoder.dimension}: vectors of a new layer are "
            "not cut: give the projection the wanted size"
        )
    return with_projection(recipe, tuning.projection)
