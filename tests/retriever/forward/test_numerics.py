"""dtype auto: measured once per machine, and pinned by the numerics class of vectors that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from riptide.base.wording import Parameter
from riptide.process import native
from riptide.retriever.forward import numerics as module
from riptide.retriever.forward.numerics import (
    bfloat16_speed,
    choose_dtype,
    describe_dtype_choice,
    measure_bfloat16_speed,
)
from riptide.retriever.options import EncoderOptions

CPU = torch.device("cpu")


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the measured speed is kept, empty; the CPU says that it multiplies bfloat16."""
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(module, "bfloat16_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(module, "bfloat16_speed", bfloat16_speed.__wrapped__)
    return tmp_path


@pytest.mark.parametrize(("measured", "dtype"), [(0.5, torch.float32), (0.97, torch.bfloat16), (8.0, torch.bfloat16)])
def test_auto_is_the_faster_dtype_and_the_measurement_is_kept(
    speed: Path, monkeypatch: pytest.MonkeyPatch, measured: float, dtype: torch.dtype
) -> None:
    """Up to 5% in favour of float32 count as noise."""
    measurements = [measured]
    monkeypatch.setattr(module, "measure_bfloat16_speed", measurements.pop)
    assert choose_dtype("auto", CPU) == dtype
    assert choose_dtype("auto", CPU) == dtype  # from the file: nothing is left to pop
    assert len(list(speed.iterdir())) == 1


def test_a_damaged_file_is_measured_again_and_a_folder_that_cannot_be_had_is_no_fault(
    speed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = [0.5, 2.0, 0.25]
    monkeypatch.setattr(module, "measure_bfloat16_speed", measurements.pop)
    assert choose_dtype("auto", CPU) == torch.float32
    [file] = speed.iterdir()
    file.write_text("fast")
    assert choose_dtype("auto", CPU) == torch.bfloat16

    def refuse() -> Path:
        raise OSError("no private cache directory")

    monkeypatch.setattr(native, "cache_directory", refuse)
    assert choose_dtype("auto", CPU) == torch.float32


def test_auto_follows_the_class_of_vectors_that_exist(speed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bfloat16_speed", lambda: 8.0)
    assert choose_dtype("auto", CPU, "cpu amd avx512 float32 packed torch-2.13.0") == torch.float32
    monkeypatch.setattr(module, "bfloat16_speed", lambda: 0.5)
    assert choose_dtype("auto", CPU, "cpu amd avx512_bf16 bfloat16 packed torch-2.13.0") == torch.bfloat16
    assert choose_dtype("auto", CPU, "cuda NVIDIA H100 bfloat16 eager torch-2.13.0") == torch.float32
    assert choose_dtype("bfloat16", CPU, "cpu amd avx512 float32 packed torch-2.13.0") == torch.bfloat16
    monkeypatch.setattr(module, "bfloat16_instructions", lambda: None)  # a CPU that would emulate bfloat16
    assert choose_dtype("auto", CPU, "cpu amd avx512_bf16 bfloat16 packed torch-2.13.0") == torch.float32


def test_a_measurement_leaves_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    assert measure_bfloat16_speed() > 0
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("measured", "numerics", "line"),
    [
        (
            0.5,
            "cpu intel avx512 float32 packed torch-2.13.0",
            "dtype auto is float32, which this CPU multiplies 2.0 times as fast as bfloat16",
        ),
        (
            0.5,
            "cpu intel avx512_bf16 bfloat16 packed torch-2.13.0",
            "the vectors that exist have bfloat16, so the others get it too; this CPU multiplies float32 2.0 times as "
            f"fast: {Parameter('dtype', 'float32')} with another {Parameter('name')} is faster",
        ),
        (0.5, "cuda NVIDIA H100 bfloat16 eager torch-2.13.0", None),
        (2.0, "cpu intel avx512_bf16 bfloat16 packed torch-2.13.0", None),
    ],
)
def test_a_dtype_that_the_flags_do_not_suggest_or_that_is_slow_is_told(
    speed: Path, monkeypatch: pytest.MonkeyPatch, measured: float, numerics: str, line: str | None
) -> None:
    monkeypatch.setattr(module, "bfloat16_speed", lambda: measured)
    assert describe_dtype_choice(EncoderOptions(), numerics) == line
    assert describe_dtype_choice(EncoderOptions(dtype="bfloat16"), numerics) is None
