"""Derives the number of steps of a training run from a time limit and the speed of its first steps."""

from __future__ import annotations

from dataclasses import dataclass, field

# Minimum steps, and minimum share of the time limit, before the number of steps is determined.
MIN_STEPS, MIN_SHARE = 10, 0.02
FEW_STEPS, MAX_SHARE = 3, 0.2  # After this share of the time limit, fewer steps are enough.
USED_SHARE = 0.95  # share of the time limit for training; the rest is for checkpoints and slower steps


@dataclass
class SpeedMeasurement:
    """The durations of a run's first steps and of an evaluation.

    Attributes:
        limit_s: The time that the run may take, in seconds.
        step_s: Seconds of each step.
        evaluation_s: Seconds of a measurement on the dev split; 0 without one.
    """

    limit_s: float
    step_s: list[float] = field(default_factory=list)
    evaluation_s: float = 0.0

    def fit_steps(self, elapsed_s: float, max_steps: int, evaluate_every: int) -> int | None:
        """Returns the total number of steps of the run, including steps done; None if too few steps were measured.

        Args:
            elapsed_s: Seconds since the run began.
            max_steps: The largest number of steps, more than are done.
            evaluate_every: Steps between two measurements on the dev split; 0: none.
        """
        done, share = len(self.step_s), elapsed_s / self.limit_s
        least = MIN_STEPS if share < MAX_SHARE else FEW_STEPS
        if done < least or share < MIN_SHARE:
            return None
        # The first step is excluded, because it also prepares memory and kernels.
        step_s = sum(self.step_s[1:]) / (done - 1)
        if evaluate_every:
            step_s += self.evaluation_s / evaluate_every
        left_s = USED_SHARE * self.limit_s - elapsed_s - self.evaluation_s
        return min(max_steps, done + max(1, int(left_s / max(step_s, 1e-9))))
