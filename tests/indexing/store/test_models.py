"""Models as artifacts open in stock libraries as they were saved, and checkpoints count whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from tiny import save_bert
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from riptide.base.errors import InputError
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import (
    StoredCheckpoint,
    abandoned_checkpoints,
    commit_files,
    model_folder,
    resolve_model,
    stored_model,
)
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.reranker import Reranker, RerankerOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny cross-encoder, saved."""
    saved = save_bert(tmp_path / "saved")
    torch.manual_seed(0)
    BertForSequenceClassification.from_pretrained(saved, num_labels=1).save_pretrained(saved)
    return saved


def commit(store: Store, folder: Path, name: str = "ce") -> Artifact:
    with store.create("models", name, config={"folder": 1}) as draft:
        commit_files(draft, folder)
    return store.open("models", name)


def test_the_folder_comes_back_as_it_was(store_url: str, folder: Path) -> None:
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text("{}")
    store = Store(store_url)
    found = model_folder(commit(store, folder))
    expected = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path.relative_to(found): path.read_bytes() for path in found.rglob("*") if path.is_file()} == expected
    assert len(expected) == 5
    assert found == model_folder(store.open("models", "ce"))
    assert all(finding.problem is None for finding in verify(store))


def test_stock_libraries_open_it(store_url: str, folder: Path) -> None:
    store = Store(store_url)
    commit(store, folder)
    found = resolve_model(store, "models/ce")
    pair = ("w1 w2", "w3 w4 w5")
    expected = Reranker(str(folder), RerankerOptions(dtype="float32")).score(*[[text] for text in pair])
    model = AutoModelForSequenceClassification.from_pretrained(found).eval()
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(found)([pair[0]], [pair[1]], return_tensors="pt")).logits
    np.testing.assert_allclose(torch.sigmoid(logits)[0], expected, atol=1e-6)
    np.testing.assert_allclose(CrossEncoder(found, device="cpu").predict([pair]), expected, atol=1e-6)
    np.testing.assert_array_equal(
        Reranker(found, RerankerOptions(dtype="float32")).score(*[[text] for text in pair]), expected
    )


def test_other_names_are_given_back(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "/some/folder", "./models/ce", "models", "models/"):
        assert resolve_model(store, name) == name


def test_a_model_of_another_store_is_a_folder_like_others(store_url: str, folder: Path, tmp_path: Path) -> None:
    artifact, own = commit(Store(store_url), folder), Store(str(tmp_path / "own"))
    assert resolve_model(own, f"{store_url}/models/ce") == str(model_folder(artifact))
    assert stored_model(own, f"{store_url}/models/ce") is None
    (tmp_path / "models" / "ce").mkdir(parents=True)
    assert resolve_model(own, f"{tmp_path}/models/ce") == f"{tmp_path}/models/ce"
    if "://" in store_url:
        with pytest.raises(InputError, match=r"models/none: there is no such artifact \(complete models: ce\)"):
            resolve_model(own, f"{store_url}/models/none")


def test_a_model_that_is_not_there(store_url: str, folder: Path) -> None:
    store = Store(store_url)
    commit(store, folder)
    with pytest.raises(InputError, match=r"models/other: there is no such artifact \(complete models: ce\)"):
        resolve_model(store, "models/other")


def test_an_interrupted_commit_goes_on(store_url: str, folder: Path) -> None:
    store = Store(store_url)
    draft = store.create("models", "ce", config={})
    draft.commit(
        "file-00000", ".file", lambda path: shutil.copyfile(folder / "config.json", path), rows=0, path="config.json"
    )
    with store.create("models", "ce", config={}) as draft:
        commit_files(draft, folder)
    assert (model_folder(store.open("models", "ce")) / "model.safetensors").stat().st_size > 1000


def test_other_files_than_those_committed_are_refused(tmp_path: Path, folder: Path) -> None:
    store = Store(str(tmp_path / "store"))
    draft = store.create("models", "ce", config={})
    draft.commit("file-00000", ".file", lambda path: path.write_text("x"), rows=0, path="README.md")
    with pytest.raises(InputError, match=r"holds README\.md, now config\.json"):
        commit_files(draft, folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.pt", "0_Transformer/state.pkl"])
def test_pickled_files_are_refused(tmp_path: Path, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(InputError, match=f"{name}: a pickled file"):
        commit(Store(str(tmp_path / "store")), folder)


def test_an_artifact_without_files_is_no_model(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    with store.create("models", "empty"):
        pass
    with pytest.raises(InputError, match="holds no model's files"):
        resolve_model(store, "models/empty")


def test_a_path_that_leads_out_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for number, path in enumerate(["../outside.json", "/tmp/outside.json"]):
        with store.create("models", f"bad{number}") as draft:
            draft.commit("file-00000", ".file", lambda file: file.write_text("{}"), rows=0, path=path)
        with pytest.raises(InputError, match="leads out of the model's folder"):
            resolve_model(store, f"models/bad{number}")


def test_corruption_is_refused_each_time(tmp_path: Path, folder: Path) -> None:
    """Also after the folder has been built: it is checked again at every call."""
    store = Store(str(tmp_path / "store"))
    artifact = commit(store, folder)
    model_folder(artifact)
    [part] = [part for part in artifact.parts if part.facts["path"] == "model.safetensors"]
    file = tmp_path / "store" / "models" / "ce" / part.file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=part.file):
        model_folder(artifact)
    file.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match=part.file):
        resolve_model(store, "models/ce")


def test_a_damaged_folder_is_mended(store_url: str, folder: Path, tmp_path: Path) -> None:
    """A link that was lost, or leads elsewhere, or whose file the cache has dropped, is made anew."""
    artifact = commit(Store(store_url), folder)
    found = model_folder(artifact)
    expected = {path.name: path.read_bytes() for path in found.iterdir()}
    (found / "config.json").unlink()
    (found / "tokenizer.json").unlink()
    (found / "tokenizer.json").write_text("not the model's")
    os.replace(_link_to(tmp_path / "nowhere", tmp_path / "link"), found / "tokenizer_config.json")
    if store_url.startswith("s3://"):
        (found / "model.safetensors").resolve().unlink()
    assert model_folder(artifact) == found
    assert {path.name: path.read_bytes() for path in found.iterdir()} == expected


def _link_to(target: Path, link: Path) -> Path:
    link.symlink_to(target)
    return link


def write_tensors(value: float):
    from safetensors.torch import save_file

    return lambda path: save_file({"a": torch.full((3,), value)}, path)


def test_the_last_checkpoint_counts(store_url: str) -> None:
    checkpoints = StoredCheckpoint(Store(store_url), "ce", "identity")
    assert checkpoints.load() is None
    for step in (1, 2):
        checkpoints.save(step, write_tensors(step))
        path = checkpoints.load()
        assert path is not None
        assert load_file(path)["a"].tolist() == [step] * 3
    storage = checkpoints.store.storage
    assert len(list(storage.list("checkpoints"))) == 2
    assert list(verify(checkpoints.store)) == []
    assert StoredCheckpoint(checkpoints.store, "ce", "another").load() is None
    checkpoints.clear()
    assert list(storage.list("checkpoints")) == []
    assert checkpoints.load() is None


def test_killed_while_saving_the_one_before_counts(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = StoredCheckpoint(Store(store_url), "ce", "identity")
    checkpoints.save(1, write_tensors(1.0))
    storage = checkpoints.store.storage
    put = storage.put

    def killed(key: str, source: object) -> None:
        if key.endswith("latest.json"):
            raise KeyboardInterrupt
        put(key, source)

    monkeypatch.setattr(storage, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, write_tensors(2.0))
    monkeypatch.undo()
    path = checkpoints.load()
    assert path is not None
    assert load_file(path)["a"].tolist() == [1.0] * 3
    checkpoints.save(2, write_tensors(2.0))
    assert len(list(storage.list("checkpoints"))) == 2


def test_checkpoints_that_no_training_goes_on_from_are_told(store_url: str) -> None:
    """Of a model that was removed, or is complete, or of another name or kind; those of one that was begun are kept."""
    store = Store(store_url)
    names = ("gone.models", "begun.models", "begun.models.best", "begun-more.models", "begun.prompts", "done.models")
    store.create("models", "begun")
    with store.create("models", "done"):
        pass
    for name in names:
        StoredCheckpoint(store, name, "identity").save(1, write_tensors(1.0))
    files = {name: [key for key, _ in store.storage.list(f"checkpoints/{name}/")] for name in names}
    dead = abandoned_checkpoints(store)
    kept = {"begun.models", "begun.models.best"}
    assert sorted(key for key, _ in dead) == sorted(key for name in names if name not in kept for key in files[name])
    assert all(size > 0 for _, size in dead)
    assert [key.rpartition("/")[2] for key, _ in dead[:4]] == ["latest.json"] * 4
    store.remove("models/begun")
    assert list(store.storage.list("checkpoints/begun.models")) == []
    assert sorted(abandoned_checkpoints(store)) == sorted(dead)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoints = StoredCheckpoint(Store(str(tmp_path / "store")), "ce", "identity")
    checkpoints.save(1, write_tensors(1.0))
    [file] = (tmp_path / "store").glob("checkpoints/ce/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="its sha256 is not the written one"):
        checkpoints.load()
    file.unlink()
    with pytest.raises(CorruptError, match="the file is missing"):
        checkpoints.load()
