r"""Draw a figure like those of the papers, as a PNG file and a JSON file.

attention: how similar query sets are for a task whose prompts are computed from each query, by the mean weights of the
basic prompts over each set (HYPER, Fig. 2):

    riptide draw attention --store data/kilt --task hyper --queries nq fever wow --split dev

rates: quality against queries per second (HYPER, Fig. 4), from files of evaluate. --rate gives the rate of a run whose
file has none, for example of runs/hyper:

    riptide evaluate --store data/kilt --source bm25 exact:base --rate-queries 1000 \
        --json results/base.json
    riptide evaluate --store data/kilt --run hyper --json results/hyper.json
    riptide draw rates --evaluation results/base.json results/hyper.json --metric nDCG@10 \
        --rate hyper=250

points: passages as points in the plane, by t-SNE of their vectors, coloured by topic and by category (Topic-DPR, Fig.
4). It needs scikit-learn (pip install ".[pictures]"):

    riptide draw points --store data/arxiv --embeddings topics --topics arxiv \
        --categories-field categories
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import Heading, options_by_name
from riptide.jobs.common.job_options import SizedWorkers, chosen_task
from riptide.jobs.common.printing import say
from riptide.jobs.pictures.measured import parse_labels, parse_rates, read_points
from riptide.jobs.pictures.query_sets import open_query_sets, parse_query_set
from riptide.process.extras import require

Picture = Literal["attention", "rates", "points"]
NAME_LENGTH = 80  # maximum number of characters of artifact names in the name of a picture
MAX_SEED = 2**32 - 1  # largest seed that scikit-learn accepts
NEEDED: dict[Picture, tuple[str, ...]] = {  # the required options of each picture
    "attention": ("store", "task", "queries"),
    "rates": ("evaluation",),
    "points": ("store",),
}


@dataclass(frozen=True, kw_only=True)
class Draw(SizedWorkers):
    GROUP: ClassVar = "picture"
    NAMED_BY: ClassVar = ("task", "embeddings")
    READS: ClassVar = {"task": "tasks", "embeddings": "embeddings", "topics": "topics"}

    picture: Picture = option(positional=True)
    """The picture."""
    store: str = option("", metavar="STORE")
    """Where the artifacts are: a local folder, or s3://, gs:// or az://bucket/prefix. rates needs none."""
    limit: int | None = None
    """Use the first N queries of each query set."""
    ATTENTION: ClassVar = Heading("attention")
    task: str | None = None
    """attention: task that was trained with --prompt synthesised."""
    queries: tuple[str, ...] = ()
    """attention: query sets to compare, in the order of the picture, each as NAME or as
    queries=NAME,split=NAME,label=TEXT,store=URL; a set may be in another store."""
    split: str = "test"
    """attention: split of the query sets that name none; all: every query."""
    RATES: ClassVar = Heading("rates")
    evaluation: tuple[str, ...] = ()
    """rates: JSON files of evaluate."""
    metric: str | None = None
    """rates: metric to draw; default: the first one of the first file."""
    rate: tuple[str, ...] = ()
    """rates: queries per second of runs, each as RUN=NUMBER, in place of the rate in the files; for example that of a
    server."""
    label: tuple[str, ...] = ()
    """rates: names of runs in the picture, each as RUN=TEXT. Runs with the same name are one point: their mean quality,
    and the rate of a mix with as many queries of each."""
    POINTS: ClassVar = Heading("points")
    embeddings: str | None = None
    """points: embeddings of the passages; may be left out if the store has only one."""
    topics: str | None = None
    """points: colour passages by these topics (`riptide fit-topics`); without --topics and --categories-field there is
    nothing to colour them by."""
    categories_field: str | None = None
    """points: colour passages by the categories in this metadata field. A passage with several has the colour of the
    one that most of the drawn passages have."""
    sample: int = 2_000
    """points: draw N random passages."""
    perplexity: float = 30.0
    """points: perplexity of t-SNE, about how many neighbours of a passage are kept near to it."""
    seed: int = 0
    """points: seed of the random passages and of t-SNE."""
    OUTPUT: ClassVar = Heading("output")
    png: str | None = option(None, metavar="FILE")
    """Output file for the picture, FILE.png; its numbers are in FILE.json. Default: results/PICTURE-NAMES.png."""
    title: str | None = None
    """Title of the picture; default: what it shows."""
    overwrite: bool = False
    """Replace the files of --png if they have other content."""


def main(options: Draw) -> None:
    check_options(options)
    require("a picture", "matplotlib")
    if options.picture == "attention":
        draw_attention(options)
    elif options.picture == "rates":
        draw_rates_of(options)
    else:
        draw_passages(options)


def check_options(options: Draw) -> None:
    """Raises InputError for a missing option that the picture requires, or for a given one that it does not use."""
    for name in NEEDED[options.picture]:
        if not getattr(options, name):
            raise InputError(f"{options.picture}: expected {Parameter(name)}")
    for each in options_by_name(Draw).values():
        picture = "attention" if each.name in ("limit", "ray") else each.group  # other headings are names of pictures
        if picture in get_args(Picture) and picture != options.picture and each.value(options) != each.default:
            raise InputError(
                f"{options.picture} {Parameter(each.name)}: this picture has no use for it, it goes with {picture}"
            )
    if options.png is not None and not options.png.endswith(".png"):
        raise InputError(f"{Parameter('png', options.png)}: expected a name that ends with .png")


def draw_attention(options: Draw) -> None:
    """Draws the similarities of query sets, computed from the mean weights of their basic prompts."""
    store = Store(options.store).require_not_empty()
    names = [parse_query_set(text) for text in options.queries]
    if len(names) < 2:
        raise InputError(
            f"{Parameter('queries', options.queries[0])}: one query set, expected at least 2 to compare; name more"
        )
    sets = open_query_sets(store, names, options.split, options.limit)
    from riptide.indexing.measures.prompt_weights import MeasureAttentionWork

    task = chosen_task(store, options.task) or ""
    work = MeasureAttentionWork(store, task)
    path = options.png or default_picture_path("attention", task, *(queries.label for queries in sets))
    if options.plan:
        for queries in sets:
            say(f"queries  {len(queries.texts):,} of {queries.key}")
        say(f"weights  of the {work.num_prompts} basic prompts of prompts/{task}")
        return say(f"writes   {path}")
    from riptide.jobs.common.session import open_runner
    from riptide.jobs.pictures.similarities import draw_similarities

    attention = work.run({queries.label: queries.texts for queries in sets}, open_runner(store, options))
    for label, number in zip(attention.labels, attention.num_without, strict=True):
        if number:
            say(f"warning: {label}: {number:,} queries have no word that the backbone knows, and do not count")
    numbers = attention.document()
    import numpy as np

    picture = draw_similarities(
        np.array(numbers["cosine"]),
        attention.labels,
        title=options.title or f"Mean attention of {task}",
        measure="cosine",
    )
    content = {"task": task, "queries": [queries.key for queries in sets], **numbers}
    write_picture(path, picture, content, options)
    counts = ", ".join(f"{n:,} {label}" for label, n in zip(attention.labels, attention.num_queries, strict=True))
    return say(f"attention of {task} over queries of {counts}: {path}")


def draw_rates_of(options: Draw) -> None:
    """Draws the quality of runs against their queries per second."""
    metric, points = read_points(
        options.evaluation, options.metric, parse_rates(options.rate), parse_labels(options.label)
    )
    path = options.png or default_picture_path("rates", metric, *(Path(file).stem for file in options.evaluation))
    for file in options.evaluation:
        if Path(file).resolve() == numbers_path(path).resolve():
            raise InputError(
                f"{Parameter('png', path)}: its numbers would replace {file}, which is drawn; give another name"
            )
    if options.plan:
        return say(f"writes   {path}, {len(points)} points")
    from riptide.jobs.pictures.rate_chart import draw_rates

    title = options.title or f"{metric} and queries per second"
    picture = draw_rates(points, metric=metric, title=title)
    document = {"metric": metric, "files": list(options.evaluation), "points": [asdict(point) for point in points]}
    write_picture(path, picture, document, options)
    for point in points:
        say(f"{point.label}: {metric} {point.quality:.4f}, {point.queries_per_s:,.4g} queries/s")
    return say(f"{len(points)} points: {path}")


def draw_passages(options: Draw) -> None:
    """Draws a t-SNE of the vectors of passages, coloured by topic and by category."""
    from riptide.jobs.pictures.drawn_passages import open_points

    if options.topics is None and options.categories_field is None:
        raise InputError(
            f"points: expected {Parameter('topics')} or {Parameter('categories_field')}, to colour passages by; "
            f"give one or both"
        )
    if options.sample < 2 or not 0 <= options.seed <= MAX_SEED:
        raise InputError(
            f"{Parameter('sample', options.sample)} {Parameter('seed', options.seed)}: expected at least 2, and 0 "
            f"to {MAX_SEED}"
        )
    points = open_points(
        Store(options.store).require_not_empty(),
        options.embeddings,
        topics=options.topics,
        field=options.categories_field,
        sample=options.sample,
        seed=options.seed,
    )
    name = points.embeddings.name
    path = options.png or default_picture_path("points", name, *(panel.title for panel in points.panels))
    if options.plan:
        say(f"passages {len(points.rows):,} of {points.embeddings.num_rows:,} of embeddings/{name}")
        return say(f"writes   {path}")
    from riptide.jobs.pictures.points import draw_points, tsne_positions

    positions = tsne_positions(points.embeddings.take(points.rows), perplexity=options.perplexity, seed=options.seed)
    picture = draw_points(positions, points.panels, title=options.title or f"t-SNE of passages, {name}")
    document = {
        "embeddings": name,
        "perplexity": options.perplexity,
        "seed": options.seed,
        "ids": points.ids,
        "positions": positions.round(4).tolist(),
        **{panel.title: list(panel.groups) for panel in points.panels},
    }
    write_picture(path, picture, document, options)
    return say(f"{len(points.rows):,} of {points.embeddings.num_rows:,} passages of embeddings/{name}: {path}")


def default_picture_path(kind: str, *names: str) -> str:
    """Returns the default path of a picture: its kind and the names of the artifacts that it shows."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(names))[:NAME_LENGTH]
    return f"results/{kind}-{text}.png"


def write_picture(path: str, picture: bytes, document: dict[str, Any], options: Draw) -> None:
    """Writes a picture and its JSON file, or neither if a file with other content exists and --overwrite is not set."""
    numbers = json.dumps(document, indent=1) + "\n"
    write_files([(path, picture), (str(numbers_path(path)), numbers)], overwrite=options.overwrite)


def numbers_path(path: str) -> Path:
    """Returns the path of the JSON file with the numbers of a picture."""
    return Path(path).with_suffix(".json")


if __name__ == "__main__":
    run(main, Draw)
