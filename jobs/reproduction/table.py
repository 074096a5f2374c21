"""Reads and checks a table of a paper: rows, columns, the paper's figures, and an experiment for each scale.

    title: …                       # of the table
    paper: DPTDR
    number: "3"
    digits: 1                      # decimal places of the figures
    base: base.yaml                # a file with `scales` and `differs`, which those of the table complete
    columns:                       # a cell has the keys of its column and of its row
      - {title: MRR@10, metric: RR@10, paper: {sets: msmarco}, small: {sets: squad}}
    rows:
      - {title: fine-tuned, arm: finetuned, figures: [34.9]}
    differs: {paper: [...], small: [...]}     # sentences about what differs from the paper
    scales:
      paper: {sets: …, prepare: …, arms: …}   # as jobs/experiments/arms.py describes
      small: no small form: …                 # a sentence in place of an experiment

{store} stands for the folder of the stores of the scale, and {raw} for the folder of the raw data.
"""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.base.yaml_files import read_yaml
from riptide.jobs.commands.steps import replace_in
from riptide.jobs.experiments import Experiment, make_experiment, select_arms

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
TABLES = Path(__file__).resolve().parents[1] / "tables"
APPENDED = {"prepare", *SCALES}  # keys of lists whose items follow those of the base: steps, and sentences of a scale
Sets = str | list[str | list[str]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CellKeys(_Strict):
    """What is measured in a cell, as far as a row or a column says.

    Attributes:
        arm: The arm.
        sets: A set, or a list whose mean is reported; a list in it is one item of the mean.
        metric: A metric of `evaluate`.
        figure: Another figure of a run, for example alignment.
    """

    arm: str | None = None
    sets: Sets | None = None
    metric: str | None = None
    figure: str | None = None


class Line(CellKeys):
    """A row or a column. The keys of the scale override its own.

    Attributes:
        title: Its title.
        paper: Keys at the scale of the paper.
        small: Keys at the small scale.
    """

    title: str
    paper: CellKeys = CellKeys()
    small: CellKeys = CellKeys()

    def keys(self, scale: Scale) -> dict[str, Any]:
        """Returns the keys of the cells at a scale."""
        of_scale: CellKeys = getattr(self, scale)
        of_line = {key: getattr(self, key) for key in CellKeys.model_fields}
        return {key: value for key, value in {**of_line, **of_scale.model_dump(exclude_none=True)}.items() if value}


class Column(Line):
    """A column.

    Attributes:
        percent: Whether the figures of the paper are percentages.
    """

    percent: bool = True


class Row(Line):
    """A row.

    Attributes:
        figures: The figures of the paper by column; null: it gives none.
        arms: The arms by column, in place of `arm`.
    """

    figures: list[float | None]
    arms: list[str | None] | None = None


class Document(_Strict):
    """The file of a table; the docstring of the module describes it.

    Attributes:
        digits: Decimal places of the paper's figures.
    """

    title: str
    paper: str
    number: str
    base: str | None = None
    columns: list[Column] = Field(min_length=1)
    rows: list[Row] = Field(min_length=1)
    digits: int = 1
    differs: dict[Scale, list[str]] = Field(default_factory=dict)
    scales: dict[Scale, dict[str, Any] | str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        row: Number of its row.
        column: Number of its column.
        figure: The figure of the paper.
        arm: The arm that is measured; None: the cell is not measured.
        sets: The sets with their weights in the mean.
        metric: The metric.
        other: The other figure, if `metric` is None.
    """

    row: int
    column: int
    figure: float | None
    arm: str | None = None
    sets: tuple[tuple[str, float], ...] = ()
    metric: str | None = None
    other: str | None = None


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        name: Its name.
        path: Its file.
        document: Its content, with the scales of its base.
    """

    name: str
    path: str
    document: Document

    @property
    def heading(self) -> str:
        """The paper, the number and the title."""
        return f"{self.document.paper}, Table {self.document.number}: {self.document.title}"

    def experiment(self, scale: Scale, store: str, raw: str) -> Experiment:
        """Returns the part of the scale's experiment that the cells need.

        Args:
            scale: The scale.
            store: Folder of the stores.
            raw: Folder of the raw data.

        Raises:
            InputError: If the scale has no experiment, or an option in it is invalid.
        """
        values = self.document.scales.get(scale, f"no {scale} form")
        if isinstance(values, str):
            raise InputError(f"{Parameter('scale', scale)}: {self.name} has {values}")
        whole = make_experiment(replace_in(values, "{raw}", raw.rstrip("/")), self.path, store)
        measured: dict[str, list[str]] = defaultdict(list)
        for cell in self.cells(scale, whole):
            if cell.arm is not None:
                measured[cell.arm] += [name for name, _ in cell.sets if name not in measured[cell.arm]]
        return select_arms(whole, self.path, measured)

    def cells(self, scale: Scale, experiment: Experiment) -> Iterator[Cell]:
        """Yields the cells, row by row. A cell whose arm or set the experiment lacks is not measured."""
        for row_number, row in enumerate(self.document.rows):
            for number, column in enumerate(self.document.columns):
                keys = {**column.keys(scale), **row.keys(scale)}
                if row.arms is not None:
                    keys["arm"] = row.arms[number]
                cell = Cell(row_number, number, row.figures[number])
                sets = tuple(_weighted(keys.get("sets", []), 1.0))
                if keys.get("arm") in experiment.arms and sets and {name for name, _ in sets} <= experiment.sets.keys():
                    cell = Cell(
                        row_number, number, cell.figure, keys["arm"], sets, keys.get("metric"), keys.get("figure")
                    )
                yield cell


def _weighted(sets: str | Sequence[Any], weight: float) -> Iterator[tuple[str, float]]:
    """Yields the sets of a cell with their weights."""
    if isinstance(sets, str):
        yield sets, weight
    else:
        for each in sets:
            yield from _weighted(each, weight / len(sets))


def table_files() -> dict[str, Path]:
    """Returns the files of the tables by name."""
    order = sorted(TABLES.glob("*/*.yaml"), key=lambda file: (file.parent.name, len(file.stem), file.stem))
    return {file.stem: file for file in order if file.stem != "base"}


def find_table(name: str) -> Path:
    """Returns the file of a table.

    Args:
        name: The name of a table, or a file that ends with .yaml.

    Raises:
        InputError: If there is no such table; names similar ones.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    files = table_files()
    if name not in files:
        close = difflib.get_close_matches(name, files, 3, 0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(files)}"
        raise InputError(f"{Parameter('table', name)}: no such table; {hint}")
    return files[name]


def read_table(path: Path) -> Table:
    """Reads a table. Raises InputError that names the file and the key if it is invalid."""
    values = _read_mapping(path)
    if base := values.get("base"):
        shared = _read_mapping(path.parent / str(base))
        values |= {key: _merge(shared.get(key) or {}, values.get(key) or {}) for key in ("scales", "differs")}
    try:
        document = Document.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {key}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    table = Table(path.stem, str(path), document)
    _check(table)
    return table


def _read_mapping(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping."""
    values = read_yaml(str(path), "expected a YAML file of a table")
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(values).__name__}")
    return values


def _merge(base: Any, changes: Any) -> Any:
    """Returns `base` with changes: mappings are merged, items of APPENDED keys follow, other values are replaced."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    merged = {**base}
    for key, value in changes.items():
        lists = key in APPENDED and isinstance(base.get(key), list) and isinstance(value, list)
        merged[key] = [*base[key], *value] if lists else _merge(base.get(key), value)
    return merged


def _names(values: Any) -> Iterable[str]:
    """Returns the keys of a mapping; other values have none, and are refused with the experiment."""
    return values.keys() if isinstance(values, Mapping) else ()


def _check(table: Table) -> None:
    """Raises InputError for a row of another length than the columns, and for an arm or a set that no scale has."""
    document = table.document
    scales = [values for values in document.scales.values() if not isinstance(values, str)]
    arms, sets = ({name for each in scales for name in _names(each.get(key))} for key in ("arms", "sets"))
    for row in document.rows:
        for key, values in (("figures", row.figures), ("arms", row.arms)):
            if values is not None and len(values) != len(document.columns):
                raise InputError(
                    f"{table.path}: rows: {row.title}: {key}: found {len(values)} values, expected one for each of "
                    f"{len(document.columns)} columns"
                )
    lines = [("rows", row) for row in document.rows], [("columns", column) for column in document.columns]
    for kind, line in itertools.chain[tuple[str, Line]](*lines):
        keys = (line, line.paper, line.small)
        own_arms = [*(each.arm for each in keys), *(getattr(line, "arms", None) or ())]
        own_sets = [name for each in keys for name, _ in _weighted(each.sets or [], 1.0)]
        for noun, names, known in (("arm", own_arms, arms), ("set", own_sets, sets)):
            for name in filter(None, names):
                if name not in known:
                    raise InputError(f"{table.path}: {kind}: {line.title}: no scale has the {noun} {name!r}")
