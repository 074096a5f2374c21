"""The encoder: texts in, float32 vectors out, the same bytes for the same list of texts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError

from retriever.attention import PromptShape, reach
from retriever.batching import TextTokenizer, Tokens, end_to_end, padded, plan, plan_packed
from retriever.compiling import compile_model, warm_up_batch
from retriever.errors import InputError
from retriever.files import resolve
from retriever.numerics import Mode, choose_device, choose_dtype, describe_numerics
from retriever.options import DEFAULT_OPTIONS, SIDES, EncoderOptions, Side
from retriever.packing import SETTING, Packed, Team, packs
from retriever.pooling import Head, Pooled
from retriever.prompt_table import Prompts, PromptTable, free_memory, warm_up_rows
from retriever.prompts import TaskPrompt, check_backbone
from retriever.recipe import Recipe, describe, fingerprint_of, read_recipe, settings_of

__all__ = ["Encoder", "EncoderOptions", "Tokens", "describe", "resolve"]

log = logging.getLogger(__name__)

# Tokens without padding for which a thread of their own pays: products of float32 take some eight times as long.
_LEAST = {torch.float32: 32, torch.bfloat16: 192}
# Tokens per batch, padding included: measured on the processor (2,048 to 12,288 tried), so that a layer's
# intermediate values stay in cache.
_BUDGET = {"cpu": 4096, "cuda": 65536}
# Columns of a batch are a multiple of this: the processor's attention takes up to half as long again for other widths.
_STEP = 16
_ENCODERS_OF_SEQ2SEQ = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


class _Served(NamedTuple):
    """The tasks that are there at one moment, and both sides' prompts."""

    names: frozenset[str]
    sides: dict[Side, Prompts]


class Encoder:
    """A frozen backbone with its tokenizer, pooling and head.

    dim: length of a vector. similarity: "cosine" where vectors have length 1, else "dot". config: the settings that
    shape the vectors, JSON-able; fingerprint: its sha256. numerics: the numerics class in one line. startup: seconds
    to load, and of these to compile.

    threads: for the processor's products (None leaves torch's setting; Ray sets it to 1, so name it there).
    tasks: prompts by the names of their tasks, none to begin with ({}) if need be; more may come and go at any time
    (put_task, drop_task). None: there never are any.
    Raises InputError for a model or a setting that cannot be used.
    """

    dim: int
    similarity: Literal["cosine", "dot"]
    config: dict[str, Any]
    fingerprint: str
    numerics: str
    _run: Callable[..., torch.Tensor]
    _tables: dict[Side, PromptTable]

    def __init__(
        self,
        name_or_path: str,
        options: EncoderOptions = DEFAULT_OPTIONS,
        *,
        device: str | None = None,
        threads: int | None = None,
        tasks: Mapping[str, TaskPrompt] | None = None,
        trust_remote_code: bool = False,
    ):
        begun = time.perf_counter()
        with SETTING:
            self._threads = threads or torch.get_num_threads()
            torch.set_num_threads(self._threads)
        self.options = options
        self.device = choose_device(device)
        self.dtype = choose_dtype(options.dtype, self.device)
        recipe = read_recipe(resolve(name_or_path), options, trust_remote_code=trust_remote_code)
        self.config = settings_of(recipe, options)
        self.fingerprint = fingerprint_of(self.config)
        self._recipe = recipe
        self._tokenizer = TextTokenizer(recipe, options, trust_remote_code=trust_remote_code)
        self._head = Head(recipe, options.dimension).to(self.device).eval()
        self.dim = recipe.dim
        self.similarity = "cosine" if self._head.normalized else "dot"
        backbone = load_backbone(recipe, self.dtype, trust_remote_code).to(self.device)
        eager = Pooled.over(backbone, recipe).eval().requires_grad_(False)
        self._trust_remote_code = trust_remote_code
        self._lock = threading.Lock()
        self._shape: PromptShape | None = None
        self._served: _Served | None = None
        packed = packs(recipe.model_type, options, self.device) and not trust_remote_code
        if packed and backbone.config.is_decoder:
            raise InputError(f"{recipe.backbone / 'config.json'}: is_decoder is true, so that tokens see none behind "
                             "them: set it to false, or open it with compile='always'")  # fmt: skip
        self._team = Team(self._threads) if packed else None
        if tasks is not None:
            self._shape = reach(backbone)
            self._tables = {side: PromptTable(self._shape, self.dtype, self.device) for side in SIDES}
            self._serve(frozenset())
            for name, prompt in tasks.items():
                self.put_task(name, prompt)
        compiling = time.perf_counter()
        mode: Mode = "packed"
        if packed:
            self._run = Packed(backbone, recipe.pooling, recipe.first_position).eval()
        else:
            self._run, mode = self._compile(eager)
        self.numerics = describe_numerics(self.device, self.dtype, mode)
        self.startup = {"seconds": time.perf_counter() - begun, "compile_seconds": time.perf_counter() - compiling}
        log.info("%s ready in %.1f s (compiling %.1f s): %s", name_or_path, *self.startup.values(), self.numerics)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks whose prompts are there, sorted."""
        return tuple(sorted(self._served.names)) if self._served else ()

    def put_task(self, name: str, prompt: TaskPrompt) -> None:
        """Enter a task's prompt, instead of one of that name; forwards that have begun go on as they were.

        Raises InputError where the prompt is for another backbone, for other settings than `options`, where there is no
        memory for it, or where the encoder was opened without tasks.
        """
        if self._served is None:
            raise InputError(f"task {name!r}: the encoder was opened without tasks; open it with tasks={{}}")
        self._check(name, prompt)
        with self._lock:
            self._check_room(name, prompt)
            for side, table in self._tables.items():
                matrix = prompt.of(side)
                if matrix is None:
                    table.drop(name)
                else:
                    table.put(name, matrix)
            self._serve(self._served.names | {name})

    def _check_room(self, name: str, prompt: TaskPrompt) -> None:
        """Raises InputError where the tables with a prompt more take more memory than there is."""
        matrices = {side: matrix for side in self._tables if (matrix := prompt.of(side)) is not None}
        size = sum(self._tables[side].growth(matrix.shape[3]) for side, matrix in matrices.items())
        if size and size > (free := free_memory(self.device)):
            longest = max(matrix.shape[3] for matrix in matrices.values())
            raise InputError(f"task {name!r}: with a prompt of {longest} tokens the table of all prompts takes "
                             f"{size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: each takes as much as the "
                             "longest")  # fmt: skip

    def drop_task(self, name: str) -> None:
        """Take a task out; forwards that have begun go on as they were. Raises InputError where there is none."""
        with self._lock:
            if self._served is None or name not in self._served.names:
                raise _unknown(name, self.tasks)
            for table in self._tables.values():
                table.drop(name)
            self._serve(self._served.names - {name})

    def encode(
        self, texts: Sequence[str], *, side: Side = "query", task: str | Sequence[str | None] | None = None
    ) -> np.ndarray:
        """Vectors of texts, in order: float32 [n, dim]. Passages with titles: see `compose`.

        task: whose prompt of that side is used: one for all, or one for each text, None for none; a task without a
        prompt on that side has none. The bytes depend on the list of texts, their tasks' prompts and the numerics
        class alone. Raises InputError for a task that is not there, and where a vector is not finite, naming the text.
        """
        return self.forward(self.tokenize(texts, side=side), side=side, task=task)

    def compose(self, titles: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Passages' strings by the title policy; an empty title adds nothing."""
        return self._tokenizer.compose(titles, texts, self.options.title)

    def tokenize(self, texts: Sequence[str], *, side: Side) -> Tokens:
        """Token ids of texts, prefix and special tokens included; uses the processor only."""
        return self._tokenizer(texts, side=side)

    def forward(
        self, tokens: Tokens, *, side: Side = "query", task: str | Sequence[str | None] | None = None,
        check: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Vectors of tokenised texts, in order: float32 [n, dim]; side and task, and what is raised, as in `encode`.
        check=False: vectors that are not finite are returned as they are.

        Tasks that are put or dropped meanwhile change nothing.
        """
        prompts, slots = self._prompts_of(task, side, len(tokens))
        vectors = (
            self._padded(tokens, prompts, slots)
            if self._team is None
            else self._packed(tokens, prompts, slots, self._team)
        )
        if check and len(bad := np.flatnonzero(~np.isfinite(vectors).all(axis=1))):
            raise InputError(
                f"the vector of text {bad[0]} (and of {len(bad) - 1} more of {len(vectors)}) is not finite: "
                f"try dtype='float32' (now: {self.numerics})"
            )
        return vectors

    def _packed(self, tokens: Tokens, prompts: Prompts | None, slots: np.ndarray, team: Team) -> np.ndarray:
        """Without padding; each batch by one thread."""
        vectors = np.empty((len(tokens), self.dim), np.float32)

        def fill(rows: np.ndarray) -> None:
            inputs: tuple[object, ...] = end_to_end(tokens, rows)
            if prompts and (prompt := prompts.rows(slots[rows])):
                inputs = (*inputs, prompt)
            with torch.inference_mode():
                vectors[rows] = self._head(self._run(*inputs)).numpy()

        team.run(fill, plan_packed(tokens.lengths, least=_LEAST[self.dtype]))
        return vectors

    def _padded(self, tokens: Tokens, prompts: Prompts | None, slots: np.ndarray) -> np.ndarray:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        pooled = torch.empty(len(tokens), self._recipe.hidden, dtype=torch.float32, device=self.device)
        recipe = self._recipe
        batches = plan(tokens.lengths, _BUDGET[self.device.type], _STEP, recipe.positions)
        with torch.no_grad():
            for rows, ids, lengths in padded(tokens, batches, side=recipe.padding_side, pad_id=self._tokenizer.pad_id):
                inputs: tuple[object, ...] = (ids.to(self.device), lengths.to(self.device))
                if prompts and (prompt := prompts.rows(np.resize(slots[rows], len(ids)))):
                    inputs = (*inputs, prompt)
                found = self._run(*inputs)
                pooled[torch.from_numpy(rows).to(self.device)] = found[: len(rows)]
            vectors: np.ndarray = self._head(pooled).cpu().numpy()
        return vectors

    def _compile(self, eager: Pooled) -> tuple[Callable[..., torch.Tensor], Mode]:
        """Compiles where the options and the machine say so, for every kind of batch that may come."""
        ids, lengths = warm_up_batch(self._tokenizer.pad_id, self.device)
        warm_ups: list[tuple[object, ...]] = [(ids, lengths)]
        if self._shape is not None:
            rows = warm_up_rows(self._shape, len(ids), self.dtype, self.device)
            warm_ups += [(ids, lengths, prompt) for prompt in rows]
        run, compiled = compile_model(eager, self.options.compile, self.device, self.dtype, warm_ups)
        return run, "compiled" if compiled else "eager"

    def _serve(self, names: frozenset[str]) -> None:
        self._served = _Served(names, {side: table.now() for side, table in self._tables.items()})

    def _check(self, name: str, prompt: TaskPrompt) -> None:
        """Raises InputError where the prompt is for another backbone, or for texts that become vectors otherwise."""
        check_backbone(prompt, self.config, self._shape)
        own = _shaping(self._recipe, self.options)
        recipe = read_recipe(self._recipe.folder, prompt.options, trust_remote_code=self._trust_remote_code)
        other = _shaping(recipe, prompt.options)
        if differ := [f"{key}={other[key]!r} (here {own[key]!r})" for key in own if own[key] != other[key]]:
            raise InputError(f"task {name!r}: its prompt was trained with other settings than the encoder's: "
                             f"{', '.join(differ)}; open an encoder with those")  # fmt: skip

    def _prompts_of(
        self, task: str | Sequence[str | None] | None, side: Side, num_texts: int
    ) -> tuple[Prompts | None, np.ndarray]:
        """The prompts as they are now, and the slot of each text's: int64 [num_texts]."""
        if task is None:
            return None, np.zeros(num_texts, np.int64)
        if self._served is None:
            raise InputError(f"task={task!r}: this encoder was opened without tasks; open it with tasks, or leave out "
                             "task")  # fmt: skip
        served = self._served
        tasks = [task] * num_texts if isinstance(task, str) else list(task)
        if len(tasks) != num_texts:
            raise InputError(f"task: expected one for each of the {num_texts} texts, found {len(tasks)}")
        for name in {task} if isinstance(task, str) else set(tasks) - {None}:
            if name not in served.names:
                raise _unknown(name, served.names)
        prompts = served.sides[side]
        return prompts, prompts.slots_of(tasks)


def load_backbone(recipe: Recipe, dtype: torch.dtype, trust_remote_code: bool = False, **config: Any) -> Any:
    """The backbone in `dtype`, without a language-model head or a decoder; `config` overrides what its folder says."""
    import transformers

    kind = getattr(transformers, _ENCODERS_OF_SEQ2SEQ.get(recipe.model_type, "AutoModel"))
    try:
        return kind.from_pretrained(
            recipe.backbone, dtype=dtype, trust_remote_code=trust_remote_code, **{**recipe.config_args, **config}
        )
    except (ValueError, OSError, SafetensorError) as error:
        raise InputError(f"{recipe.backbone}: {str(error).strip().splitlines()[0]}") from error


def _shaping(recipe: Recipe, options: EncoderOptions) -> dict[str, Any]:
    """What of the options, as they are resolved, shapes the vectors, but for dtype and compile."""
    resolved = ("pooling", "head", "query_prefix", "passage_prefix", "query_length", "passage_length", "padding_side")
    return {name: getattr(recipe, name) for name in resolved} | {
        name: getattr(options, name) for name in ("title", "dimension", "append_eos")
    }


def _unknown(name: str | None, names: Collection[str]) -> InputError:
    return InputError(f"task={name!r}: no such task; there are: {', '.join(sorted(names)) or 'none'}")
