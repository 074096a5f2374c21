"""Writes prompts as DPTDR's authors and PEFT save them, for a tiny backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LENGTH = 5  # tokens of a prompt


def random_rows(backbone: Path, seed: int, *, length: int = LENGTH) -> Any:
    """Returns a random prompt as rows, float32 [length, 2 * layers * hidden]."""
    import torch

    config = json.loads((backbone / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 2 * config["num_hidden_layers"] * config["hidden_size"], generator=generator)


def dptdr_state(backbone: Path, rows: Any) -> dict[str, Any]:
    """Returns the state dict of the authors' model for one side: backbone, classifier and prefix encoder."""
    import torch
    from safetensors.torch import load_file

    kind = json.loads((backbone / "config.json").read_text())["model_type"]
    weights = load_file(backbone / "model.safetensors")
    state = {f"{kind}.{name}": value for name, value in weights.items()}
    return {
        **state,
        f"{kind}.embeddings.position_ids": torch.arange(40)[None],
        "classifier.weight": torch.randn(1, 32),
        "prefix_encoder.embedding.weight": rows,
    }


def save_dptdr(folder: Path, backbone: Path, rows: Any, *, more: dict[str, Any] | None = None) -> Path:
    """Saves a folder of the authors' trainer for one model; `more` replaces tensors of the state dict."""
    import torch

    folder.mkdir(parents=True)
    config = json.loads((backbone / "config.json").read_text())
    settings = {"pre_seq_len": len(rows), "prefix": True, "prompt": False, "prefix_projection": bool(more)}
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    torch.save({**dptdr_state(backbone, rows), **(more or {})}, folder / "pytorch_model.bin")
    return folder


def save_peft(folder: Path, backbone: Path, seed: int, *, length: int = LENGTH, **options: Any) -> Any:
    """Saves an adapter that PEFT itself has made; returns PEFT's model."""
    import torch
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import AutoModel

    torch.manual_seed(seed)
    config = PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=length, **options)
    model = get_peft_model(AutoModel.from_pretrained(backbone), config).eval()
    model.save_pretrained(folder)
    return model
