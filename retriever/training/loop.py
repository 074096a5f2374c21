"""The training loop of all systems on one of several workers: steps, checkpoints, evaluation, and early stopping.

A step over the outputs of the whole batch:
  1. Each worker runs its chunks forward, and the outputs of all workers are added up by name.
  2. Each worker computes the loss over all outputs, and its gradients with respect to them. The negatives of a query
     are those of all workers.
  3. Each worker propagates these gradients back through its chunks: through their graphs, which were kept, or, if the
     graphs need too much memory, through a second forward pass of each chunk with the same random state (GradCache,
     Gao et al. 2021). Both give the same gradients.
  4. The gradients of all workers are added up.
If a batch has no outputs, each chunk has a separate loss, and chunks run forward and backward one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from riptide.base.cuts import NOUNS, Cuts
from riptide.base.errors import DivergedError, InputError
from riptide.process.forks import need_threads
from riptide.retriever.forward.numerics import describe_numerics
from riptide.retriever.options.loop import LoopOptions, check_sharding
from riptide.retriever.training.freed_memory import keep_freed_memory
from riptide.retriever.training.hooks import (
    NodeDraining,
    RunResumed,
    SaveCheckpoint,
    StartMeasured,
    StepDone,
    Stopped,
    TrainingProgress,
    WorkerHooks,
    no_stop_requests,
)
from riptide.retriever.training.parameter_groups import GroupedSystem, describe_optimizers, split_parameters
from riptide.retriever.training.stepping import DeepSpeedStepper, PlainStepper, Stepper, trained_parameters
from riptide.retriever.training.system import Batch, BatchChunk, Evaluate, NegativesRefresh, System, check_outputs
from riptide.retriever.training.time_limit import SpeedMeasurement
from riptide.telemetry.phases import Phase

# Maximum tokens of a worker's chunks for which graphs are kept, by device; larger batches run forward passes twice.
GRAPH_TOKENS = {"cpu": 65_536, "cuda": 131_072}
CURVE_POINTS = 5_000  # minimum number of curve points of a run with more steps
DRAINING_POLL_S = 2.0  # seconds between two calls of `WorkerHooks.is_node_draining`
DRAINING_CHECKPOINT_S = 10.0  # minimum seconds between two checkpoints while a node is draining
_MINED = "mined"  # name of the tensor of mined rows in a checkpoint
_Forwarded = tuple[dict[str, torch.Tensor], torch.Tensor | None]  # result of System.forward


class Trainer:
    """Trains a system on one worker of a run.

    Args:
        system: The system.
        options: Options of the loop.
        device: The device of the system.
        dtype: The dtype of the forward and backward pass.
        rank: The rank of this worker.
        world: The number of workers.

    Raises:
        InputError: If the options do not fit the system; from `train`, with the step, if training cannot continue.
    """

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
        need_threads("the first encoding or dense search")
        self.system, self.options, self.device, self.rank, self.world = system, options, device, rank, world
        declared_groups = system.parameter_groups() if isinstance(system, GroupedSystem) else ()
        groups = split_parameters(
            trained_parameters(system.module),
            declared_groups,
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
        self.refresh: NegativesRefresh | None = None
        self._mined: torch.Tensor | None = None
        self._speed = None if options.max_minutes is None else SpeedMeasurement(60 * options.max_minutes)
        # Counts of this worker's cut texts that are not yet in `TrainingProgress.cuts`.
        self._cuts: dict[str, Cuts] = {}
        self.numerics = describe_numerics(device, dtype)
        # The number of threads determines how sums are rounded, so a run cannot resume with another number.
        self.conditions = {"numerics": self.numerics, "threads": str(torch.get_num_threads())}

    @keep_freed_memory()
    def train(
        self, hooks: WorkerHooks, evaluate: Evaluate | None = None, refresh: NegativesRefresh | None = None
    ) -> TrainingProgress:
        """Trains from the last checkpoint, or from the start, to the end, and loads the best weights.

        A checkpoint holds the negatives that were mined during training, so a resumed run trains on the same ones.

        Raises:
            Stopped: If a stop was requested, after the checkpoint of the step at which it was noticed.
        """
        self.refresh = refresh
        self._check_equal(
            json.dumps(self.conditions),
            f"workers compute differently, this one by {_describe_conditions(self.conditions)}: give the run nodes of "
            "one kind",
        )
        progress = self.restore(hooks.load())
        self._check_equal(
            str(progress.steps),
            f"workers found different checkpoints, this one at step {progress.steps}: "
            "have all nodes see the same store",
        )
        if self.rank == 0 and progress.steps:
            hooks.report(RunResumed(progress.steps))
        if progress.run_steps is not None:
            self.options = replace(self.options, steps=progress.run_steps)
        started_s = self._read_clock()
        if evaluate and self.options.evaluate_every and not progress.steps:
            progress.start = self._measure(evaluate)
            if self._speed:
                self._speed.evaluation_s = self._read_clock() - started_s
            if self.rank == 0:
                hooks.report(StartMeasured(progress.start))
        with hooks.stop_requests() if self.rank == 0 else no_stop_requests() as must_stop:
            self._take_steps(progress, hooks, evaluate, must_stop, started_s)
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
        self,
        progress: TrainingProgress,
        hooks: WorkerHooks,
        evaluate: Evaluate | None,
        must_stop: Callable[[], bool],
        started_s: float,
    ) -> None:
        """Trains the remaining steps, with checkpoints. Raises Stopped if a stop is requested.

        With a time limit, the first checkpoint is that of the step after which the number of steps is decided: a run
        that ends before it starts from the beginning, and every later one makes as many steps.
        """
        if self._from_rank_0(must_stop())[0]:
            raise Stopped
        saved_s = polled_s = time.monotonic()
        limit_s = 60 * self.options.checkpoint_minutes or math.inf
        save_s, is_draining = 0.0, False
        while progress.steps < self.options.steps:
            if evaluate and self.options.patience and progress.since >= self.options.patience:
                break
            step = progress.steps
            self.system.module.train()
            step_started_s = self._read_clock()
            loss, lr = self.step(step), self.options.learning_rate(step)
            progress.steps = step + 1
            is_decided = self._speed is None or progress.run_steps is not None
            if self._speed and not is_decided:
                self._speed.step_s.append(self._read_clock() - step_started_s)
                self._decide_steps(progress, self._speed, started_s)
            options = self.options
            last = progress.steps == options.steps
            quality = None
            if evaluate and options.evaluate_every and (last or progress.steps % options.evaluate_every == 0):
                quality = self._evaluate(evaluate, progress, hooks)
            if quality is not None or last or progress.steps % max(1, options.steps // CURVE_POINTS) == 0:
                progress.curve.append([progress.steps, loss, lr, quality])
            if last:
                self._add_cuts(progress)
            if self.rank == 0:
                hooks.report(
                    StepDone(progress.steps, loss, lr, quality, self.numerics, progress.cuts, progress.run_steps)
                )
            if self.refresh and options.refresh_every and not last and progress.steps % options.refresh_every == 0:
                self._mined = self.refresh.mine()
                self.refresh.train_on(self._mined)
            # The checkpoint comes last, so that a resumed run repeats neither the measurement nor the mining.
            now_s = time.monotonic()
            draining_s = max(DRAINING_CHECKPOINT_S, 2 * save_s)
            is_old, polls, stops = self._from_rank_0(
                now_s - saved_s >= (min(limit_s, draining_s) if is_draining else limit_s),
                # Before the number of steps is decided, nothing is saved.
                is_decided and not is_draining and now_s - polled_s >= DRAINING_POLL_S,
                must_stop(),
            )
            if polls:
                polled_s = now_s
                is_draining = hooks.is_node_draining()
                is_old = is_old or is_draining
                if is_draining and self.rank == 0:
                    hooks.report(NodeDraining(progress.steps, draining_s))
            is_due = is_old or stops or quality is not None or last or progress.steps % options.checkpoint_every == 0
            if (is_due and is_decided) or last or (progress.run_steps is not None and not is_decided):
                self._save_checkpoint(hooks.save, progress)
                saved_s = time.monotonic()
                save_s = saved_s - now_s
            if stops:
                raise Stopped

    def _read_clock(self) -> float:
        """Returns the monotonic time in seconds if there is a time limit, otherwise 0."""
        return time.monotonic() if self._speed else 0.0

    def _decide_steps(self, progress: TrainingProgress, speed: SpeedMeasurement, started_s: float) -> None:
        """Determines the number of steps of the run, once enough steps were measured on rank 0."""
        options = self.options
        if progress.steps == options.steps:
            return
        [steps] = self._from_rank_0(
            speed.fit_steps(self._read_clock() - started_s, options.steps, options.evaluate_every) or 0
        )
        if steps:
            progress.run_steps = steps
            self.options = replace(options, steps=steps)

    def _from_rank_0(self, *values: int) -> list[int]:
        """Broadcasts the values of rank 0, so that all workers act alike, for example when they write a checkpoint."""
        if self.world == 1:
            return list(values)
        first = torch.tensor(values, device=self.device)
        dist.broadcast(first, 0)
        numbers: list[int] = first.tolist()
        return numbers

    def step(self, step: int) -> float:
        """Runs a training step, numbered from 0, and returns the loss over the whole batch."""
        with Phase("tokenise"):
            batch = self.system.batch(step, self.rank, self.world)
        for chunk in batch.chunks:
            for noun, cuts in chunk.cuts.items():
                self._cuts[noun] = self._cuts.get(noun, Cuts()) + cuts
        total = self._add_batch_gradients(step, batch) if batch.outputs else self._add_chunk_gradients(step, batch)
        if not math.isfinite(total):
            raise self._diverged_error(step, f"the loss is {total}")
        norm = self.stepper.step(self.options.learning_rate(step))
        if not math.isfinite(norm):
            raise self._diverged_error(step, f"the gradient's norm is {norm}")
        return total

    def _add_batch_gradients(self, step: int, batch: Batch) -> float:
        """Adds the gradients of a loss over the outputs of the whole batch, and returns the loss."""
        chunks, runs_twice = self._chunks_to_run(batch)
        # Chunks beyond this number are repetitions, so that all workers run equally many.
        num_chunks = len(batch.chunks)
        totals = {
            name: torch.zeros(1 if output.rows is None else output.rows, output.width, device=self.device)
            for name, output in batch.outputs.items()
        }
        chunk_losses = torch.zeros((), device=self.device)
        graphs: list[_Forwarded] = []
        for chunk_number, chunk in enumerate(chunks):
            with torch.set_grad_enabled(not runs_twice):
                outputs, chunk_loss = self._forward(step, chunk_number, chunk)
            if chunk_number < num_chunks:
                check_outputs(outputs, chunk, batch)
                for name, output in outputs.items():
                    self._fill_rows(totals[name], output.detach(), chunk.rows.get(name))
                chunk_losses += 0.0 if chunk_loss is None else chunk_loss.detach()
            if not runs_twice:
                graphs.append((outputs, chunk_loss))
        if self.world > 1:
            for total in totals.values():
                dist.all_reduce(total)
            dist.all_reduce(chunk_losses)
        for total in totals.values():
            total.requires_grad_()
        loss = self.system.loss(totals, batch)
        if loss.requires_grad:
            loss.backward()
        gradients = {
            name: torch.zeros_like(total) if total.grad is None else total.grad for name, total in totals.items()
        }
        surrogates = []
        for chunk_number, chunk in enumerate(chunks):
            forwarded = self._forward(step, chunk_number, chunk) if runs_twice else graphs[chunk_number]
            if not runs_twice:
                graphs[chunk_number] = ({}, None)  # Frees the chunk's graph after this iteration.
            surrogate = self._surrogate(forwarded, chunk, gradients)
            surrogate = surrogate if chunk_number < num_chunks else 0 * surrogate
            if runs_twice and (surrogate.requires_grad or self.stepper.needs_equal_calls):
                self.stepper.backward(surrogate)
            elif surrogate.requires_grad:
                surrogates.append(surrogate)
        if surrogates:
            self.stepper.backward(torch.stack(surrogates).sum())
        return float(loss.detach() + chunk_losses)

    def _fill_rows(self, whole_output: torch.Tensor, output: torch.Tensor, rows: np.ndarray | None) -> None:
        """Writes a chunk's output into its rows of the whole output, or adds it to a summed output."""
        if rows is None:
            whole_output += output.sum(0, keepdim=True, dtype=whole_output.dtype)
        else:
            whole_output[torch.from_numpy(rows).to(self.device)] = output.to(whole_output.dtype)

    def _surrogate(
        self, forwarded: _Forwarded, chunk: BatchChunk, gradients: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns a scalar whose gradient is the chunk's contribution to the gradient of the batch loss."""
        outputs, chunk_loss = forwarded
        products = []
        for name, output in outputs.items():
            rows, gradient = chunk.rows.get(name), gradients[name]
            weight = gradient if rows is None else gradient[torch.from_numpy(rows).to(self.device)]
            products.append((output * weight).sum())
        if chunk_loss is not None:
            products.append(chunk_loss)
        return functools.reduce(torch.add, products)

    def _add_chunk_gradients(self, step: int, batch: Batch) -> float:
        """Adds the gradients of the chunk losses, one graph at a time, and returns the sum of these losses."""
        total = torch.zeros((), device=self.device)
        for chunk_number, chunk in enumerate(self._chunks_to_run(batch)[0]):
            _, chunk_loss = self._forward(step, chunk_number, chunk)
            assert chunk_loss is not None
            chunk_loss = chunk_loss if chunk_number < len(batch.chunks) else 0 * chunk_loss
            self.stepper.backward(chunk_loss)
            total += chunk_loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total)

    def _chunks_to_run(self, batch: Batch) -> tuple[list[BatchChunk], bool]:
        """Returns the worker's chunks, and whether each forward pass runs twice instead of keeping all graphs.

        If all workers must run the model equally often, the last chunk is repeated up to the largest number of any
        worker, and all workers decide alike.
        """
        chunks = list(batch.chunks)
        most = torch.tensor([len(chunks), sum(chunk.tokens for chunk in chunks)], device=self.device)
        if self.stepper.needs_equal_calls:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        count, tokens = most.tolist()
        chunks += [chunks[-1]] * (count - len(chunks))
        choice = self.options.grad_cache
        return chunks, choice == "on" or (choice == "auto" and tokens > GRAPH_TOKENS[self.device.type])

    def _forward(self, step: int, chunk_number: int, chunk: BatchChunk) -> _Forwarded:
        """Runs a chunk through the model. Dropout depends only on (seed, step, worker, chunk), so it is repeatable."""
        seeds = np.random.SeedSequence([self.options.seed, 2, step, self.rank, chunk_number]).generate_state(1)
        torch.manual_seed(int(seeds[0]))
        forwarded: _Forwarded = self.stepper.forward(chunk)
        return forwarded

    def _evaluate(self, evaluate: Evaluate, progress: TrainingProgress, hooks: WorkerHooks) -> float:
        quality = self._measure(evaluate)
        if not math.isfinite(quality):
            raise self._diverged_error(progress.steps - 1, "the vectors or scores of the dev split are not finite")
        if progress.best is None or quality > progress.best:
            progress.best, progress.best_step, progress.since = quality, progress.steps, 0
            self._save_checkpoint(hooks.save_best, progress)
        else:
            progress.since += 1
        return quality

    def _add_cuts(self, progress: TrainingProgress) -> None:
        """Adds all workers' counts of cut texts since the last call to the progress."""
        counted = [self._cuts.get(noun, Cuts()) for noun in NOUNS]
        sums = torch.tensor([[c.texts, c.tokens, c.cut_texts, c.cut_tokens] for c in counted], device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
        for noun, cuts, counts in zip(NOUNS, counted, sums.tolist(), strict=True):
            if counts[0]:
                added = Cuts(**progress.cuts.get(noun, {})) + replace(Cuts(*counts), limit=cuts.limit)
                progress.cuts = {**progress.cuts, noun: added.to_dict()}
        self._cuts = {}

    def _measure(self, evaluate: Evaluate) -> float:
        """Measures the quality of the current weights; every worker gets the value of rank 0."""
        self.system.module.eval()
        quality = evaluate()
        if self.world > 1:  # Other CPUs may round sums differently, and all workers must decide alike.
            first = torch.tensor(quality, dtype=torch.float64, device=self.device)
            dist.broadcast(first, 0)
            quality = float(first)
        return quality

    def _save_checkpoint(self, save: SaveCheckpoint, progress: TrainingProgress) -> None:
        """Saves trained weights, optimizer state and progress in one safetensors file."""
        self._add_cuts(progress)
        state = self.stepper.state()
        if not all(bool(torch.isfinite(value).all()) for value in state.values()):
            raise self._diverged_error(progress.steps - 1, "its weights are not finite")
        if self._mined is not None:
            state[_MINED] = self._mined
        if self.rank == 0:
            # AdamW is not recorded, so that its checkpoints have the same bytes as before other optimizers existed.
            other_optimizer = {} if self.optimizer == "adamw" else {"optimizer": self.optimizer}
            # For the same reason, the number of steps is recorded only if a time limit determined it.
            state_of_run = {k: v for k, v in vars(progress).items() if k != "run_steps" or v is not None}
            metadata = {"progress": json.dumps(state_of_run), **self.conditions, **other_optimizer}
            save(progress.steps, lambda path: save_file(state, path, metadata=metadata))

    def restore(self, path: Path | None) -> TrainingProgress:
        """Loads a checkpoint file and deletes it; None: training starts from the beginning.

        Raises:
            InputError: If the checkpoint has another numerics class or optimizer.
        """
        if path is None:
            return TrainingProgress(0, [])
        try:
            with safe_open(path, "pt") as file:
                conditions = dict(file.metadata())
                progress = TrainingProgress(**json.loads(conditions.pop("progress")))
                if (optimizer := conditions.pop("optimizer", "adamw")) != self.optimizer:
                    raise InputError(
                        f"the checkpoint was made with the optimizer {optimizer}, this run has "
                        f"{self.optimizer}: use the checkpoint's, or give another name"
                    )
                if conditions != self.conditions:
                    raise InputError(
                        f"the run was begun with {_describe_conditions(conditions)}, now "
                        f"{_describe_conditions(self.conditions)}: resume on such a machine, or give another name"
                    )
                self.stepper.load(file.get_tensor, progress.steps, self._output_sum)
                if self.refresh and _MINED in file.keys():  # noqa: SIM118
                    self._mined = file.get_tensor(_MINED)
                    self.refresh.train_on(self._mined)
        finally:
            path.unlink()
        return progress

    def _check_equal(self, text: str, problem: str) -> None:
        """Raises InputError on every worker unless all workers pass the same text."""
        if self.world == 1:
            return
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        ends = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if int(ends[0]) != -int(ends[1]):
            raise InputError(problem)

    def _output_sum(self) -> torch.Tensor:
        outputs, chunk_loss = self.stepper.forward(self.system.batch(0, self.rank, self.world).chunks[0])
        sums = [output.sum() for output in outputs.values()]
        return functools.reduce(torch.add, sums if chunk_loss is None else [*sums, chunk_loss])

    def _diverged_error(self, step: int, what: str) -> DivergedError:
        return DivergedError(
            f"step {step + 1}: {what}; the last checkpoint is from before it: give a smaller lr than "
            f"{self.options.lr}, or dtype float32, under another name"
        )


def _describe_conditions(conditions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
