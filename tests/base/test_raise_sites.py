"""The messages of every raise of an InputError: parameters and commands are values, and all have one structure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("riptide", "jobs", "serve", "indexing", "retriever")
OPTION = re.compile(r"(?<![\w-])--[a-z]")
KEYWORD = re.compile(r"(?<![\w.])[a-z][a-z_]*=(\{\}|['\w])")
COMMAND = re.compile(r"\briptide [a-z]+(-[a-z]+)*|python jobs/")
SEARCHES = {"sub", "subn", "search", "match", "fullmatch", "findall", "finditer"}
MESSAGES = {"error", "message", "cause", "exception"}  # names of values that hold a message

# Sites whose words have the form of an option or of a command, by file and a part of the message, with the reason.
LITERALS = {
    ("jobs/commands/command_line.py", "unknown option"): "an error of the command line itself",
    ("jobs/commands/command_line.py", "unexpected argument"): "an error of the command line itself",
    ("indexing/files/delimited.py", "pandas: index=False"): "a keyword of pandas",
    ("indexing/files/parquet_pages.py", "pyarrow: write_batch_size=1"): "a keyword of pyarrow",
    ("indexing/lucene/java.py", "pip install"): "an option of pip",
    ("indexing/work/nodes.py", "KEY=VALUE"): "the syntax of a label",
    ("indexing/training/training_sets.py", "expected queries=NAME"): "the syntax of a training set",
    ("jobs/comparison/comparison.py", "examples="): "an error of a method of Python alone",
    ("jobs/pictures/query_sets.py", "expected queries=NAME"): "the syntax of a query set",
    ("jobs/pictures/query_sets.py", "queries={},label=TEXT"): "the syntax of a query set",
    ("jobs/training/opening.py", "{} embeddings={} {}"): "the syntax of a training set",
    ("jobs/training/opening.py", "{} dev={}"): "the syntax of a training set",
    ("retriever/encoding/sparse_encoder.py", "the vector of text {} of {} {}"): "the last value has the remedy",
    ("retriever/interchange/prefix_tuning.py", "modules_to_save=None"): "a keyword of peft",
    ("retriever/model/modules.py", "include_prompt=false"): "a field of the file",
    ("retriever/prompts/query_words.py", "text {} of {} {}"): "the last value has the remedy",
    ("retriever/systems/prompt_kinds.py", "the query {} {}"): "the last value has the remedy",
    ("retriever/topics/training.py", "the query {}{} {}, or set {}"): "the value before the last one has the remedy",
}
# Regular expressions over messages, by file, with the reason.
REGULAR_EXPRESSIONS = {
    "jobs/api/raw_rows.py": "a store records the temporary files of earlier calls, whose folders no value holds",
    "retriever/model/weights.py": "a message of PyTorch, whose exception has no field for the name",
}


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the syntax tree of each file of the product by its path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files = {path for path in paths if path.resolve() == path}
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(files)}


@cache
def error_names() -> frozenset[str]:
    """Returns the names of InputError and of all classes that inherit it."""
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names: set[str] = set()
    more = {"InputError"}
    while more - names:
        names |= more
        more = {each.name for each in classes if {ast.unparse(base) for base in each.bases} & names}
    return frozenset(names)


def sites(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Yields the line and the message of each call that makes such an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in error_names():
            yield from ((node.lineno, argument) for argument in node.args[:1])


def words(message: ast.expr) -> str:
    """Returns the literal text of a message, with "{}" for each value."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in message.values)
    return "{}"


def problem_of(message: ast.expr) -> str | None:
    """Returns what is wrong with the literal text of a message, or with a text within one of its values."""
    text = words(message)
    texts = [str(node.value) for node in ast.walk(message) if isinstance(node, ast.Constant)]
    if any(OPTION.search(each) for each in texts):
        return "an option as text, expected Parameter(...)"
    if any(COMMAND.search(each) for each in texts):
        return "a command as text, expected Command(...)"
    if KEYWORD.search(text):
        return "a keyword as text, expected Parameter(...) or plain words"
    if text.endswith((".", "!")) or re.search(r"[a-z)]\. [A-Z]", text):
        return "several sentences or a full stop, expected one sentence without it"
    if text.strip("{}") and ": " not in text and "expected " not in text and not text.startswith("{}"):
        return "no structure, expected `place: found X, expected Y; remedy`"
    return None


def test_messages_name_parameters_as_values_and_have_one_structure() -> None:
    found, excepted, num_sites = [], set(), 0
    for file, tree in trees().items():
        for line, message in sites(tree):
            num_sites += 1
            if (problem := problem_of(message)) is None:
                continue
            text = words(message)
            if reasons := {key for key in LITERALS if key[0] == file and key[1] in text}:
                excepted |= reasons
            else:
                found.append(f"{file}:{line}: {problem}: {text}")
    assert not found, "\n".join(found)
    assert excepted == set(LITERALS), "an exception that no site needs any more"
    assert num_sites > 900


def searched_messages(tree: ast.Module) -> Iterator[int]:
    """Yields the lines on which a regular expression searches a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            names = {name.id for argument in node.args for name in ast.walk(argument) if isinstance(name, ast.Name)}
            if names & MESSAGES:
                yield node.lineno


def test_no_regular_expression_reads_a_message() -> None:
    found = {file: list(searched_messages(tree)) for file, tree in trees().items()}
    assert {file for file, lines in found.items() if lines} == set(REGULAR_EXPRESSIONS), found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('InputError(f"x: set --limit {n}")', "an option"),
        ("InputError(f\"{flag}: unknown; {remedy or '--help'}\")", "an option"),
        ('RowError("x: run riptide build-index")', "a command"),
        ('InputError(f"limit={n}: expected at least 1")', "a keyword"),
        ("InputError('x: try dtype=float32')", "a keyword"),
        ('InputError("x: found 3, expected 4.")', "several sentences"),
        ('InputError("x: is damaged. Make it again")', "several sentences"),
        ('InputError("this is wrong")', "no structure"),
        ("InputError(f\"{Parameter('limit', n)}: expected at least 1\")", None),
        ('InputError(f"{file}:{line}: found {x!r}, expected a number; correct it")', None),
    ],
)
def test_problems_of_messages_are_found(code: str, expected: str | None) -> None:
    [(_, message)] = sites(ast.parse(code))
    problem = problem_of(message)
    assert problem is None if expected is None else str(problem).startswith(expected)


def test_searches_of_messages_are_found() -> None:
    assert list(searched_messages(ast.parse('re.sub("a", "b", str(error))\nNAME.search(text)'))) == [1]
