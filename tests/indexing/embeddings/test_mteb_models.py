"""Tasks and models of a store, opened for mteb, encode as the encoders that they consist of."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_bert

import riptide
from riptide.base.errors import InputError
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.encoding.mteb_encoder import MtebEncoder
from riptide.retriever.options import Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of

OPTIONS = EncoderOptions(dtype="float32", compile="never", query_prefix="w1 ", normalize=True)
PLAIN = EncoderOptions(dtype="float32", compile="never")
TEXTS = [f"w{number} w{number + 1}" for number in range(9)]


@pytest.fixture(autouse=True)
def _own_mteb_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing mteb makes its cache folder."""
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "mteb"))


def encode(model: MtebEncoder, side: Side) -> np.ndarray:
    """Encodes the texts as mteb's retrieval does; documents have no titles."""
    batch = {"text": TEXTS} if side == "query" else {"text": TEXTS, "body": TEXTS}
    task: Any = SimpleNamespace(name="Any", prompt=None)
    kind = "query" if side == "query" else "document"
    return model.encode([batch], task_metadata=task, hf_split="test", hf_subset="default", prompt_type=kind)


def commit(store: Store, kind: str, name: str, folder: Path, backbone: str) -> None:
    with store.create(kind, name, config={"backbone": describe(backbone, OPTIONS)}) as draft:
        draft.add_notes(backbone=backbone, options=asdict(OPTIONS))
        commit_files(draft, folder)


def test_tasks_and_models_of_a_store(tmp_path: Path) -> None:
    store, backbone = Store(str(tmp_path / "store")), str(save_bert(tmp_path / "backbone", spread=0.2))
    plain = Encoder(backbone, OPTIONS, tasks={})
    matrices = torch.randn(2, 2, 2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    prompt = TaskPrompt(backbone_of(plain.config), OPTIONS, *matrices)
    plain.put_task("task", prompt)
    (tmp_path / "prompt").mkdir()
    prompt.save(tmp_path / "prompt")
    query = Encoder(str(save_bert(tmp_path / "queries" / "query", spread=0.2, seed=1)), OPTIONS)
    passage = Encoder(str(save_bert(tmp_path / "both" / "passage", spread=0.2, seed=2)), OPTIONS)
    shutil.copytree(tmp_path / "queries" / "query", tmp_path / "both" / "query")
    commit(store, "prompts", "soft", tmp_path / "prompt", backbone)
    for name, folder in (("one", Path(backbone)), ("queries", tmp_path / "queries"), ("both", tmp_path / "both")):
        commit(store, "models", name, folder, backbone)

    cases: list[tuple[dict[str, Any], Encoder, Encoder, str | None, str]] = [
        ({"task": "soft"}, plain, plain, "task", "riptide/soft"),
        ({"task": "one"}, plain, plain, None, "riptide/one"),
        ({"task": "queries"}, query, plain, None, "riptide/queries"),
        ({"task": "both"}, query, passage, None, "riptide/both"),
        ({"encoder": "models/one", "options": OPTIONS}, plain, plain, None, "riptide/one"),
        ({"encoder": backbone, "options": OPTIONS, "name": "some/name"}, plain, plain, None, "some/name"),
    ]
    revisions = []
    for arguments, one, other, task, name in cases:
        model = riptide.open_mteb_encoder(store, **{"options": PLAIN, **arguments})
        assert encode(model, "query").tobytes() == one.encode(TEXTS, side="query", task=task).tobytes()
        assert encode(model, "passage").tobytes() == other.encode(TEXTS, side="passage", task=task).tobytes()
        assert model.mteb_model_meta.name == name
        revisions.append(model.mteb_model_meta.revision)
    assert len(set(revisions)) == 4
    assert revisions[1] == revisions[4] == revisions[5] == plain.fingerprint

    with pytest.raises(InputError, match="has no such prompt and no such model"):
        riptide.open_mteb_encoder(store, task="none")
