"""The encoder converts texts to float32 vectors; the same list of texts gives the same bytes."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from riptide.base.arguments import check_side, check_texts, refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process.forks import need_threads
from riptide.retriever.encoding.backbones import backbone_loader, open_pooled
from riptide.retriever.encoding.encoder_tasks import EncoderTasks, TextPrompts, without_prompts
from riptide.retriever.encoding.sparse_model import keep_largest
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.batching import (
    BATCH_TOKENS,
    COLUMN_STEP,
    TextTokenizer,
    Tokens,
    packed_batch,
    padded_batches,
    plan_packed,
    plan_padded,
)
from riptide.retriever.forward.compiling import compile_model, warm_up, warm_up_batch
from riptide.retriever.forward.int8 import Int8Layers
from riptide.retriever.forward.numerics import Mode, choose_device, choose_dtype, describe_numerics
from riptide.retriever.forward.packing import (
    MIN_TOKENS,
    SETTING,
    PackedBackbone,
    PackedLayers,
    ThreadTeam,
    will_pack,
)
from riptide.retriever.forward.pooling import PooledBackbone, VectorHead
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.model.model_folder import BackboneFiles, find_model_folder
from riptide.retriever.model.recipe import Recipe, describe, fingerprint_of, read_recipe, settings_of
from riptide.retriever.options import DEFAULT_OPTIONS, SIDES, EncoderOptions, Side
from riptide.retriever.prompts.prompt_table import warm_up_rows
from riptide.retriever.prompts.query_words import WordPooling, unusable_texts_error
from riptide.retriever.prompts.task_prompt import TaskPrompt, check_backbone, check_prompt_positions
from riptide.retriever.topics.saved import TextTopics

__all__ = ["Encoder", "EncoderOptions", "Tokens", "describe", "find_model_folder"]

log = logging.getLogger(__name__)

_WEIGHT_BLOCK = 256  # queries whose word embeddings are in memory at once in `prompt_weights`


@refuse_unknown_names
class Encoder:
    """A frozen backbone with its tokenizer, pooling and head.

    Attributes:
        name: The name or folder that it was opened by.
        dim: Length of a vector.
        similarity: "cosine" if vectors have length 1, else "dot".
        config: The settings that shape the vectors, JSON-serialisable.
        fingerprint: The sha256 of `config`.
        numerics: The numerics class in one line.
        startup: Seconds to load, and the part of them spent on compiling.

    Args:
        name_or_path: A Hugging Face name or a model folder.
        options: How text becomes a vector.
        device: "cpu" or "cuda"; None: CUDA if it is available, the CPU for int8.
        threads: Threads for matrix products on the CPU. None keeps torch's setting; Ray sets that to 1.
        tasks: Prompts by task name, possibly none ({}); put_task and drop_task change them at any time. None: the
            encoder never has tasks, which saves memory.
        trust_remote_code: Whether code in the model folder may run.
        pinned: The numerics class of existing vectors, which the dtype "auto" follows; None: the faster dtype of this
            machine.

    Raises:
        InputError: If a model or a setting cannot be used; missing weights are never replaced by random numbers.
    """

    name: str
    dim: int
    similarity: Literal["cosine", "dot"]
    config: dict[str, Any]
    fingerprint: str
    numerics: str
    _run: Callable[..., torch.Tensor]

    def __init__(
        self,
        name_or_path: str,
        options: EncoderOptions = DEFAULT_OPTIONS,
        *,
        device: str | None = None,
        threads: int | None = None,
        tasks: Mapping[str, TaskPrompt] | None = None,
        trust_remote_code: bool = False,
        pinned: str | None = None,
    ):
        started = time.perf_counter()
        need_threads("the first encoding or dense search")
        with SETTING:
            self._threads = threads or torch.get_num_threads()
            torch.set_num_threads(self._threads)
        self.name = str(name_or_path)
        self.options = options
        self.device = choose_device(device, options.dtype)
        self._products = choose_dtype(options.dtype, self.device, pinned)
        is_int8 = self._products == torch.int8
        self.dtype = torch.float32 if is_int8 else self._products
        recipe = read_recipe(find_model_folder(name_or_path), options, trust_remote_code=trust_remote_code)
        files = BackboneFiles(recipe.backbone)
        self.config = settings_of(recipe, options)
        self.fingerprint = fingerprint_of(self.config)
        self._recipe = recipe
        if recipe.unused_prompts:
            log.warning(
                "%s: has prompts %s, and none named query: queries have no prefix unless query_prefix gives one",
                name_or_path,
                ", ".join(recipe.unused_prompts),
            )
        self._tokenizer = TextTokenizer(recipe, options, trust_remote_code=trust_remote_code)
        self._head = VectorHead(recipe, options.dimension).to(self.device).eval()
        self.dim = recipe.dim
        self.similarity = "cosine" if self._head.normalized else "dot"
        eager = open_pooled(recipe, self.dtype, trust_remote_code).to(self.device).eval().requires_grad_(False)
        files.check()
        backbone: Any = eager.backbone
        tokenizer, word_embeddings = self._tokenizer, backbone.get_input_embeddings().weight
        self._width = word_embeddings.shape[1]
        # No reference to the encoder: in a cycle its weights would stay in memory (a server calls gc.freeze).
        self._word_pooling = functools.cache(lambda: WordPooling(word_embeddings, tokenizer.are_words))
        self._trust_remote_code = trust_remote_code
        self._lock = threading.Lock()
        self._shape: PromptShape | None = None
        self._tasks: EncoderTasks | None = None
        is_eager = backbone_loader(recipe).is_eager
        is_packed = is_int8 or (
            will_pack(recipe.model_type, options, self.device) and not (trust_remote_code or is_eager)
        )
        self._team = ThreadTeam(self._threads) if is_packed else None
        if tasks is not None:
            self._shape = enable_prompts(backbone)
            self._tasks = EncoderTasks(self._shape, self.dtype, self.device, self._word_pooling)
        compiling = time.perf_counter()
        mode: Mode = "packed"
        if is_packed:
            make_layers = Int8Layers if is_int8 else PackedLayers
            self._run = PackedBackbone(backbone, recipe.pooling, recipe.first_position, make_layers).eval()
        elif is_eager:
            self._run, mode = eager, "eager"
        else:
            self._run, mode = self._compile(eager)
        self._eager = eager
        # Kinds of batches that are compiled: (some prompts are computed, texts start after their prompts).
        self._compiled = {(False, False)} if mode == "compiled" else None
        for name, prompt in (tasks or {}).items():
            try:
                self.put_task(name, prompt)
            except InputError as error:
                raise InputError(f"task {name!r}: {error}") from error
        self.numerics = describe_numerics(self.device, self._products, mode)
        self.startup = {"seconds": time.perf_counter() - started, "compile_seconds": time.perf_counter() - compiling}
        log.info("%s ready in %.1f s (compiling %.1f s): %s", name_or_path, *self.startup.values(), self.numerics)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the current tasks, sorted."""
        return tuple(sorted(self._tasks.snapshot.names)) if self._tasks else ()

    @property
    def prompt_bytes(self) -> int:
        """The bytes of the tables of all prompts, without networks that compute prompts."""
        return sum(table.nbytes for table in self._tasks.tables.values()) if self._tasks else 0

    def text_topics(self, task: str) -> TextTopics | None:
        """Returns the rule that infers the topics of a task's texts; None if the task has no topic prompts."""
        return self._tasks.snapshot.topics.get(task) if self._tasks else None

    def put_task(self, name: str, prompt: TaskPrompt) -> None:
        """Adds or replaces a task's prompt; forward passes in progress keep the previous one.

        Raises:
            InputError: If the prompt is for another backbone or other settings than `options`, if the backbone has too
                few positions for texts that start after the prompt, if memory is short, or if the encoder was opened
                without tasks. The message does not name the task.
        """
        if self._tasks is None:
            raise InputError(
                f"the encoder was opened without tasks: open it with {Parameter('tasks', '{}')}, or with some"
            )
        self._check(prompt)
        with self._lock:
            self._tasks.check_room(prompt)
            self._compile_for(prompt)
            self._tasks.put(name, prompt)

    def drop_task(self, name: str) -> None:
        """Removes a task; forward passes in progress keep using its prompt. Raises InputError for an unknown task."""
        if self._tasks is None:
            raise _no_tasks_error(name)
        with self._lock:
            self._tasks.drop(name)

    def encode(
        self, texts: Sequence[str], *, side: Side = "query", task: str | Sequence[str | None] | None = None
    ) -> np.ndarray:
        """Encodes texts and returns their vectors in the same order. For passages with titles, see `compose`.

        The bytes depend only on the list of texts, their tasks' prompts and the numerics class.

        Args:
            texts: The texts.
            side: Whether they are queries or passages: prefix, length and prompt depend on it.
            task: The task whose prompt is used: one for all texts, or one per text (None: no prompt). A task may have
                no prompt on this side.

        Returns:
            float32 [n, dim].

        Raises:
            InputError: If a task is unknown, a text is not a valid string, or a vector is not finite; names the text.
            TextsError: If texts lack the words from which their prompts are computed, or queries those by which their
                topics are inferred.
        """
        tokens = self.tokenize(texts, side=side)  # This also checks the texts.
        return self.forward(tokens, side=side, task=task, topics=self.topics_of(texts, side=side, task=task))

    def topics_of(
        self, texts: Sequence[str], *, side: Side = "query", task: str | Sequence[str | None] | None = None
    ) -> np.ndarray | None:
        """Infers the topics of texts, which select their prompts; returns None if no task has topic prompts.

        A passage without a known word has the most probable topic.

        Args:
            texts: The texts, without prefix; passages with their titles.
            side: Whether they are queries or passages.
            task: As in `encode`.

        Returns:
            int64 [n]; -1 for a query without a word that the topics know, and for texts of other tasks.
        """
        if task is None or self._tasks is None:
            return None
        return self._tasks.topics_of(texts, side, task)

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Joins titles and texts of passages as the options say; an empty title adds nothing."""
        return self._tokenizer.compose(titles, texts, self.options.title)

    def tokenize(self, texts: Sequence[str], *, side: Side, prefix: str | None = None) -> Tokens:
        """Returns the token ids of texts, including prefix and special tokens; runs on the CPU only.

        `prefix` replaces the prefix of the side.
        """
        check_texts(texts)
        check_side(side)
        return self._tokenizer(texts, side=side, prefix=prefix)

    def unknown_tokens(self, tokens: Tokens) -> tuple[int, int]:
        """Returns the number of unknown tokens and the number of all tokens; special tokens are excluded from both."""
        return self._tokenizer.count_unknown(tokens)

    def broken_texts(self, tokens: Tokens) -> np.ndarray:
        """Returns a mask of the texts that the tokenizer breaks into fragments, bool [texts]; see `are_broken`."""
        return self._tokenizer.are_broken(tokens)

    def probe(self, text: str, *, task: str) -> None:
        """Checks the prompts of a task: encodes a text on both sides, with the prompts of all topics of the task.

        If the text lacks the words for a computed prompt, the first word of the vocabulary takes its place.

        Raises:
            InputError: If a vector is not finite, or the task is unknown.
        """
        inferred = self.text_topics(task)
        topics = None if inferred is None else np.arange(inferred.model.num_topics)
        for side in SIDES:
            tokens = self.tokenize([text] * (1 if topics is None else len(topics)), side=side)
            if self.unusable_texts(tokens, side=side, task=task, topics=topics):
                tokens = Tokens(np.array([self._tokenizer.first_word()], np.int32), np.ones(1, np.int64))
            self.forward(tokens, side=side, task=task, topics=topics)

    def unusable_texts(
        self,
        tokens: Tokens,
        *,
        side: Side = "query",
        task: str | Sequence[str | None] | None = None,
        topics: np.ndarray | None = None,
    ) -> dict[int, str]:
        """Returns, by text number, the reason why a text has no prompt: it lacks the words that determine the prompt.

        Arguments as in `forward`, which gives these texts vectors of NaN with check=False.
        """
        return self._prompts_of(task, side, tokens, topics).reasons()

    def prompt_weights(self, texts: Sequence[str], *, task: str) -> np.ndarray:
        """Returns the weights with which the basic prompts are mixed into the prompt of each query (HYPER, Eq. 2).

        Args:
            texts: The queries.
            task: A task whose prompts are computed from each query.

        Returns:
            float32 [n, N], rows of sum 1; NaN where a text has no word that its prompt could be computed from.

        Raises:
            InputError: If the task is unknown, or if its prompt is the same for all queries.
        """
        if self._tasks is None:
            raise _no_tasks_error(task)
        synthesiser = self._tasks.synthesiser(task)
        tokens = self.tokenize(texts, side="query")
        weights = np.full((len(tokens), synthesiser.options.prompts), np.nan, np.float32)
        with_words = np.flatnonzero(self._word_pooling().count_words(tokens))
        for start in range(0, len(with_words), _WEIGHT_BLOCK):
            rows = with_words[start : start + _WEIGHT_BLOCK]
            weights[rows] = synthesiser.weights(self._word_pooling().max_embeddings(tokens, rows)).cpu().numpy()
        return weights

    def forward(
        self,
        tokens: Tokens,
        *,
        side: Side = "query",
        task: str | Sequence[str | None] | None = None,
        topics: np.ndarray | None = None,
        check: bool = True,
        report: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Encodes tokenised texts: returns float32 [n, dim] in the same order. Arguments and errors as in `encode`.

        Tasks that are added or removed during the call do not affect it. `topics`, int64 [n], are needed for texts of a
        task with prompts of topics (`topics_of`); -1: unknown. With check=False, vectors that are not finite are
        returned unchanged; where a text lacks the words for its prompt, they are NaN. `report` is called after each
        batch with the number of texts that are done; after a packed batch, from the batch's thread.
        """
        need_threads("the first encoding or dense search")
        prompts = self._prompts_of(task, side, tokens, topics)
        if check and (reasons := prompts.reasons()):
            raise unusable_texts_error(reasons, len(tokens))
        counter = _TextCounter(report)
        vectors = (
            self._encode_padded(tokens, prompts, side, counter)
            if self._team is None
            else self._encode_packed(tokens, prompts, self._team, counter)
        )
        if check and len(bad := np.flatnonzero(~np.isfinite(vectors).all(axis=1))):
            raise InputError(
                f"the vector of text {bad[0]} (and of {len(bad) - 1} more of {len(vectors)}) is not finite: "
                f"try {Parameter('dtype', 'float32')} (now: {self.numerics})"
            )
        return vectors

    def _encode_packed(
        self, tokens: Tokens, prompts: TextPrompts, team: ThreadTeam, counter: _TextCounter
    ) -> np.ndarray:
        """Encodes texts without padding (packed), one thread per batch, and returns their vectors: float32 [n, dim]."""
        vectors = np.empty((len(tokens), self.dim), np.float32)

        def fill(rows: np.ndarray) -> None:
            inputs: tuple[object, ...] = packed_batch(tokens, rows)
            with torch.inference_mode():
                if prompt := prompts.rows(rows):
                    inputs = (*inputs, prompt)
                vectors[rows] = self._head(self._run(*inputs)).numpy()
            counter.add(len(rows))

        batches = plan_packed(tokens.lengths, min_tokens=MIN_TOKENS[self._products])
        team.run(fill, [some for rows in batches for some in prompts.split_batch(rows, self.device)])
        vectors[prompts.wordless] = np.nan
        return vectors

    def _encode_padded(self, tokens: Tokens, prompts: TextPrompts, side: Side, counter: _TextCounter) -> np.ndarray:
        """Encodes texts in padded batches, one batch at a time, and returns their vectors: float32 [n, dim]."""
        pooled = torch.empty(len(tokens), self._recipe.pooled_dim, dtype=torch.float32, device=self.device)
        for rows, outputs in self._batches(tokens, prompts, side):
            pooled[torch.from_numpy(rows).to(self.device)] = outputs
            counter.add(len(rows))
        with torch.no_grad():
            vectors: np.ndarray = self._head(pooled).cpu().numpy()
        return vectors

    def pooled_batches(
        self,
        tokens: Tokens,
        *,
        side: Side,
        task: str | Sequence[str | None] | None = None,
        topics: np.ndarray | None = None,
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yields, per padded batch, its text numbers, int64 [n], and their pooled vectors, float32 [n, pooled_dim].

        Arguments and errors as in `forward`; numbers that are not finite are yielded unchanged.
        """
        need_threads("the first encoding or dense search")
        return self._batches(tokens, self._prompts_of(task, side, tokens, topics), side)

    def _batches(self, tokens: Tokens, prompts: TextPrompts, side: Side) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        recipe = self._recipe
        max_words = recipe.query_terms if side == "query" else recipe.passage_terms
        planned = plan_padded(tokens.lengths, BATCH_TOKENS[self.device.type], COLUMN_STEP, recipe.max_positions)
        batches = [(some, width) for rows, width in planned for some in prompts.split_batch(rows, self.device)]
        for rows, ids, lengths in padded_batches(
            tokens, batches, side=recipe.padding_side, pad_id=self._tokenizer.pad_id
        ):
            inputs: tuple[object, ...] = (ids.to(self.device), lengths.to(self.device))
            with torch.no_grad():
                # `padded_batches` repeats a single text, so its prompt is repeated too.
                if prompt := prompts.rows(np.resize(rows, len(ids))):
                    inputs = (*inputs, prompt)
                outputs = self._run(*inputs)[: len(rows)]
                if max_words is not None:
                    outputs = keep_largest(outputs, max_words)
                outputs[torch.from_numpy(prompts.wordless[rows]).to(self.device)] = torch.nan
            yield rows, outputs

    def _compile(self, eager: PooledBackbone) -> tuple[Callable[..., torch.Tensor], Mode]:
        """Compiles the model for every kind of batch that can occur, if the options and the machine require it."""
        plain: tuple[object, ...] = warm_up_batch(self._tokenizer.pad_id, self.device)
        warm_up_batches = [plain, *self._warm_up_batches(has_computed=False, has_offsets=False)]
        run, compiled = compile_model(eager, self.options.compile, self.device, self.dtype, warm_up_batches)
        return run, "compiled" if compiled else "eager"

    def _compile_for(self, prompt: TaskPrompt) -> None:
        """If the model is compiled, also compiles it for the kinds of batches that occur only with this prompt."""
        if self._compiled is None:
            return
        computed_kinds = {False, prompt.synthesis is not None, *(has_computed for has_computed, _ in self._compiled)}
        offset_kinds = {False, prompt.position_offset, *(has_offsets for _, has_offsets in self._compiled)}
        for kind in sorted({*itertools.product(computed_kinds, offset_kinds)} - self._compiled):
            warm_up(self._run, self._warm_up_batches(has_computed=kind[0], has_offsets=kind[1]), self.device)
            self._compiled.add(kind)

    def _warm_up_batches(self, *, has_computed: bool, has_offsets: bool) -> list[tuple[object, ...]]:
        """Returns batches with prompts, with which the model is compiled."""
        if self._shape is None:
            return []
        ids, lengths = warm_up_batch(self._tokenizer.pad_id, self.device)
        rows = warm_up_rows(
            self._shape, len(ids), self.dtype, self.device, has_computed=has_computed, has_offsets=has_offsets
        )
        return [(ids, lengths, prompt) for prompt in rows]

    def _check(self, prompt: TaskPrompt) -> None:
        """Raises InputError if the prompt is for another backbone, or for other settings that shape vectors."""
        check_backbone(prompt, self.config, self._shape, self._width)
        if prompt.position_offset:
            self._eager.check_offsets()
            check_prompt_positions(self._recipe, {side: prompt.offset(side) for side in SIDES})
        current = _vector_settings(self._recipe, self.options)
        recipe = read_recipe(self._recipe.folder, prompt.options, trust_remote_code=self._trust_remote_code)
        other = _vector_settings(recipe, prompt.options)
        differ = [f"{key} {other[key]!r} instead of {current[key]!r}" for key in current if current[key] != other[key]]
        if differ:
            raise InputError(
                f"the prompt was trained with other settings than the encoder's: {', '.join(differ)}; open an encoder "
                "with those"
            )

    def _prompts_of(
        self, task: str | Sequence[str | None] | None, side: Side, tokens: Tokens, topics: np.ndarray | None
    ) -> TextPrompts:
        """Returns the current prompts and the prompt slot of each text."""
        if task is None:
            return without_prompts(len(tokens))
        if self._tasks is None:
            raise _no_tasks_error(task)
        return self._tasks.prompts_of(tokens, side, task, topics)


class _TextCounter:
    """Counts the encoded texts and reports the count."""

    def __init__(self, report: Callable[[int], object] | None):
        self._report, self._texts = report, 0

    def add(self, texts: int) -> None:
        """Adds to the count. If two threads add at once, one count may be reported twice, which progress tolerates."""
        if self._report is not None:
            self._texts += texts
            self._report(self._texts)


def _vector_settings(recipe: Recipe, options: EncoderOptions) -> dict[str, Any]:
    """Returns the resolved settings that shape vectors in training: all but dtype, compilation and word pruning.

    Of the layers after pooling, options change the last step alone, "normalize".
    """
    resolved = (
        "pooling",
        "query_prefix",
        "passage_prefix",
        "query_length",
        "passage_length",
        "append_eos",
        "padding_side",
    )
    settings = {name: getattr(recipe, name) for name in resolved} | {"normalize": "normalize" in recipe.head[-1:]}
    return settings | {name: getattr(options, name) for name in ("title", "dimension")}


def _no_tasks_error(task: object) -> InputError:
    return InputError(
        f"{Parameter('task', repr(task))}: the encoder was opened without tasks; open it with this one, or leave it out"
    )
