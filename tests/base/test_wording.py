"""Parameters and commands in messages: each front end writes them in its own words, also within other messages."""

from __future__ import annotations

import pickle

import pytest

from riptide.base.errors import InputError, TextsError
from riptide.base.wording import LIBRARY, Command, Parameter, printable, shown
from riptide.jobs.api.parameters import PYTHON
from riptide.jobs.common.starting import COMMAND_LINE


@pytest.mark.parametrize(
    ("message", "library", "line", "python"),
    [
        (f"{Parameter('recall')}: no", "parameter recall: no", "--recall: no", "recall=: no"),
        (
            f"{Parameter('memory_gb', 3.0)}: no",
            "parameter memory_gb 3.0: no",
            "--memory-gb 3.0: no",
            "memory_gb=3.0: no",
        ),
        (f"{Parameter('name', repr('a b'))}", "parameter name 'a b'", "--name 'a b'", "name='a b'"),
        (
            f"run {Command('build-index', shards='N')} again",
            "run riptide build-index --shards N again",
            "run riptide build-index --shards N again",
            "run store.build_index(shards=N) again",
        ),
        (
            f"{Command('import-corpus', append='')}, {Command('encode-corpus', store='s', name='v1.2')}",
            "riptide import-corpus --append, riptide encode-corpus --store s --name v1.2",
            "riptide import-corpus --append, riptide encode-corpus --store s --name v1.2",
            "store.import_corpus(append=…), store.encode_corpus(name='v1.2')",
        ),
        (f"{Command('serve-search', renew='')}", *["riptide serve-search --renew"] * 2, "store.serve(renew=…)"),
        (
            f"{Command('store', 'remove', 'index/a', store='b')}; {Parameter('name')} x",
            "riptide store remove index/a --store b; parameter name x",
            "riptide store remove index/a --store b; --name x",
            "store.remove('index/a'); name= x",
        ),
        (f"{Command('store', 'list', store='a')}", *["riptide store list --store a"] * 3),
        ("parameter x, --y, riptide z and a -- b", *["parameter x, --y, riptide z and a -- b"] * 3),
    ],
)
def test_each_front_end_has_its_words(message: str, library: str, line: str, python: str) -> None:
    assert LIBRARY.render(message) == library == str(InputError(message))
    assert COMMAND_LINE.render(message) == line
    assert PYTHON.render(message) == python


def test_values_outlive_other_messages_and_processes() -> None:
    inner = InputError(f"{Parameter('limit', 3)}: expected less")
    outer = pickle.loads(pickle.dumps(InputError(f"step 2: {inner}")))
    assert COMMAND_LINE.render(f"{outer}") == "step 2: --limit 3: expected less"
    assert str(outer) == "step 2: parameter limit 3: expected less"
    texts = TextsError(f"text 4: {inner}", {4: "long"})
    assert str(texts) == "text 4: parameter limit 3: expected less"
    assert pickle.loads(pickle.dumps(texts)).reasons == {4: "long"}


def test_the_flag_of_a_bool_is_no_text_that_reads_like_one() -> None:
    assert COMMAND_LINE.render(f"{Parameter('normalize', False)} {Parameter('plan', True)}") == "--no-normalize --plan"
    assert COMMAND_LINE.render(f"{Parameter('id', 'False')}: no") == "--id False: no"
    assert PYTHON.render(f"{Parameter('normalize', False)}") == "normalize=False"


def test_the_representation_of_an_error_is_in_words() -> None:
    assert repr(InputError(f"{Parameter('limit', 3)}: no")) == "InputError('parameter limit 3: no')"


def test_a_text_of_others_is_printable_and_its_words_are_short() -> None:
    hostile = "a\x1b[31m\x9b\r\n\u202e\ud800é\u200f"
    assert printable(hostile) == "a\\x1b[31m\\u009b\\r\\n\\u202e\\ud800é\u200f"
    assert printable(hostile, allowed="\n").count("\n") == 1
    name = "b" * 1000
    assert len(shown(name)) == 200
    short = f"{name[:133]}…{name[:66]}"
    command = Command("encode-corpus", store="c" * 300)
    assert str(InputError(f"/c/{name} d: {command}")) == f"/c/{short} d: {LIBRARY.render(f'{command}')}"
    assert COMMAND_LINE.render(f"{Parameter('name', f'{hostile[:3]} {name}')}").startswith("--name a\\x1b[ bb")
    assert len(f"{Parameter('name', name)}") < 250


MARKED = "a\ue001b"


def test_a_value_with_the_characters_of_a_mark_stays_a_value() -> None:
    assert COMMAND_LINE.render(f"{Parameter('name', MARKED)}: no") == "--name a\ue001b: no"


@pytest.mark.parametrize(
    "text",
    [
        "\ue000",
        "\ue001",
        "a\ue000b\ue001c",
        '\ue000["parameter"]\ue001',
        "\ue000[1, 2]\ue001",
        '\ue000["command", "a", [], []]\ue001',
        '\ue000["command", "a", [1], {}]\ue001',
        '\ue000["parameter", 1, 2]\ue001',
        f"\ue000{'[' * 100_000}\ue001",
    ],
    ids=range(9),
)
def test_a_text_with_the_characters_of_a_mark_does_no_harm(text: str) -> None:
    for words in (LIBRARY, COMMAND_LINE, PYTHON):
        assert set(words.render(text)) <= set(text)
