"""Compiled encoders: one program for all shapes, the same bytes in every process, close to float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from retriever.encoder import Encoder, EncoderOptions

ROOT = Path(__file__).resolve().parents[2]
Tiny = Callable[..., Path]
PROGRAM = """
import sys, json, hashlib
from retriever.encoder import Encoder, EncoderOptions
encoder = Encoder(sys.argv[1], EncoderOptions(compile="always", dtype="bfloat16"), threads=int(sys.argv[2]))
texts = json.load(open(sys.argv[3]))
if sys.argv[4] == "queries first":
    encoder.encode(texts[:3])
print(encoder.numerics, hashlib.sha256(encoder.encode(texts, side="passage").tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_fresh_processes_make_the_same_bytes(tiny: Tiny, texts: list[str], tmp_path: Path) -> None:
    """Whatever was encoded first, and on however many threads."""
    import json

    folder, listed = tiny("bert"), tmp_path / "texts.json"
    listed.write_text(json.dumps(texts))
    lines = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), threads, str(listed), first],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for threads, first in [("2", "-"), ("1", "queries first")]
    }  # fmt: skip
    assert len(lines) == 1
    assert " compiled " in lines.pop()


@pytest.mark.slow
def test_one_program_for_all_shapes_and_close_to_float32(tiny: Tiny, texts: list[str]) -> None:
    folder = str(tiny("bert"))
    compiled = Encoder(folder, EncoderOptions(compile="always", dtype="bfloat16", normalize=True))
    exact = Encoder(folder, EncoderOptions(compile="never", dtype="float32", normalize=True))
    assert " compiled " in compiled.numerics
    assert " packed " in exact.numerics
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in ([""], ["a"], ["bank"] * 2, ["bank"] * 500, ["bank " * 60], texts):
            vectors = compiled.encode(batch)
            assert ((vectors * exact.encode(batch)).sum(1) > 0.999).all()
    assert compiled.encode(texts).tobytes() == compiled.encode(texts).tobytes()


def test_a_failing_compiler_falls_back_and_says_so(
    tiny: Tiny, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Callable[..., torch.Tensor]:
        def run(*_: object) -> torch.Tensor:
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    folder = str(tiny("t5"))
    encoder = Encoder(folder, EncoderOptions(compile="auto", dtype="bfloat16"))
    assert " eager " in encoder.numerics
    assert np.isfinite(encoder.encode(texts)).all()
    with pytest.raises(RuntimeError, match="no C"):
        Encoder(folder, EncoderOptions(compile="always", dtype="bfloat16"))
