"""Training of a cross-encoder: the losses and one worker's loop; knows no store and no Ray."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from retriever.attention import reach
from retriever.batching import padded, plan
from retriever.errors import InputError
from retriever.files import sha256_of, tokenizer_files, weight_files
from retriever.kernels import swap_dropout
from retriever.numerics import choose_dtype, describe_numerics
from retriever.pairs import PairTokenizer
from retriever.recipe import positions_of
from retriever.reranker import Scored
from retriever.reranker_data import Loss, TrainingData, TrainingOptions, batch_at, learning_rate

# Tokens that go through the model at once, their intermediate values kept for the way back.
_BUDGET = {"cpu": 4096, "cuda": 65536}
_STEP = 16
WEIGHT_DECAY = 0.01  # BERT's; not of biases and of layer norms
CLIP = 1.0
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")  # as the families call it


@dataclass(frozen=True)
class Hooks:
    """What a worker is handed: load() gives a local checkpoint file or None; save(step, write) keeps one; note(step,
    loss) is told of each step. Only the first worker saves and notes."""

    load: Callable[[], Path | None]
    save: Callable[[int, Callable[[Path], object]], object]
    note: Callable[[int, float], object]


def loss_of(logits: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Summed over the queries: logits float32 [queries, 1 + negatives], the positive's first -> scalar.

    bce: the mean over a query's pairs of -log sigmoid(s) for the positive, -log(1 - sigmoid(s)) for a negative.
    listwise: -log(exp(s_0) / sum_i exp(s_i)).
    """
    if loss == "listwise":
        return -torch.log_softmax(logits, dim=1)[:, 0].sum()
    targets = torch.zeros_like(logits)
    targets[:, 0] = 1
    every = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return every.mean(dim=1).sum()


def describe_backbone(folder: Path) -> dict[str, Any]:
    """What a backbone is, JSON-able: contents by their sha256. Raises InputError where weights are missing."""
    weights = weight_files(folder)
    if not (folder / "config.json").exists() or not weights:
        raise InputError(f"{folder}: a backbone's config.json and weights are expected in this very folder")
    return {
        "model": sha256_of(folder / "config.json"),
        "weights": [sha256_of(file) for file in weights],
        "tokenizer": [sha256_of(file) for file in tokenizer_files(folder)],
    }


def check_length(folder: Path, max_length: int) -> PairTokenizer:
    """The backbone's tokenizer for pairs of so many tokens. Raises InputError where it has no positions for them."""
    from transformers import AutoConfig

    try:
        positions = positions_of(AutoConfig.from_pretrained(folder))
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    if positions is not None and max_length > positions:
        raise InputError(f"max_length={max_length} is more than the {positions} positions of {folder}")
    return PairTokenizer(folder, max_length)


class Trainee:
    """A backbone with a head of one label, its tokenizer and optimizer, on one worker of `world`.

    The head is drawn from the seed where the backbone has none. Raises InputError for what is no backbone.
    """

    def __init__(
        self, folder: Path, options: TrainingOptions, *, device: str = "cpu", dtype: str = "auto", rank: int = 0,
        world: int = 1,
    ):  # fmt: skip
        self.options, self.rank, self.world = options, rank, world
        self.device = torch.device(device)
        self.dtype = choose_dtype(dtype, self.device)
        self.folder = folder
        torch.manual_seed(options.seed)
        self.tokenizer = check_length(folder, options.max_length)
        self.model = _load(folder).to(self.device).train()
        swap_dropout(self.model)
        with contextlib.suppress(InputError):  # what is out of reach trains by torch's own attention
            reach(self.model)
        self.positions = positions_of(self.model.config)
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_id
        self.scored = Scored(self.model, self.tokenizer.types)
        self.parameters = dict(self.model.named_parameters())
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        others = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr)
        # Sums are rounded by these: a checkpoint goes on where they are the same.
        self.conditions = {"numerics": describe_numerics(self.device, self.dtype), "workers": str(world),
                           "threads": str(torch.get_num_threads())}  # fmt: skip

    def train(self, data: TrainingData, hooks: Hooks, *, checkpoint_every: int = 100) -> None:
        """From the last checkpoint, or the start, to the end. Raises InputError where the loss is not finite."""
        options = self.options
        for step in range(self.restore(hooks.load()), options.steps):
            # Dropout too is a function of the step.
            torch.manual_seed(int(np.random.SeedSequence([options.seed, 2, step, self.rank]).generate_state(1)[0]))
            loss = self.step(*batch_at(data, options, step), data, learning_rate(step, options))
            if self.rank == 0:
                hooks.note(step + 1, loss)
                if (step + 1) % checkpoint_every == 0 and step + 1 < options.steps:
                    hooks.save(step + 1, functools.partial(self.save_checkpoint, step=step + 1))

    def step(self, queries: np.ndarray, rows: np.ndarray, data: TrainingData, lr: float) -> float:
        """One step over the batch, of which each worker takes every world-th query; the loss over the whole batch."""
        mine = slice(self.rank, None, self.world)
        total = self._backward(queries[mine], rows[mine], data, len(queries))
        flat = torch.cat([*(_gradient(p).flatten() for p in self.parameters.values()), total[None]])
        if self.world > 1:
            dist.all_reduce(flat)
        gradients = flat[:-1].split([p.numel() for p in self.parameters.values()])
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        loss = float(flat[-1])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise InputError(f"the loss is {loss}, its gradient's norm {float(norm)}: give a smaller lr than "
                             f"{self.options.lr}")  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _backward(self, queries: np.ndarray, rows: np.ndarray, data: TrainingData, num_queries: int) -> torch.Tensor:
        """Adds up gradients and loss of this worker's queries, each divided by all workers' `num_queries`."""
        width = rows.shape[1]
        texts = [data.queries[query] for query in queries for _ in range(width)]
        passages = self.tokenizer.compose(*data.passages(rows.ravel()), self.options.title)
        tokens, types = self.tokenizer(texts, passages)
        # A query's pairs stay together, as the listwise loss needs them.
        longest = tokens.lengths.reshape(-1, width).max(axis=1) if len(queries) else np.empty(0, np.int64)
        groups = plan(longest, _BUDGET[self.device.type] // width, _STEP, self.positions)
        batches = [((group[:, None] * width + np.arange(width)).ravel(), columns) for group, columns in groups]
        total = torch.zeros((), device=self.device)
        pairs = padded(tokens, batches, side="right", pad_id=self.tokenizer.pad_id)
        kinds = padded(types, batches, side="right", pad_id=0)
        for (_, ids, lengths), (_, type_ids, _) in zip(pairs, kinds, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                logits = self.scored(ids.to(self.device), type_ids.to(self.device), lengths.to(self.device))
            loss = loss_of(logits.view(-1, width), self.options.loss) / num_queries
            loss.backward()
            total += loss.detach()
        return total

    def save_checkpoint(self, path: Path, step: int) -> None:
        """Weights, the optimizer's two moments, and the number of steps done, in one safetensors file."""
        tensors = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            for kind, value in (("weight", parameter.detach()), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
                tensors[f"{kind}.{name}"] = value.cpu().contiguous()
        save_file(tensors, path, metadata={"step": str(step), **self.conditions})

    def restore(self, path: Path | None) -> int:
        """Go on from a checkpoint file, which is removed; the number of steps that it has done, 0 without one.

        Raises InputError where it was made with other numerics, or by another number of workers or of their threads.
        """
        if path is None:
            return 0
        try:
            with safe_open(path, "pt", device=str(self.device)) as file, torch.no_grad():
                found = dict(file.metadata())
                step = int(found.pop("step"))
                if found != self.conditions:
                    raise InputError(f"the run was begun with {_spelt(found)}, now {_spelt(self.conditions)}: go on "
                                     "where it was begun, or give another name")  # fmt: skip
                for name, parameter in self.parameters.items():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
                    moments = {kind: file.get_tensor(f"{kind}.{name}") for kind in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        finally:
            path.unlink()
        return step

    def save_model(self, folder: Path) -> None:
        """A folder that transformers, sentence-transformers' CrossEncoder and Reranker open."""
        from transformers import AutoTokenizer

        self.model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokenizer.model_max_length = self.options.max_length
        tokenizer.save_pretrained(folder)


def _load(folder: Path) -> Any:
    """The backbone with one label, float32. Raises InputError where the weights are not this backbone's."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        # Dropout of attention's weights keeps them from the fused kernels: on a processor a step would take twice as
        # long. That of the hidden states stays.
        dropouts = [name for name in ATTENTION_DROPOUTS if hasattr(AutoConfig.from_pretrained(folder), name)]
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, output_loading_info=True, **dict.fromkeys(dropouts, 0.0)
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    total = len(list(model.parameters()))
    if 2 * len(found["missing_keys"]) > total:
        raise InputError(f"{folder}: the weights lack {len(found['missing_keys'])} of {total} tensors of a "
                         f"{type(model).__name__}")  # fmt: skip
    return model


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Its gradient; zeros for what the model leaves unused, or where a worker has no query of the batch."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _spelt(conditions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
