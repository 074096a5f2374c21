"""Experiments: train arms with several seeds, choose options on a dev split, measure the test split, and compare.

arms           the file of an experiment: sets, arms, choices and comparisons, read from YAML and checked
choosing       chooses the values of an arm's options
experiment     runs the whole experiment, or prints what it would do
measuring      searches a split for an arm and evaluates the hits
performing     performs steps and records their time, or prints their commands
preparing      the steps that prepare the sets, and the part of an experiment that some arms need
results        values by set, arm and seed, with intervals and paired tests, and the tables in Markdown
results_file   the file of the options and values of an experiment, and its tables
subsets        which queries have passages that training has seen
trials         a training run of an arm: its name, its data and the step that makes it

The names below are all that other packages and programs use.
"""

from riptide.jobs.experiments.arms import STORE, DataSet, Experiment, Settings, make_experiment, named_arms
from riptide.jobs.experiments.experiment import ExperimentRun, RunExperiment, main
from riptide.jobs.experiments.measuring import ControlFunctions, ControlSearchRequest
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.preparing import preparing_steps, select_arms
from riptide.jobs.experiments.results import Results, RunValues, table_lines
from riptide.jobs.experiments.results_file import (
    ENDING,
    check_name,
    check_results,
    describe_origin,
    describe_seeds,
    identity,
    read_results,
    read_values,
    results_bytes,
)
from riptide.jobs.experiments.trials import make_trial

__all__ = [
    "ENDING",
    "STORE",
    "ControlFunctions",
    "ControlSearchRequest",
    "DataSet",
    "Experiment",
    "ExperimentRun",
    "Performer",
    "Results",
    "RunExperiment",
    "RunValues",
    "Settings",
    "check_name",
    "check_results",
    "describe_origin",
    "describe_seeds",
    "identity",
    "main",
    "make_experiment",
    "make_trial",
    "named_arms",
    "preparing_steps",
    "read_results",
    "read_values",
    "results_bytes",
    "select_arms",
    "table_lines",
]
