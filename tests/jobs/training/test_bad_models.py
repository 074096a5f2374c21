"""A model that cannot be opened leaves no draft, so the corrected command runs as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.store.store import Store


@pytest.mark.parametrize(("form", "kind"), [(TUNE, "prompts"), (RERANK, "models"), (RIP, "models")])
def test_a_model_without_a_layer_leaves_no_draft(
    world, mined: Store, done, refused, tmp_path: Path, documented: Callable[..., None], form: tuple, kind: str
) -> None:
    folder = Path(shutil.copytree(world.model, tmp_path / "bert"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "layer.1." not in name}, file, {"format": "pt"})
    arguments = [*command(form, world, "t", "--steps", 2)]
    arguments[arguments.index("--backbone") + 1] = folder
    line = refused(*arguments)
    assert "layer.1" in line
    assert mined.incomplete_keys() == []
    assert not (world.store / "checkpoints").exists()
    if form is TUNE:
        documented("Training", "a backbone that lacks a layer", line, 1)
    file.write_bytes(whole)
    done(*arguments)
    assert mined.names(kind) == ["t"]
