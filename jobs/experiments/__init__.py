"""Experiments: train arms with several seeds, choose options on a dev split, measure the test split, and compare.

arms          the file of an experiment: sets, arms, choices and comparisons, read from YAML and checked
choosing      chooses the values of an arm's options
experiment    runs the whole experiment, or prints what it would do
measuring     searches a split for an arm and evaluates the hits
performing    performs steps and records their time, or prints their commands
results       values by set, arm and seed, with intervals and paired tests, and the tables in Markdown
subsets       which queries have passages that training has seen
trials        a training run of an arm: its name, its data and the step that makes it

The names below are all that other packages and programs use.
"""

from riptide.jobs.experiments.experiment import RunExperiment, main
from riptide.jobs.experiments.measuring import ControlFunctions, ControlSearchRequest

__all__ = ["ControlFunctions", "ControlSearchRequest", "RunExperiment", "main"]
