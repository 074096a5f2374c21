"""A job's options as one flat list: names, values, recipes, --help, and one line for a mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.indexing.topics.topic_options import FitOptions
from riptide.jobs.commands.command_line import RENAMED, UsageError, as_arguments, parse_arguments, recipe_values
from riptide.jobs.common import flat_options
from riptide.jobs.common.job_options import Common
from riptide.jobs.search import SearchJob
from riptide.retriever.options import EncoderOptions


@dataclass(frozen=True, kw_only=True)
class Loop:
    GROUP: ClassVar = "optimisation"

    lr: float = 0.1
    """Peak learning rate."""
    hidden: int = option(64, flag="hidden-size", group="network")
    """Size of the network."""
    layers: tuple[str, ...] | None = None
    """Layers to train; default: all."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise InputError(f"parameter lr {self.lr}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class Job(Common):
    """--limit N uses the first N rows."""

    GROUP: ClassVar = "data"

    task: str
    """Name of the task."""
    kind: Literal["dense", "sparse"] = "dense"
    """dense-vectors: the mean; sparse: 50% of the words."""
    loop: Loop = field(default_factory=lambda: Loop(lr=0.5))
    seed: int | None = None
    """Seed; default: random."""
    normalize: bool | None = None
    dropout: bool = True
    """Train with dropout."""
    columns: dict[str, str] = field(default_factory=dict)
    pool_negatives: int = option(3, hidden=True)


def test_options_of_a_field_that_is_a_dataclass_are_options_of_the_job() -> None:
    flat = flat_options.options_by_name(Job)
    own = ["task", "kind", "lr", "hidden_size", "layers", "seed", "normalize", "dropout", "columns", "pool_negatives"]
    assert list(flat) == [*own, "store", "plan", "limit", "log_format"], "those of the job come first"
    assert {name: flat[name].group for name in ("task", "lr", "hidden_size", "store")} == {
        "task": "data",
        "lr": "optimisation",
        "hidden_size": "network",
        "store": "every job",
    }
    assert (flat["lr"].default, flat["lr"].help, flat["hidden_size"].flag) == (
        0.5,
        "Peak learning rate.",
        "--hidden-size",
    )
    assert [each.name for each in flat.values() if each.is_required] == ["task", "store"]


@dataclass(frozen=True, kw_only=True)
class Twice(Common):
    lr: float = 1.0
    loop: Loop = field(default_factory=Loop)


def test_the_sides_of_padding_have_the_order_of_other_libraries() -> None:
    """typing keeps one object for `Literal["left", "right"] | None` of all modules: that of the first import."""
    assert EncoderOptions.__mro__[1].__annotations__["padding_side"] == "Literal['left', 'right'] | None"


def test_equal_names_are_an_error_that_names_both_places() -> None:
    with pytest.raises(TypeError, match=r"^Twice: the option --lr is declared twice: lr and loop.lr$"):
        flat_options.options_by_name(Twice)


def test_values_are_built_and_replaced_by_name() -> None:
    job = flat_options.build_options(Job, {"store": "s", "task": "t", "hidden_size": 8})
    assert job == Job(store="s", task="t", loop=Loop(lr=0.5, hidden=8))
    assert flat_options.replace_options(job, {"lr": 0.25, "seed": 1}) == Job(
        store="s", task="t", loop=Loop(lr=0.25, hidden=8), seed=1
    )
    assert flat_options.options_by_name(Job)["hidden_size"].value(job) == 8
    with pytest.raises(InputError, match=r"parameter lr -1: expected more than 0"):
        flat_options.replace_options(job, {"lr": -1})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lr", "1e-3"], {"lr": 1e-3}),
        (["--hidden-size=9"], {"hidden_size": 9}),
        (["--hidden_size", "9"], {"hidden_size": 9}),
        (["--seed", "-1"], {"seed": -1}),
        (["--seed", "None"], {"seed": None}),
        (["--layers", "query", "value"], {"layers": ("query", "value")}),
        (["--layers"], {"layers": ()}),
        (["--normalize"], {"normalize": True}),
        (["--lr=0.2", "--lr", "1"], {"lr": 1.0}),
        (["--layers", "query", "--layers", "value", "key"], {"layers": ("query", "value", "key")}),
        (["--layers=-query", "--layers=value"], {"layers": ("-query", "value")}),
        (["--task", "-t"], {"task": "-t"}),
        (["--normalize", "False"], {"normalize": False}),
        (["--no-normalize"], {"normalize": False}),
        (["--plan", "--no-dropout"], {"plan": True, "dropout": False}),
        (["--no-plan", "--dropout"], {"plan": False, "dropout": True}),
        (["--columns", "year", "int64", "open", "bool"], {"columns": {"year": "int64", "open": "bool"}}),
        (["--kind", "sparse", "--pool-negatives", "7"], {"kind": "sparse", "pool_negatives": 7}),
    ],
)
def test_the_command_line_gives_values_and_is_written_from_them(arguments: list[str], expected: dict[str, Any]) -> None:
    needed = {"store": "s", "task": "t"}
    built = flat_options.build_options(Job, {**needed, **expected})
    assert parse_arguments(Job, ["--store", "s", "--task", "t", *arguments]) == built
    assert parse_arguments(Job, as_arguments(Job, {**needed, **expected})) == built


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--sed", "1"], "--sed: unknown option; did you mean --seed?"),
        (["--xyzzy=1"], "--xyzzy: unknown option; --help lists the options"),
        (["--undenoised", "3"], "--undenoised: unknown option; it is --pool-negatives now"),
        (["more"], "'more': unexpected argument; options have names, for example --store"),
        (["--seed", "many"], "--seed many: expected a whole number"),
        (
            ["--seed", str(2**63)],
            "--seed 9223372036854775808: expected a whole number of at most 9,223,372,036,854,775,807",
        ),
        ([f"--{'x' * 500}"], f"--{'x' * 131}…{'x' * 66}: unknown option; --help lists the options"),
        (["--hidden-size", "1.5"], "--hidden-size 1.5: expected a whole number"),
        (["--seed"], "--seed: expected one value"),
        (["--seed", "--plan"], "--seed: expected one value"),
        (["--lr", "-1e-3x"], "--lr -1e-3x: expected a number"),
        (["--plan=yes"], "--plan: expected no value, got 'yes'"),
        (["--kind", "spare"], "--kind spare: expected dense or sparse; did you mean sparse?"),
        (["--normalize", "often"], "--normalize often: expected true or false"),
        (["--columns", "year"], "--columns year: expected pairs of a name and a value"),
    ],
)
def test_a_wrong_command_line_gets_one_line(arguments: list[str], line: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_arguments(Job, ["--store", "s", "--task", "t", *arguments])
    assert str(raised.value) == line


def test_a_missing_option_is_named_with_its_help() -> None:
    with pytest.raises(UsageError, match=r"--task is required: Name of the task."):
        parse_arguments(Job, ["--store", "s"])


@dataclass(frozen=True, kw_only=True)
class Choose(Common):
    action: Literal["list", "show"] = option(positional=True)
    """What to do."""
    key: str | None = option(None, positional=True)


def test_a_command_line_has_positional_values_in_their_order_and_first() -> None:
    values = {"store": "s", "key": "k", "action": "show"}
    assert as_arguments(Choose, values) == ["show", "k", "--store", "s"]
    assert parse_arguments(Choose, as_arguments(Choose, values)) == Choose(**values)
    with pytest.raises(UsageError, match=r"^action is required: expected list or show$"):
        parse_arguments(Choose, ["--store", "s"])


def test_a_recipe_has_the_same_names_and_checks() -> None:
    assert recipe_values({"hidden-size": 8, "lr": "1e-3", "seed": None, "layers": ["query"]}, Job, "r.yaml") == {
        "hidden_size": 8,
        "lr": 1e-3,
        "layers": ("query",),
    }
    for settings, line in (
        ({"undenoised": 1}, "r.yaml: unknown key 'undenoised'; it is pool_negatives now"),
        ({"hidden": 1}, "r.yaml: unknown key 'hidden'; did you mean hidden_size?"),
        ({"kind": "spare"}, "r.yaml: kind: found 'spare', expected dense or sparse; did you mean sparse?"),
        ({"dropout": "no"}, "r.yaml: dropout: expected true or false, found 'no'"),
        (
            {"task": False},
            "r.yaml: task: found False, expected a text; on, off, yes and no are true and false in YAML: "
            "put a text in quotes",
        ),
        ({"layers": [["a"]]}, "r.yaml: layers: found [['a']], expected values, each a text"),
        ({"layers": ["a", None]}, "r.yaml: layers: found ['a', None], expected values, each a text"),
        ({"layers": {"a": "b"}}, "r.yaml: layers: found {'a': 'b'}, expected values, each a text"),
    ):
        with pytest.raises(InputError) as raised:
            recipe_values(settings, Job, "r.yaml")
        assert str(raised.value) == line


def test_help_lists_the_options_by_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(Job, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["required:", "data:", "optimisation:", "network:", "every job:"]
    lines = text.splitlines()
    assert lines[lines.index("required:") + 1].split()[:2] == ["--store", "STORE"]
    assert "  --lr X                    Peak learning rate. (default: 0.5)" in lines
    assert "  --seed N                  Seed; default: random." in lines
    assert "--limit N uses the first N rows." in lines
    assert "50% of the words. (default: dense)" in " ".join(text.split())
    assert "--config FILE" in text
    assert "None" not in text
    assert "--pool-negatives" not in text
    assert "--no-plan" not in text
    assert "--dropout, --no-dropout" in text


def test_a_type_that_the_command_line_cannot_express_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot express"):
        flat_options.describe_type(bytes)


def test_a_value_of_json_that_has_no_hash_is_refused() -> None:
    with pytest.raises(InputError, match=r"parameter pooling \['mean'\]: expected one of cls, mean, last, splade"):
        EncoderOptions(pooling=["mean"])  # type: ignore[arg-type]


def test_the_changelog_lists_the_renamed_options() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    for old, new in RENAMED.items():
        flags = [f"`--{name.replace('_', '-')}`" for name in (old, *new)]
        assert f"| {flags[0]} | {' or '.join(flags[1:])} |" in text


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: SearchJob(store="s", rerank_depth=0), "parameter rerank_depth 0: expected at least 1"),
        (lambda: SearchJob(store="s", limit=0), "parameter limit 0: expected at least 1"),
        (lambda: FitOptions(depth=1), "parameter depth 1: expected at least 2"),
    ],
)
def test_a_number_below_the_minimum_of_its_declaration_is_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(InputError) as raised:
        make()
    assert str(raised.value) == expected
