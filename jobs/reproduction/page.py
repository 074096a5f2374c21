"""The page of a reproduction: our figures next to the paper's, with intervals, seeds, and what differs."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from riptide.base.html_page import html_page, html_table
from riptide.indexing.measures.metrics import Interval, bootstrap_interval, paired_p_value
from riptide.jobs.commands.steps import JobStep
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.experiments import (
    STORE,
    Experiment,
    Results,
    describe_origin,
    describe_seeds,
    make_trial,
    named_arms,
    preparing_steps,
    read_values,
    table_lines,
)
from riptide.jobs.planning.sizes import Sizes
from riptide.jobs.reproduction.raw_data import add_sizes, data_of, read_facts
from riptide.jobs.reproduction.table import Cell, Scale, Table

# Options of trainings that are compared with those at the scale of the paper.
SETTINGS = (
    "backbone",
    "prompt",
    "length",
    "sides",
    "pooling",
    "normalize",
    "temperature",
    "loss",
    "query_length",
    "passage_length",
    "batch",
    "negatives_per_query",
    "lr",
    "optimizer",
)
MANY = 4  # sets of which a page gives the sum of passages
RAW = "{raw}"  # stands for the folder of the raw data where no data are needed


@dataclass(frozen=True)
class Grid:
    """A table of a page: titles of the columns, and rows of plain text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Grid  # a paragraph or a table


def page_blocks(table: Table, scale: Scale, document: Mapping[str, Any]) -> list[Block]:
    """Returns the content of a page.

    Args:
        table: The table.
        scale: The scale.
        document: The content of the file of results.
    """
    experiment = table.experiment(scale, STORE, RAW)
    results = read_values(document)
    cells = [cell for cell in table.cells(scale, experiment) if is_measured(cell, results)]
    return [
        f"Each cell has our figure with its 95% interval over the queries, then that of the paper. {counts(results)}",
        figures_grid(table, scale, results, cells),
        *seeds_grid(table, results, cells),
        *differences_grid(experiment, results, cells),
        "What differs from the paper:",
        *differences_from_paper(table, scale, document["passages"]),
        describe_origin(document),
    ]


def is_measured(cell: Cell, results: Results) -> bool:
    """Returns whether all values of a cell exist."""
    if cell.arm is None:
        return False
    for set_name, _ in cell.sets:
        runs = [*results.values.get(set_name, {}).get(cell.arm, {}).values()]
        if not runs or any(cell.metric not in run.metrics and cell.other not in run.figures for run in runs):
            return False
    return True


def counts(results: Results) -> str:
    """Returns the numbers of queries and the seeds as sentences."""
    queries = {
        name: max(len(v) for by_seed in arms.values() for run in by_seed.values() for v in run.metrics.values())
        for name, arms in results.values.items()
    }
    parts = ", ".join(f"{count:,} queries of {name}" for name, count in queries.items())
    return f"{parts}. {describe_seeds(results)}"


def figures_grid(table: Table, scale: Scale, results: Results, cells: Sequence[Cell]) -> Grid:
    """Returns the table of the figures: each measured column is two, ours and the paper's."""
    rows = table.document.rows
    by_place = {(cell.row, cell.column): cell for cell in cells}
    head, texts = [""], [[row.title] for row in rows]
    for number, column in enumerate(table.document.columns):
        of_column = [cell for cell in cells if cell.column == number]
        head += [_our_title(column.title, of_column), "paper"] if of_column else [f"{column.title}: paper"]
        for place, row in enumerate(rows):
            if of_column:
                cell = by_place.get((place, number))
                factor = 100 if column.percent else 1
                texts[place].append("" if cell is None else _figure(cell, results, factor, table.document.digits))
            figure = row.figures[number]
            texts[place].append("" if figure is None else f"{figure:.{table.document.digits}f}")
    return Grid(head, texts)


def _our_title(title: str, cells: Sequence[Cell]) -> str:
    """Returns the title of a column of ours: that of the paper, and the measure and the set, if all cells have one."""
    measures = dict.fromkeys(cell.metric or cell.other or "" for cell in cells)
    sets = dict.fromkeys(tuple(name for name, _ in cell.sets) for cell in cells)
    names = next(iter(sets)) if len(sets) == 1 else ()
    place = f" of {names[0]}" if len(names) == 1 else f", mean of {len(names)} sets" if names else ""
    return f"{title}: here, {'/'.join(measures)}{place}"


def _figure(cell: Cell, results: Results, factor: float, digits: int) -> str:
    """Formats our figure of a cell, a metric with its interval."""
    if cell.metric is None:
        runs = _figures_by_seed(cell, results).values()
        return f"{factor * np.mean([*runs]):.{digits}f}"
    mean, low, high = (factor * value for value in cell_interval(cell, results))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def cell_interval(cell: Cell, results: Results) -> Interval:
    """Returns our figure of a cell with a metric, and its 95% interval over the queries."""
    values = [results.mean(name, cell.arm or "", cell.metric or "") for name, _ in cell.sets]
    return bootstrap_interval(values, [weight for _, weight in cell.sets])


def _figures_by_seed(cell: Cell, results: Results) -> dict[int, float]:
    """Returns our figure of a cell for each seed."""
    figures: dict[int, float] = defaultdict(float)
    for name, weight in cell.sets:
        for seed, run in results.values[name][cell.arm or ""].items():
            value = run.figures[cell.other or ""] if cell.metric is None else float(run.metrics[cell.metric].mean())
            figures[seed] += weight * value
    return dict(sorted(figures.items()))


def seeds_grid(table: Table, results: Results, cells: Sequence[Cell]) -> list[Block]:
    """Returns the figures of each seed for the cells that have several; [] if there are none."""
    columns, digits = table.document.columns, table.document.digits
    texts: dict[tuple[int, int], str] = {}
    for cell in cells:
        factor = 100 if columns[cell.column].percent else 1
        if len(by_seed := _figures_by_seed(cell, results)) > 1:
            texts[cell.row, cell.column] = ", ".join(f"{seed}: {factor * v:.{digits}f}" for seed, v in by_seed.items())
    if not texts:
        return []
    rows, numbers = (sorted({place[axis] for place in texts}) for axis in (0, 1))
    lines = [[table.document.rows[row].title, *(texts.get((row, n), "") for n in numbers)] for row in rows]
    return ["Our figures by seed:", Grid(["", *(columns[n].title for n in numbers)], lines)]


def differences_grid(experiment: Experiment, results: Results, cells: Sequence[Cell]) -> list[Block]:
    """Returns the differences of the pairs of arms, with intervals and p-values; [] without pairs."""
    measures = dict.fromkeys((cell.sets[0][0], cell.metric) for cell in cells if cell.metric and len(cell.sets) == 1)
    rows = []
    for one, other in experiment.pairs:
        row = [f"{one} - {other}"]
        for set_name, metric in measures:
            values = results.pair(set_name, one, other, metric or "")
            text = ""
            if values is not None and values[0] is not None:
                mean, low, high = bootstrap_interval([values[0] - values[1]])
                text = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] (p = {paired_p_value(values[1], values[0]):.2g})"
            row.append(text)
        if any(row[1:]):
            rows.append(row)
    if not rows:
        return []
    head = ["difference", *(f"{metric} of {name}" for name, metric in measures)]
    return ["Differences, with 95% intervals and p-values of paired tests:", Grid(head, rows)]


def differences_from_paper(table: Table, scale: Scale, passages: Mapping[str, int]) -> Iterator[Block]:
    """Yields what differs from the paper: sentences of the table, and settings next to those at the paper's scale.

    Args:
        table: The table.
        scale: The scale.
        passages: The number of passages of each set.
    """
    yield from table.document.differs.get(scale, [])
    here = settings_of(table, scale)
    if passages:
        experiment = table.experiment(scale, STORE, RAW)
        names, stores = store_names(experiment), {name: data.store for name, data in experiment.sets.items()}
        here["passages"] = _count_text({names[stores[name]]: count for name, count in passages.items()})
    if scale == "paper":
        yield Grid(["setting", "here"], [[name, value] for name, value in here.items()])
        return
    paper = settings_of(table, "paper") if isinstance(table.document.scales.get("paper"), Mapping) else {}
    rows = [[name, paper.get(name, ""), value] for name, value in here.items() if paper.get(name) != value]
    yield Grid(["setting", "scale of the paper", "here"], rows)


def settings_of(table: Table, scale: Scale) -> dict[str, str]:
    """Returns the data and the settings of the trainings of a scale: the values of all arms, as text."""
    experiment = table.experiment(scale, STORE, RAW)
    steps = preparing_steps(experiment, table.path)
    sizes = Sizes()
    for step in steps:
        add_sizes(sizes, step, RAW)
    passages = {store: corpus.rows for store, corpus in sizes.corpora.items()}
    names = store_names(experiment, passages)
    values: dict[str, dict[str, None]] = {
        name: {} for name in ("passages", "pretraining", "training queries", "training", *SETTINGS)
    }
    values["passages"][_count_text({names[store]: count for store, count in passages.items()})] = None
    backbones: dict[tuple[str, str], str] = {}
    for step in steps:
        if step.job == "pretrain_rip":
            source = flat_value(step, "backbone")
            source = backbones.get((step.options.store, source), source)
            backbones[step.options.store, f"models/{step.label}"] = f"{source} ({step.label})"
            length = f"{training_length(step)} in batches of {flat_value(step, 'batch'):,} passages"
            values["pretraining"][f"{step.label}: {length}"] = None
    first = {name: {o: v[0] for o, v in arm.tried.items()} for name, arm in experiment.arms.items()}
    for name, arm in experiment.arms.items():
        for set_name in experiment.sets_of(name) if arm.is_trained and arm.uses is None else ():
            step = make_trial(experiment, name, first, 0, set_name, choosing=False).step(table.path)
            store, queries = step.options.store, flat_value(step, "queries")
            trained = [(store, queries, flat_value(step, "split"))]
            for text in flat_value(step, "also_train"):
                keys = dict(pair.partition("=")[::2] for pair in text.split(","))
                trained.append((keys.get("store", store), keys.get("queries"), keys.get("split", "train")))
            for each in trained:
                if count := sizes.count_queries(*each):
                    count = min(count, flat_value(step, "task_size") or count)
                    values["training queries"][f"{each[1] or names[each[0]]} {count:,}"] = None
            values["training"][training_length(step)] = None
            for setting in SETTINGS:
                value = flat_value(step, setting)
                if value is not None and not named_arms(value):
                    values[setting][backbones.get((store, value), str(value))] = None
    return {name: ", ".join(sorted(texts)) for name, texts in values.items() if texts}


def store_names(experiment: Experiment, stores: Iterable[str] = ()) -> dict[str, str]:
    """Returns a name for each store of an experiment, and for other stores: that of its set, or its folder's."""
    sets: dict[str, list[str]] = {store: [] for store in stores}
    for name, data in experiment.sets.items():
        sets.setdefault(data.store, []).append(name)
    return {store: of[0] if len(of) == 1 else store.removeprefix(f"{STORE}/") for store, of in sets.items()}


def _count_text(counts: Mapping[str, int]) -> str:
    """Returns the number of passages of each set, or their sum if there are many sets."""
    if len(counts) > MANY:
        return f"{sum(counts.values()):,} of {len(counts)} sets"
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def flat_value(step: JobStep, name: str) -> Any:
    """Returns the value of an option of a step."""
    return options_by_name(type(step.options))[name].value(step.options)


def training_length(step: JobStep) -> str:
    """Returns the length of a training as text."""
    steps = flat_value(step, "steps")
    return f"{flat_value(step, 'epochs'):g} epochs" if steps is None else f"{steps:,} steps"


def markdown_page(title: str, blocks: Sequence[Block]) -> str:
    """Returns a page as Markdown."""
    lines = [f"# {title}"]
    for block in blocks:
        lines += ["", *(table_lines(block.head, block.rows) if isinstance(block, Grid) else [block])]
    return "\n".join(lines) + "\n"


def html_page_of(title: str, blocks: Sequence[Block]) -> str:
    """Returns a page as HTML."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        body.append(html_table(block.head, block.rows) if isinstance(block, Grid) else f"<p>{html.escape(block)}</p>")
    return html_page(title, body)


def licences(table: Table, scale: Scale) -> list[str]:
    """Returns a sentence about the source and the licence of each data set of a scale."""
    steps = preparing_steps(table.experiment(scale, STORE, RAW), table.path)
    names = dict.fromkeys(known[0] for step in steps if (known := data_of(step, RAW)) is not None)
    sets = read_facts().sets
    return [f"{name}: {sets[name].download}; licence: {sets[name].licence}." for name in names]
