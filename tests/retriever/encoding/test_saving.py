"""Saving a model prints nothing, whichever library transformers imports for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SAVE = """
import sys
from pathlib import Path
from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.encoding.saving import save_encoder
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
import torch

recipe = read_recipe(Path(sys.argv[1]), EncoderOptions(pooling="mean"))
save_encoder(Path(sys.argv[2]), recipe, open_pooled(recipe, torch.float32).model_to_save)
print("deepspeed" in sys.modules)
"""


def test_saving_prints_no_line_of_deepspeed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "DEEPSPEED_"))}
    variables["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    command = [sys.executable, "-c", SAVE, str(tiny("bert")), str(tmp_path / "saved")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
