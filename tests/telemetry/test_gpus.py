"""The use of GPUs is measured by the torch that is loaded, here a replacement, and without NVML if that fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from riptide.telemetry import gpus
from riptide.telemetry.phases import add_measures, take_measures


def torch_with(percents: list[int] | None) -> SimpleNamespace:
    """Returns what `measure_gpus` uses of torch: two GPUs with a utilisation, which cannot be read if it is None."""

    def utilization(gpu: int) -> int:
        if percents is None:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return percents[gpu]

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_allocated=lambda gpu: (3, 5)[gpu],
        utilization=utilization,
    )
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize(("percents", "sampled"), [([50, 100], {"gpu_percent": 75.0, "gpu_samples": 1.0}), (None, {})])
def test_the_peak_is_the_largest_one_and_the_utilisation_is_sampled_once_a_second(
    percents: list[int] | None, sampled: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e6
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(gpus, "_next_sample_s", 0.0)
    take_measures()
    monkeypatch.setitem(sys.modules, "torch", torch_with(percents))
    assert take_measures() == {"gpu_bytes": 5.0, **sampled}
    add_measures({"gpu_bytes": 9.0, "compute": 1.0})  # of another process
    assert take_measures() == {"gpu_bytes": 9.0, "compute": 1.0}
    now += 1
    assert take_measures() == {"gpu_bytes": 5.0, **sampled}


@pytest.mark.parametrize("torch", [None, SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))])
def test_a_process_without_gpus_measures_none(torch: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    take_measures()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert take_measures() == {}
