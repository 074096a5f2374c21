"""The small backbone of examples/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "backbone"


def test_the_small_backbone_opens_and_tells_texts_apart() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 5_000_000
    encoder = Encoder(str(FOLDER), EncoderOptions(dtype="float32", compile="never"), device=torch.device("cpu"))
    texts = [
        "The cathedral was built in the twelfth century by the bishop of the city.",
        "In the twelfth century the bishop built a church, the cathedral of the city.",
        "We study the spectrum of neutron stars with a new numerical method.",
    ]
    vectors = np.asarray(encoder.encode(texts), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors.shape == (3, 128)
    alike, unlike, _ = (vectors @ vectors.T)[np.triu_indices(3, 1)]
    assert alike > unlike
