"""The one training loop: steps of any System on one worker of several, checkpoints, evaluation, early stop.

A step (GradCache, Gao et al. 2021, where the batch is cut into pieces):
  1. every chunk of the worker's share goes through the model; the outputs of all workers are put together by name;
  2. each worker computes the loss over all of them, and its gradient by each output: of its own outputs that is the
     gradient of the whole batch's loss, other workers' negatives included;
  3. that gradient goes back through the chunks: through graphs that were kept, or, where these would need too much
     memory, through a second pass of each chunk with the same random state.
Gradients are then added up over workers. Both ways compute the same. If a batch has no outputs, and each chunk's loss
is its own, the chunks run forward and backward one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from retriever.cuts import NOUNS, Cuts
from retriever.errors import Diverged, InputError
from retriever.forward.numerics import describe_numerics
from retriever.options.loop import LoopOptions, check_sharding
from retriever.training.parameter_groups import GroupedSystem, describe_optimizers, split_parameters
from retriever.training.stepping import DeepSpeedStepper, PlainStepper, Stepper, trained
from retriever.training.system import Batch, Chunk, Evaluate, Refresh, System, check_outputs

# Tokens of a worker's share whose graphs are kept; above that the batch is cached.
KEPT = {"cpu": 65_536, "cuda": 131_072}
POINTS = 5_000  # of a curve that is kept, at the least, where there are as many steps
_MINED = "mined"  # of a checkpoint's tensors
_Passed = tuple[dict[str, torch.Tensor], torch.Tensor | None]  # what System.forward returns


@dataclass
class Progress:
    """The progress of a training run: steps done, a curve of [step, loss, lr, quality or None], and the best quality.

    The curve of a run of more than 10,000 steps has only some of the steps.
    """

    steps: int
    curve: list[list[float | None]]
    best: float | None = None
    best_step: int = 0
    since: int = 0  # evaluations since the best
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)  # of all workers' texts, by their kind: `Cuts.stored`


class Stopped(Exception):
    """A run has ended because a stop was requested. If it had done a step, the checkpoint of the last one is saved."""


StopRequests = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""A context manager for the steps of a run, which gives `must_stop()`: whether a stop of the run is requested."""


@contextlib.contextmanager
def no_stop_requests() -> Iterator[Callable[[], bool]]:
    """The StopRequests of a run that nothing stops."""
    yield lambda: False


@dataclass(frozen=True)
class Hooks:
    """The functions by which a worker keeps checkpoints and reports steps.

    load, save: the last checkpoint; load_best, save_best: the best one. save takes the step and a function that writes
    a file; load returns a local file, which is removed after reading. note: called on the first worker after each step,
    and before the first one with the steps of an earlier run or, without one, with the quality on the dev split.
    stop_requests: a context manager that rank 0 enters around the steps; its function is called before the first step
    and after each step.
    """

    load: Callable[[], Path | None]
    save: Callable[[int, Callable[[Path], object]], object]
    load_best: Callable[[], Path | None]
    save_best: Callable[[int, Callable[[Path], object]], object]
    note: Callable[[dict[str, Any]], object]
    stop_requests: StopRequests = no_stop_requests


class Trainer:
    """A system's training on one worker. Raises InputError, from `train` too, naming the step."""

    def __init__(
        self,
        system: System,
        options: LoopOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: int = 0,
        world: int = 1,
    ):
        self.system, self.options, self.device, self.rank, self.world = system, options, device, rank, world
        declared = system.parameter_groups() if isinstance(system, GroupedSystem) else ()
        groups = split_parameters(
            trained(system.module),
            declared,
            optimizer=options.optimizer,
            lr=options.lr,
            weight_decay=options.weight_decay,
        )
        check_sharding({group["optimizer"] for group in groups}, options.zero)
        self.optimizer = describe_optimizers(groups)
        shared: dict[str, Any] = {
            "groups": groups,
            "parameter_scale": options.parameter_scale,
            "clip": options.clip,
            "world": world,
        }
        self.stepper: Stepper = (
            PlainStepper(system.module, system.forward, **shared)
            if options.zero is None
            else DeepSpeedStepper(
                system.module, system.forward, stage=options.zero, offload=options.offload, device=device, **shared
            )
        )
        self.refresh: Refresh | None = None
        self._mined: torch.Tensor | None = None
        self._cuts: dict[str, Cuts] = {}  # of this worker's texts that `Progress.cuts` lacks
        self.numerics = describe_numerics(device, dtype)
        # Sums are rounded by the number of workers and threads too: said, as the same weights come of the same ones.
        self.conditions = {"numerics": self.numerics, "threads": str(torch.get_num_threads())}

    def train(self, hooks: Hooks, evaluate: Evaluate | None = None, refresh: Refresh | None = None) -> Progress:
        """From the last checkpoint, or the start, to the end; the system is left with its best weights.

        Negatives that were mined during training are kept with the weights: a resumed run trains on the same ones.

        Raises:
            Stopped: If a stop was requested, after the checkpoint of the step at which it was noticed.
        """
        options, self.refresh = self.options, refresh
        self._agree(
            json.dumps(self.conditions),
            f"workers compute differently, this one by {_spelt(self.conditions)}: give the run nodes of one kind",
        )
        progress = self.restore(hooks.load())
        self._agree(
            str(progress.steps),
            f"workers found different checkpoints, this one at step {progress.steps}: "
            "have all nodes see the same store",
        )
        if self.rank == 0 and progress.steps:
            hooks.note({"resumed": progress.steps})
        if evaluate and options.evaluate_every and not progress.steps:
            start_quality = self._measure(evaluate)
            if self.rank == 0:
                hooks.note({"start_quality": start_quality})
        with hooks.stop_requests() if self.rank == 0 else no_stop_requests() as must_stop:
            self._take_steps(progress, hooks, evaluate, must_stop)
        if progress.best is not None and progress.best_step != progress.steps:
            best = hooks.load_best()
            if best is None:
                raise InputError(
                    f"the best checkpoint, of step {progress.best_step}, is gone: has another run of "
                    "the same ended meanwhile? Run the command again"
                )
            self.restore(best)
        self.system.module.eval()
        return progress

    def _take_steps(
        self, progress: Progress, hooks: Hooks, evaluate: Evaluate | None, must_stop: Callable[[], bool]
    ) -> None:
        """Trains to the end, with checkpoints. Raises Stopped if a stop is requested."""
        options = self.options
        if self._decide(False, must_stop())[1]:
            raise Stopped
        saved_s = time.monotonic()
        while progress.steps < options.steps:
            if evaluate and options.patience and progress.since >= options.patience:
                break
            number = progress.steps
            self.system.module.train()
            loss, lr = self.step(number), options.learning_rate(number)
            progress.steps = number + 1
            last = progress.steps == options.steps
            quality = None
            if evaluate and options.evaluate_every and (last or progress.steps % options.evaluate_every == 0):
                quality = self._evaluate(evaluate, progress, hooks)
            if quality is not None or last or progress.steps % max(1, options.steps // POINTS) == 0:
                progress.curve.append([progress.steps, loss, lr, quality])
            if last:
                self._add_cuts(progress)
            if self.rank == 0:
                hooks.note(
                    {
                        "step": progress.steps,
                        "loss": loss,
                        "lr": lr,
                        "quality": quality,
                        "numerics": self.numerics,
                        "cuts": progress.cuts,
                    }
                )
            if self.refresh and options.refresh_every and not last and progress.steps % options.refresh_every == 0:
                self._mined = self.refresh.mine()
                self.refresh.take(self._mined)
            # Last, so that the checkpoint holds what the step has measured and mined: a resumed run repeats neither.
            is_old = 0 < 60 * options.checkpoint_minutes <= time.monotonic() - saved_s
            is_old, stops = self._decide(is_old, must_stop())
            if is_old or stops or quality is not None or last or progress.steps % options.checkpoint_every == 0:
                self._keep(hooks.save, progress)
                saved_s = time.monotonic()
            if stops:
                raise Stopped

    def _decide(self, is_old: bool, stops: bool) -> tuple[bool, bool]:
        """Returns the values of rank 0 on every worker: the state of a checkpoint is collected from all of them."""
        if self.world == 1:
            return is_old, stops
        values = torch.tensor([is_old, stops], device=self.device)
        dist.broadcast(values, 0)
        is_old, stops = values.tolist()
        return is_old, stops

    def step(self, number: int) -> float:
        """One step over the batch at `number`; the loss over all of it."""
        batch = self.system.batch(number, self.rank, self.world)
        for chunk in batch.chunks:
            for noun, cuts in chunk.cuts.items():
                self._cuts[noun] = self._cuts.get(noun, Cuts()) + cuts
        total = self._together(number, batch) if batch.outputs else self._apart(number, batch)
        if not math.isfinite(total):
            raise self._not_finite(number, f"the loss is {total}")
        norm = self.stepper.step(self.options.learning_rate(number))
        if not math.isfinite(norm):
            raise self._not_finite(number, f"the gradient's norm is {norm}")
        return total

    def _together(self, number: int, batch: Batch) -> float:
        """Gradients of a loss over the outputs of the whole batch, and the loss."""
        chunks, cached = self._share(batch)
        own = len(batch.chunks)  # the others only keep workers in step
        whole = {
            name: torch.zeros(1 if output.rows is None else output.rows, output.width, device=self.device)
            for name, output in batch.outputs.items()
        }
        extra = torch.zeros((), device=self.device)
        kept: list[_Passed] = []
        for place, chunk in enumerate(chunks):
            with torch.set_grad_enabled(not cached):
                outputs, part = self._forward(number, place, chunk)
            if place < own:
                check_outputs(outputs, chunk, batch)
                for name, output in outputs.items():
                    self._put(whole[name], output.detach(), chunk.rows.get(name))
                extra += 0.0 if part is None else part.detach()
            if not cached:
                kept.append((outputs, part))
        if self.world > 1:
            for total in whole.values():
                dist.all_reduce(total)
            dist.all_reduce(extra)
        for total in whole.values():
            total.requires_grad_()
        loss = self.system.loss(whole, batch)
        if loss.requires_grad:
            loss.backward()
        gradients = {
            name: torch.zeros_like(total) if total.grad is None else total.grad for name, total in whole.items()
        }
        surrogates = []
        for place, chunk in enumerate(chunks):
            passed = self._forward(number, place, chunk) if cached else kept[place]
            if not cached:
                kept[place] = ({}, None)  # its graph ends with this turn
            surrogate = self._surrogate(passed, chunk, gradients)
            surrogate = surrogate if place < own else 0 * surrogate
            if cached and (surrogate.requires_grad or self.stepper.equal):
                self.stepper.backward(surrogate)
            elif surrogate.requires_grad:
                surrogates.append(surrogate)
        if surrogates:
            self.stepper.backward(torch.stack(surrogates).sum())
        return float(loss.detach() + extra)

    def _put(self, whole: torch.Tensor, output: torch.Tensor, rows: np.ndarray | None) -> None:
        """Puts a chunk's output into its rows of the whole output, or adds up its rows where it is summed."""
        if rows is None:
            whole += output.sum(0, keepdim=True, dtype=whole.dtype)
        else:
            whole[torch.from_numpy(rows).to(self.device)] = output.to(whole.dtype)

    def _surrogate(self, passed: _Passed, chunk: Chunk, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns a scalar whose gradient is that of the whole batch's loss by way of this chunk."""
        outputs, part = passed
        terms = []
        for name, output in outputs.items():
            rows, gradient = chunk.rows.get(name), gradients[name]
            weight = gradient if rows is None else gradient[torch.from_numpy(rows).to(self.device)]
            terms.append((output * weight).sum())
        if part is not None:
            terms.append(part)
        return functools.reduce(torch.add, terms)

    def _apart(self, number: int, batch: Batch) -> float:
        """Gradients of the chunks' own losses, one graph at a time, and what these losses add up to."""
        total = torch.zeros((), device=self.device)
        for place, chunk in enumerate(self._share(batch)[0]):
            _, part = self._forward(number, place, chunk)
            assert part is not None
            part = part if place < len(batch.chunks) else 0 * part
            self.stepper.backward(part)
            total += part.detach()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total)

    def _share(self, batch: Batch) -> tuple[list[Chunk], bool]:
        """The worker's chunks, and whether their graphs are too much to keep.

        Where workers must go through the model equally often, chunks are repeated up to the most, and all cache where
        one does.
        """
        chunks = list(batch.chunks)
        most = torch.tensor([len(chunks), sum(chunk.tokens for chunk in chunks)], device=self.device)
        if self.stepper.equal:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        count, tokens = most.tolist()
        chunks += [chunks[-1]] * (count - len(chunks))
        choice = self.options.grad_cache
        return chunks, choice == "on" or (choice == "auto" and tokens > KEPT[self.device.type])

    def _forward(self, number: int, place: int, chunk: Chunk) -> _Passed:
        """Runs a chunk through the model. Dropout depends on (seed, step, worker, chunk) alone, so it is repeatable."""
        seeds = np.random.SeedSequence([self.options.seed, 2, number, self.rank, place]).generate_state(1)
        torch.manual_seed(int(seeds[0]))
        passed: _Passed = self.stepper.forward(chunk)
        return passed

    def _evaluate(self, evaluate: Evaluate, progress: Progress, hooks: Hooks) -> float:
        quality = self._measure(evaluate)
        if not math.isfinite(quality):
            raise self._not_finite(progress.steps - 1, "the vectors or scores of the dev split are not finite")
        if progress.best is None or quality > progress.best:
            progress.best, progress.best_step, progress.since = quality, progress.steps, 0
            self._keep(hooks.save_best, progress)
        else:
            progress.since += 1
        return quality

    def _add_cuts(self, progress: Progress) -> None:
        """Adds the counts of all workers' texts since the last time to the progress."""
        own = [self._cuts.get(noun, Cuts()) for noun in NOUNS]
        sums = torch.tensor([[c.texts, c.tokens, c.cut_texts, c.cut_tokens] for c in own], device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
        for noun, cuts, counts in zip(NOUNS, own, sums.tolist(), strict=True):
            if counts[0]:
                added = Cuts(**progress.cuts.get(noun, {})) + replace(Cuts(*counts), limit=cuts.limit)
                progress.cuts = {**progress.cuts, noun: added.stored()}
        self._cuts = {}

    def _measure(self, evaluate: Evaluate) -> float:
        """Returns the quality of the present weights, as rank 0 has computed it."""
        self.system.module.eval()
        quality = evaluate()
        if self.world > 1:  # sums may be rounded differently on other CPUs, and all workers must decide alike
            first = torch.tensor(quality, dtype=torch.float64, device=self.device)
            dist.broadcast(first, 0)
            quality = float(first)
        return quality

    def _keep(self, save: Callable[[int, Callable[[Path], object]], object], progress: Progress) -> None:
        """Writes trained weights, optimizer state and progress to one safetensors file."""
        self._add_cuts(progress)
        state = self.stepper.state()
        if not all(bool(torch.isfinite(value).all()) for value in state.values()):
            raise self._not_finite(progress.steps - 1, "its weights are not finite")
        if self._mined is not None:
            state[_MINED] = self._mined
        if self.rank == 0:
            # AdamW is not named, so that its checkpoints have the same bytes as those before there was another one.
            named = {} if self.optimizer == "adamw" else {"optimizer": self.optimizer}
            metadata = {"progress": json.dumps(vars(progress)), **self.conditions, **named}
            save(progress.steps, lambda path: save_file(state, path, metadata=metadata))

    def restore(self, path: Path | None) -> Progress:
        """Go on from a checkpoint file, which is removed. Raises InputError where it is of another numerics class or
        optimizer."""
        if path is None:
            return Progress(0, [])
        try:
            with safe_open(path, "pt") as file:
                found = dict(file.metadata())
                progress = Progress(**json.loads(found.pop("progress")))
                if (optimizer := found.pop("optimizer", "adamw")) != self.optimizer:
                    raise InputError(
                        f"the checkpoint was made with the optimizer {optimizer}, this run has "
                        f"{self.optimizer}: use the checkpoint's, or give another name"
                    )
                if found != self.conditions:
                    raise InputError(
                        f"the run was begun with {_spelt(found)}, now {_spelt(self.conditions)}: resume "
                        "on such a machine, or give another name"
                    )
                self.stepper.load(file.get_tensor, progress.steps, self._touch)
                if self.refresh and _MINED in file.keys():  # noqa: SIM118
                    self._mined = file.get_tensor(_MINED)
                    self.refresh.take(self._mined)
        finally:
            path.unlink()
        return progress

    def _agree(self, own: str, problem: str) -> None:
        """Raises InputError on every worker where one says something else than another."""
        if self.world == 1:
            return
        digest = int.from_bytes(hashlib.sha256(own.encode()).digest()[:7])
        ends = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if int(ends[0]) != -int(ends[1]):
            raise InputError(problem)

    def _touch(self) -> torch.Tensor:
        outputs, part = self.stepper.forward(self.system.batch(0, self.rank, self.world).chunks[0])
        terms = [output.sum() for output in outputs.values()]
        return functools.reduce(torch.add, terms if part is None else [*terms, part])

    def _not_finite(self, number: int, what: str) -> Diverged:
        return Diverged(
            f"step {number + 1}: {what}; the last checkpoint is from before it: give a smaller lr than "
            f"{self.options.lr}, or --dtype float32, under another name"
        )


def _spelt(conditions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
