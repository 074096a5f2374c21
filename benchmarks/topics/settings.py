"""The settings of training runs, and the values that the part `choose` tries."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.topics.runs import SAME_TOPIC

Settings = Mapping[str, float]
"""lr, temperature, alpha, margin and length; weight alone for `same-topic`."""

# What the choice begins with, and the values that it then tries in this order. DPTDR has the length of the topics.
START = {"lr": 1e-3, "temperature": 0.05, "alpha": 0.1, "margin": 0.1, "length": 32}
CANDIDATES: dict[str, dict[str, tuple[float, ...]]] = {
    "topic": {
        "lr": (1e-3, 3e-3, 3e-4, 1e-2),
        "temperature": (0.05, 0.1, 0.02),
        "alpha": (0.1, 0.03, 0.3),
        "margin": (0.1, 0.3),
        "length": (32, 16),
    },
    # With 3e-1, one prompt over the small backbone is better after 100 steps, and worse after 600.
    "dptdr": {"lr": (1e-2, 3e-2, 1e-1, 3e-3), "temperature": (0.05, 0.1, 0.02)},
    "dptdr-mlp": {"lr": (1e-3, 3e-3, 1e-2, 3e-4)},
    SAME_TOPIC: {"weight": (0.1, 0.03, 0.3, 1.0)},
    "fine-tune": {"lr": (1e-4, 2e-5, 5e-4)},
}
SETTINGS = tuple(dict.fromkeys(key for values in CANDIDATES.values() for key in values))
