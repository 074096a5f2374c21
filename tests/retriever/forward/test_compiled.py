"""Compiled encoders: one program for all shapes, the same bytes in every process, vectors close to float32."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from riptide.process import native
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward import compiling
from riptide.retriever.forward.compiling import compile_model

ROOT = Path(__file__).resolve().parents[3]
Tiny = Callable[..., Path]
# Encodes queries first, on as many threads as the second argument says.
PROGRAM = """
import sys, json, hashlib
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
options = EncoderOptions(compile="always", dtype="bfloat16", normalize=True)
encoder = Encoder(sys.argv[1], options, threads=int(sys.argv[2]))
texts = json.load(open(sys.argv[3]))
encoder.encode(texts[:3])
print(encoder.numerics)
print(hashlib.sha256(encoder.encode(texts, side="passage").tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_one_program_for_all_shapes_and_the_same_bytes_in_another_process(
    tiny: Tiny, texts: list[str], tmp_path: Path
) -> None:
    """Close to float32; the bytes depend neither on what was encoded first nor on the number of threads.

    The other process compiles while this one does.
    """
    folder, file = tiny("bert", layers=1), tmp_path / "texts.json"
    file.write_text(json.dumps(texts))
    command = [sys.executable, "-c", PROGRAM, str(folder), "1", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        compiled = Encoder(str(folder), EncoderOptions(compile="always", dtype="bfloat16", normalize=True), threads=2)
        exact = Encoder(str(folder), EncoderOptions(compile="never", dtype="float32", normalize=True))
        assert " compiled " in compiled.numerics
        assert " packed " in exact.numerics
        passages = compiled.encode(texts, side="passage")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for batch in ([""], ["a"], ["bank"] * 2, ["bank"] * 500, ["bank " * 60], texts):
                vectors = compiled.encode(batch)
                assert ((vectors * exact.encode(batch)).sum(1) > 0.999).all()
        assert compiled.encode(texts, side="passage").tobytes() == passages.tobytes()
    finally:
        output = process.communicate()[0]
    assert output.split("\n")[:-1] == [compiled.numerics, hashlib.sha256(passages.tobytes()).hexdigest()]


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


class Doubled(torch.nn.Module):
    """A model as small as one can be, with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * self.weight * values


@pytest.mark.slow
def test_a_process_compiles_more_models_than_torch_does_by_default() -> None:
    """Else the ninth encoder of a process would not be compiled, and would be of another numerics class. The limit of 8
    is set to 2, so that the test is short; models that are in use count."""
    device, opened = torch.device("cpu"), []
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():  # type: ignore[attr-defined]
        for _ in range(4):
            model = Doubled()
            run, compiled = compile_model(model, "auto", device, torch.bfloat16, [(torch.ones(8, 4),)])
            assert compiled
            opened.append((model, run))
        for rows in (8, 5):
            for model, run in opened:
                torch.testing.assert_close(run(torch.ones(rows, 4)), model(torch.ones(rows, 4)))


@pytest.mark.parametrize("before", [None, "torch's default", "named"])
def test_compiled_code_is_kept_in_a_private_folder_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None
) -> None:
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, default_cache_dir() if before == "torch's default" else str(before))
    if before is None:
        monkeypatch.delenv(variable)
    with compiling._private_cache():
        folder = Path(os.environ[variable])
    assert [*tmp_path.iterdir()] == ([] if before == "named" else [folder])
    assert str(folder) == "named" or folder.name.startswith("torch-")
