"""Measures the GPUs that this process uses: the peak memory of torch's tensors, and the utilisation by NVML."""

from __future__ import annotations

import sys
import threading
import time

SAMPLE_S = 1.0  # seconds between two samples of the utilisation; NVML itself averages over up to a second

_lock = threading.Lock()
_next_sample_s = 0.0  # time.monotonic() from which the utilisation is sampled again; infinite once NVML failed


def measure_gpus() -> dict[str, float]:
    """Returns the measures of the GPUs that this process sees; {} without any, and then torch is not imported.

    Returns:
        gpu_bytes: The peak memory of tensors on one GPU since the process started; and, every SAMPLE_S seconds and if
        NVML can be read, gpu_percent: the mean utilisation of the GPUs in the last second, and gpu_samples: 1.
    """
    global _next_sample_s
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    gpus = range(torch.cuda.device_count())
    measures = {"gpu_bytes": float(max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))}
    with _lock:
        if time.monotonic() < _next_sample_s:
            return measures
        _next_sample_s = time.monotonic() + SAMPLE_S
    try:
        percent = sum(torch.cuda.utilization(gpu) for gpu in gpus) / len(gpus)
    except (
        Exception
    ):  # NVML is missing, or a GPU is lost; the class of its errors is in the package that may be missing
        _next_sample_s = float("inf")
        return measures
    return {**measures, "gpu_percent": percent, "gpu_samples": 1.0}
