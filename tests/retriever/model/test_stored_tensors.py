"""Headers of safetensors files and JSON texts of models: read in linear time, within bounds."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from riptide.base.errors import InputError
from riptide.retriever.model import weights
from riptide.retriever.model.json_fields import format_json, parse_json, read_object
from riptide.retriever.model.weights import read_tensors, tensor_shapes

EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def write(file: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Writes a file with a header; `length`: the length that it gives for the header, if another."""
    content = header.encode() if isinstance(header, str) else header
    file.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)
    return file


def test_a_local_file_may_have_many_tensors(tmp_path: Path) -> None:
    header = "{" + ",".join(f'"{number:x}":{EMPTY}' for number in range(12_000)) + "}"
    assert len(tensor_shapes(write(tmp_path / "many", header))) == 12_000


def test_values_are_those_of_python(tmp_path: Path) -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        kind = draw.randrange(8 if depth else 6)
        if kind > 5:
            inner = [value(depth - 1) for _ in range(draw.randrange(5))]
            return inner if kind == 6 else {str(draw.random())[: draw.randrange(5)]: one for one in inner}
        return [None, True, -(2**70), 1.5e-7, 'a"\\\n\u2028\U0001f600', float("inf")][kind]

    for _ in range(300):
        expected = value(5)
        text = json.dumps(expected, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        assert parse_json(f" {text}\n") == expected
        place = draw.randrange(len(text))
        damaged = text[:place] + draw.choice(["", ",", "}", "]", '"', "x", ":", "1"]) + text[place + 1 :]
        assert outcome(parse_json, damaged) == outcome(json.loads, damaged), damaged


def outcome(parse: Callable[[str], Any], text: str) -> str:
    """Returns the value in ASCII; json.loads also reads halves of surrogate pairs."""
    try:
        value = ascii(parse(text))
    except json.JSONDecodeError:
        return "not JSON"
    return "not JSON" if re.search(r"\\ud[89a-f]", value) else value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'{"a": ["\ud800"]}', "unpaired surrogate"),
        (r'{"\udfff\ud800": 1}', "unpaired surrogate"),
        ("[-1" + "0" * 308 + "]", "an integer of more than 308 digits"),
        ("[" * 30_000 + "1" + "]" * 30_000, "nested too deeply"),
    ],
)
def test_texts_that_other_programs_cannot_use_are_refused(text: str, message: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=message):
        parse_json(text)


def test_damaged_headers_are_refused_where_safetensors_refuses_them(tmp_path: Path) -> None:
    """Random changes of a header; a name that stands twice is refused here alone."""
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, data = whole[8:end].decode().rstrip(), whole[end:]
    draw, refused = random.Random(1), 0
    pieces = ["0", "1", "24", "-1", "1.0", "F16", "F32", "[", "]", "null", '"', ",", "\ud7ff", "99999999999999999999"]
    for _ in range(400):
        place = draw.randrange(len(header))
        changed = header[:place] + draw.choice(pieces) + header[place + draw.randrange(4) :]
        file = write(tmp_path / "file", changed, data[: len(data) - draw.choice([0, 0, 0, 1])])
        try:
            with safe_open(file, "pt") as opened:
                names = set(opened.keys())
        except SafetensorError:
            refused += 1
            with pytest.raises(InputError):
                tensor_shapes(file)
        else:
            assert set(tensor_shapes(file)) == names, changed
    assert refused > 200


def test_a_name_that_stands_twice_and_a_header_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.safetensors", '{"a":' + EMPTY + ',"a":' + EMPTY + "}")
    with pytest.raises(InputError, match='its header is not a table of tensors: duplicate field "a"'):
        read_tensors(twice)
    large = write(tmp_path / "large", b" " * (weights.MAX_HEADER + 1))
    with pytest.raises(InputError, match="a header of 4,194,305 bytes, expected up to 4,194,304"):
        tensor_shapes(large)


def test_a_json_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(InputError, match="more than 16,777,216 bytes; expected a JSON file"):
        read_object(tmp_path / "config.json")


def test_a_large_value_is_cut_in_messages() -> None:
    line = format_json(dict.fromkeys(map(str, range(200_000))))
    assert len(line) == 60
    assert line.endswith("…")
    assert format_json({"a": [1, None]}) == '{"a": [1, null]}'
