"""The options of topic_prompts.py."""

from __future__ import annotations

import argparse
import os

from benchmarks.topics.runs import CONTROLS, PROTOCOLS
from benchmarks.topics.settings import SETTINGS

SETS = ("reuters-topics", "arxiv-topics")
PARTS = ("choose", "main", "controls", "text", "serve")
# Options that shape all figures of a file.
SHAPING = (
    "steps",
    "choose_steps",
    "batch",
    "passage_length",
    "passage_words",
    "topic_sample",
    "words",
    "iterations",
    "text_words",
    "limit",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.add_argument("--data", help="folder with the BEIR folders of all sets; needed except for --only serve")
    parser.add_argument("--folder", help="folder of stores and models; needed except for --only serve")
    parser.add_argument("--backbone", help="folder of the backbone `small` (see small_backbone.py)")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts to run (default: all)")
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="sets to run on (default: %(default)s)")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=["minilm", "small"],
        help="backbones (default: minilm; small too with --backbone)",
    )
    parser.add_argument(
        "--protocols",
        nargs="+",
        default=list(PROTOCOLS),
        choices=PROTOCOLS,
        help="main and text: the source of the topic of a query (default: both protocols)",
    )
    parser.add_argument(
        "--controls", nargs="+", default=list(CONTROLS), choices=CONTROLS, help="controls to run (default: all)"
    )
    parser.add_argument(
        "--control-protocols",
        nargs="+",
        default=["own"],
        choices=PROTOCOLS,
        help="controls: the source of the topic of a query (default: own)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="seeds of the training runs; choose and most controls use the first one (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of a training run (default: %(default)s)")
    parser.add_argument(
        "--choose-steps", type=int, default=200, help="steps of a training run of choose (default: %(default)s)"
    )
    parser.add_argument(
        "--choose-sets", nargs="+", help="choose: sets of --sets on whose dev splits it chooses (default: all of them)"
    )
    parser.add_argument(
        "--choose-settings",
        nargs="+",
        default=list(SETTINGS),
        choices=SETTINGS,
        help="choose: settings to choose; others keep the first of their values (default: all)",
    )
    parser.add_argument("--settings-of", help="instead of choose: a file of figures that has the settings of the arms")
    parser.add_argument("--batch", type=int, default=32, help="queries per step (default: %(default)s)")
    parser.add_argument(
        "--passage-length", type=int, default=128, help="maximum tokens per passage (default: %(default)s)"
    )
    parser.add_argument(
        "--passage-words", type=int, help="keep the first N words of each passage, in its topics and for BM25 too"
    )
    parser.add_argument(
        "--topic-sample", type=int, default=2, help="topics drawn per step for the loss of topics; 0: all (default: 2)"
    )
    parser.add_argument("--words", type=int, default=64, help="words per topic, for its prompt (default: %(default)s)")
    parser.add_argument(
        "--iterations",
        type=int,
        default=100,
        help="iterations of Gibbs sampling in a fit of topics (default: %(default)s)",
    )
    parser.add_argument(
        "--text-words", type=int, default=10, help="text: words in front of each text (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=int, help="use N passages of each set, and their queries, for a trial; needs its own --folder"
    )
    parser.add_argument("--count", type=int, default=640, help="serve: number of queries (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="serve: number of rounds (default: %(default)s)")
    parser.add_argument("--served-topics", type=int, default=10, help="serve: topics of a task (default: %(default)s)")
    parser.add_argument(
        "--served-length", type=int, default=32, help="serve: tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument("--json", default="results/topic_prompts.json", help="file of figures (default: %(default)s)")
