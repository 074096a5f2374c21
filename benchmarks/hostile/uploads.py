"""The costliest known uploads of a prompt within their bounds: valid ones with one costly part."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

from benchmarks.hostile.requests import Hostile, upload

HEADER = 256 << 10  # maximum bytes of a header (serve/service/prompt_uploads.py)
SETTINGS = 256 << 10  # maximum bytes of prompt.json
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def prompt_uploads(folder: Path) -> dict[str, Callable[[], Hostile]]:
    """Returns functions that make uploads, by name.

    Args:
        folder: The folder of a valid prompt. Uploads with other weights have its settings with the right sha256, so
            that the header is read.
    """
    weights, settings = (folder / "prompt.safetensors").read_bytes(), (folder / "prompt.json").read_bytes()

    def with_header(header: str, data: bytes = b"") -> Hostile:
        content = header.encode()
        changed = struct.pack("<Q", len(content)) + content + data
        document = {**json.loads(settings), "sha256": hashlib.sha256(changed).hexdigest()}
        return upload(changed, json.dumps(document).encode())

    def with_field(text: str) -> Hostile:
        """The valid weights, and settings in which the field `backbone` is replaced by a JSON text."""
        others = {name: value for name, value in json.loads(settings).items() if name != "backbone"}
        return upload(weights, f'{json.dumps(others)[:-1]}, "backbone": {text}}}'.encode())

    def tensors(name: Callable[[int], str]) -> Hostile:
        return with_header("{" + ",".join(f'"{name(number)}":{EMPTY}' for number in range(HEADER // 60)) + "}")

    size = 128 << 20
    zeros = f'{{"query":{{"dtype":"F32","shape":[1,2,1,{size // 8},1],"data_offsets":[0,{size}]}}}}'
    room = SETTINGS - len(settings) - 100
    return {
        "prompt": lambda: upload(weights, settings),
        "prompt, one tensor name": lambda: tensors(lambda number: "a"),
        "prompt, names in pairs": lambda: tensors(lambda number: f"{number // 2:x}"),
        "prompt, many tensors": lambda: tensors(lambda number: f"{number:x}"),
        "prompt, a long tensor name": lambda: with_header(f'{{"{"a" * (HEADER - 100)}":{EMPTY}}}'),
        "prompt, many sizes": lambda: with_header(
            f'{{"a":{{"dtype":"U8","shape":[{"1," * (HEADER // 2 - 100)}1],"data_offsets":[0,1]}}}}', b"0"
        ),
        "prompt, metadata": lambda: with_header(
            '{"__metadata__":{' + ",".join(f'"{number:x}":""' for number in range(HEADER // 12)) + "}}"
        ),
        "prompt, a header of lists": lambda: with_header('{"a":[' + "[]," * (HEADER // 3 - 100) + "[]]}"),
        "prompt, integers": lambda: with_field("[" + "1," * (room // 2) + "1]"),
        "prompt, lists": lambda: with_field("[" + "[]," * (room // 3) + "[]]"),
        "prompt, long integers": lambda: with_field("[" + ",".join(["9" * 308] * (room // 310)) + "]"),
        "prompt, names": lambda: with_field("{" + ",".join(f'"{n:x}":1' for n in range(room // 11)) + "}"),
        "prompt, words": lambda: with_field("[" + ",".join(f'"{number:x}"' for number in range(room // 9)) + "]"),
        "prompt, one text": lambda: with_field('"' + "\\n" * (room // 2) + '"'),
        "prompt of 128 MiB": lambda: with_header(zeros, bytes(size)),
    }
