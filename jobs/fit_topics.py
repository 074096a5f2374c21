"""Fit topics to a corpus by hierarchical LDA; infer those of new passages.

    riptide fit-topics --store data/arxiv --name arxiv --page arxiv-topics.html
    riptide fit-topics --store data/arxiv --name control --method lda --topics 10

Needs tomotopy: pip install "riptide[topics]". If the corpus grows, the same command infers the topics of the new
passages; those of earlier passages do not change.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from dataclasses import dataclass, field
from typing import ClassVar

from riptide.base.option_fields import option
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topic_options import FitOptions
from riptide.indexing.topics.topics_page import write_page
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.topics.topics_work import KIND, FitTopicsWork
from riptide.indexing.work.work import check_targets, run_work
from riptide.jobs.common.job_options import EstimatedJob, Workers
from riptide.jobs.common.printing import print_complete, print_stages, say
from riptide.jobs.common.session import open_runner
from riptide.jobs.common.stage_progress import StageProgress

SHOWN_WORDS = 10  # number of words per topic in the printed lines


@dataclass(frozen=True, kw_only=True)
class FitTopics(Workers, EstimatedJob):
    GROUP: ClassVar = "output"
    MAKES: ClassVar = ("topics",)
    NAMED_BY: ClassVar = ("name",)

    name: str = "topics"
    """Name of the topics in the store."""
    fit: FitOptions = field(default_factory=FitOptions)
    page: str | None = option(None, metavar="FILE")
    """HTML file with the topics, their sizes and the tree."""
    overwrite: bool = False
    """Replace a file of --page that has other content."""


def main(options: FitTopics) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: FitTopics) -> Topics | None:
    """Fits the topics. Returns them, or None with --plan."""
    store.require_not_empty()
    work = FitTopicsWork(store, options.name, options.fit, limit=options.limit)
    if options.plan:
        print_plan(store, work, options.page)
        return None
    if not work.is_complete:
        run_work(store, work, open_runner(store, options), StageProgress)
    topics = Topics.open(store, options.name)
    print_topics(topics)
    if options.page:
        write_page(topics, options.page, overwrite=options.overwrite)
        say(options.page)
    return topics


def print_plan(store: Store, work: FitTopicsWork, page: str | None) -> None:
    """Prints the plan of a fit: what it reads and writes."""
    if work.is_complete:
        print_complete(work.previous[-1].url, page)
        return
    check_targets(store, work)
    rows = work.end - work.first_row
    say(f"corpus   {rows:,} passages without topics, in {len(work.parts):,} parts")
    if work.previous:
        say(f"topics   inferred by {work.previous[0].url}")
    else:
        say(f"fit      on at most {work.options.sample:,} of them, in one thread")
    print_stages(work)
    say(f"writes   {store.url}/{KIND}/{work.name}, about {rows * 8:,} bytes and the model")
    if page:
        say(f"writes   {page}")


def print_topics(topics: Topics) -> None:
    """Prints the number of passages and the first words of each topic."""
    sizes = topics.passages_per_topic()
    without = topics.num_rows - int(sizes.sum())
    nodes = topics.tree.nodes
    merged = sum(node.merged for node in nodes)
    for number, (size, words) in enumerate(zip(sizes.tolist(), topics.model.words, strict=True)):
        share = size / max(1, topics.num_rows)
        say(f"topic {number}: {size:,} passages ({share:.1%}): {' '.join(words[:SHOWN_WORDS])}")
    say(
        f"{topics.generations[-1].url}: {topics.model.num_topics} topics of {topics.num_rows:,} passages, {merged} "
        f"small topics merged, {without:,} passages without a topic"
    )


if __name__ == "__main__":
    run(main, FitTopics)
