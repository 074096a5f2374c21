"""The types of the keyword arguments of a store: a stub made from the options, and what mypy finds with it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

from riptide.base.option_fields import TextForm
from riptide.jobs.api.making import Making, _parameters_of
from riptide.jobs.api.python_store import Store
from riptide.jobs.commands.console import FILES
from riptide.jobs.common.flat_options import Option, metavar_of

ROOT = Path(__file__).resolve().parents[3]
STUB = ROOT / "jobs" / "api" / "keywords.pyi"
HEADER = '''"""The types of the keyword arguments of the methods of a store, made from the options of their jobs.

None stands for the default. `RIPTIDE_WRITE_TABLES=1 pytest tests/jobs/api/test_keywords.py` writes this file.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict
'''
# A program of a user, and what mypy says of its lines.
PROGRAM = """
# mypy: disallow-any-generics, disallow-untyped-calls, no-implicit-reexport, warn-return-any, strict-equality
from pathlib import Path

from riptide import Client, Encoder, Hits, InputError, Store, exact_search

store = Store(Path("data") / "squad", verbose=True)
corpus = store.import_corpus("raw/squad", id="number", filters={"year": "int64"}, append=False)
print(len(corpus), corpus.num_rows)
store.import_queries([{"id": "q1", "query": "who?"}], name="mine", split="dev")
embeddings = store.encode_corpus("intfloat/e5-small", name="e5", pooling="mean", max_workers=2)
store.build_index("e5", factory="IVF64,SQ8", shards=2, recall=0.95)
store.build_bm25(k1=0.9, b=0.4)
trained = store.train_retriever("mine", "intfloat/e5-small", train="prompts", sweep=["lr=1e-2,3e-2"], steps=None)
print(trained.key)
with store.search("hybrid", rerank="BAAI/bge-reranker-base") as search:
    hits = search("who wrote Dracula?", k=10, filter="year >= 1900")
    print([(hit.id, hit.score) for hit in hits])
run = store.search_queries("hybrid", split="test", filter={"year": {"gte": 1900}}, k=100)
print(store.evaluate([run, "bm25"], metrics=["nDCG@10"], split="test").to_pandas())
with store.serve(renew=True) as client:
    found = client.search("what is a rip current?", k=3)
vectors = Encoder("intfloat/e5-small").encode(["one"], side="query")
try:
    Client("http://127.0.0.1:8000").search("what?")
except InputError as error:
    print(error)
store.build_index(shard=2)  # unexpected keyword
store.encode_corpus("intfloat/e5-small", max_workers="two")  # wrong type
store.train_retriever(train="prompt")  # no such choice
store.import_corpora("raw")  # no such method
"""


def methods() -> dict[str, tuple[str, frozenset[str]]]:
    """Returns, for each method that takes options, the name of the type of its keywords, and its own parameters."""
    keywords_by_method = {}
    for name, member in {**vars(Making), **vars(Store)}.items():
        annotations = getattr(getattr(member, "__wrapped__", member), "__annotations__", {})
        if annotations.get("options", "").startswith("Unpack["):
            keywords = annotations["options"].removeprefix("Unpack[").rstrip("]")
            keywords_by_method[name] = keywords, frozenset(annotations) - {"options", "return"}
    return keywords_by_method


def written_type(option: Option, hint: object) -> str:
    """Returns the type of the values that a method takes for an option, without None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if option.name == "filter":
        return "str | Mapping[str, Any]"
    if origin in (typing.Union, types.UnionType):
        [inner] = [each for each in arguments if each is not type(None)]
        return written_type(option, inner)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')
    if origin in (tuple, list):
        item = written_type(option, arguments[0])
        return f"{item} | Sequence[{item}]"
    if origin is dict:
        return "Mapping[str, str]"
    assert isinstance(hint, type)
    if issubclass(hint, TextForm):
        return hint.PYTHON_TYPE
    return "str | PathLike[str]" if hint is str and metavar_of(option) in FILES else hint.__name__


def written_stub() -> str:
    lines = [HEADER]
    for method, (keywords, own) in methods().items():
        lines.append(f"class {keywords}(TypedDict, total=False):")
        options = _parameters_of(method).options.items()
        lines += [f"    {name}: {written_type(each, each.type)} | None" for name, each in options if name not in own]
        lines.append("")
    return "\n".join(lines)


def test_the_stub_has_the_options_of_each_method() -> None:
    assert len(methods()) == 18
    written = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"],
        cwd=ROOT,
        input=written_stub(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if os.environ.get("RIPTIDE_WRITE_TABLES"):
        STUB.write_text(written)
    assert STUB.read_text() == written


@pytest.mark.slow
def test_mypy_finds_the_mistakes_of_a_program(tmp_path: Path) -> None:
    """With the project's configuration, whose cache `make lint` has filled; the program itself is checked strictly."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [(int(line.split(":")[1]), line) for line in done.stdout.splitlines() if ": error: " in line]
    first = PROGRAM.splitlines().index("store.build_index(shard=2)  # unexpected keyword") + 1
    assert [line for line, _ in errors] == [first, first + 1, first + 2, first + 3], done.stdout + done.stderr
    words = ("shard", "max_workers", "prompts", "import_corpora")
    assert all(word in message for word, (_, message) in zip(words, errors, strict=True)), done.stdout
