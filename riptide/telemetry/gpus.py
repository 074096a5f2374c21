"""Measures the GPUs that this process uses: the peak memory of torch's tensors, and the utilisation by NVML."""

from __future__ import annotations

import functools
import sys
import threading
import time

SAMPLE_S = 1.0  # seconds between two samples of the utilisation; NVML itself averages over up to a second

_lock = threading.Lock()
_sampled_s = -SAMPLE_S  # when the utilisation was last sampled


def measure_gpus() -> dict[str, float]:
    """Returns the measures of the GPUs that this process uses; {} without any, and then torch is not imported.

    Returns:
        gpu_bytes: The peak memory of tensors on one GPU since the process started; and, every SAMPLE_S seconds and if
        NVML can be read, gpu_percent: the mean utilisation of the GPUs in the last second, and gpu_samples: 1.
    """
    global _sampled_s
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    gpus = range(torch.cuda.device_count())
    measures = {"gpu_bytes": float(max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))}
    with _lock:
        is_due = time.monotonic() >= _sampled_s + SAMPLE_S
        _sampled_s = time.monotonic() if is_due else _sampled_s
    if is_due and has_nvml():
        percent = sum(torch.cuda.utilization(gpu) for gpu in gpus) / len(gpus)
        measures |= {"gpu_percent": percent, "gpu_samples": 1.0}
    return measures


@functools.cache
def has_nvml() -> bool:
    """Returns whether torch can read NVML: nvidia-ml-py is installed, and the driver and its permissions allow it."""
    try:
        sys.modules["torch"].cuda.utilization(0)
    except Exception:  # the class of its errors is in the package that may be missing
        return False
    return True
