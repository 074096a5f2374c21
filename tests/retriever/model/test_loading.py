"""What a model's folder may say, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import EncoderOptions, describe, find_model_folder
from riptide.retriever.forward.numerics import cpu_vendor, expected_numerics
from riptide.retriever.model import model_folder

Tiny = Callable[..., Path]
COMPILED = ", or, if the model was trained so, encode with parameter compile always"


def with_modules(folder: Path, *extra: str, pooling: dict[str, object] | None = None) -> Path:
    """Adds sentence-transformers' files to a plain folder."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *extra]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_M" if i else "", "type": kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_M").mkdir()
    (folder / "1_M" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    return folder


def set_field(folder: Path, name: str, **values: object) -> Path:
    """Sets fields of a JSON file in a folder; returns the folder."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))
    return folder


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model", "./nowhere", "/no/such/folder", "a/b/c"])
def test_unknown_model(name: str) -> None:
    with pytest.raises(InputError) as raised:
        find_model_folder(name)
    assert name in str(raised.value)
    assert "give" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        find_model_folder(str(tmp_path))


def test_minilm_from_its_package() -> None:
    assert describe("all-MiniLM-L6-v2", EncoderOptions())["weights"] == [
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ]


@pytest.mark.parametrize("kind", ["sentence_transformers.models.LSTM", "somewhere.else.Dense"])
def test_unsupported_module(tiny: Tiny, kind: str) -> None:
    with pytest.raises(InputError, match=f"module {kind} is not supported"):
        describe(str(with_modules(tiny("bert"), kind)), EncoderOptions())


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode": "max"},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "mean", "include_prompt": False},
    ],
)
def test_unsupported_pooling(tiny: Tiny, pooling: dict[str, object]) -> None:
    with pytest.raises(InputError, match="is not supported"):
        describe(str(with_modules(tiny("bert"), pooling=pooling)), EncoderOptions())


def test_unsupported_activation_and_settings(tiny: Tiny) -> None:
    folder = with_modules(tiny("bert"), "sentence_transformers.models.Dense")
    (folder / "2_M").mkdir()
    for config, message in [
        ({"activation_function": "os.system", "out_features": 4}, "activation os.system"),
        ({"activation_function": "torch.nn.modules.linear.Identity", "out_features": 4, "use_residual": True}, "plain"),
        ({"activation_function": "torch.nn.modules.linear.Identity", "out_features": 4}, "no model.safetensors"),
    ]:
        (folder / "2_M" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            describe(str(folder), EncoderOptions())
    (folder / "sentence_bert_config.json").write_text('{"transformer_task": "fill-mask"}')
    with pytest.raises(InputError, match="transformer_task=fill-mask is not supported"):
        describe(str(folder), EncoderOptions())


@pytest.mark.parametrize(
    ("options", "other_remedy"),
    [
        ({}, COMPILED),
        ({"dtype": "int8"}, f"{COMPILED} and another parameter dtype"),
        ({"pooling": "splade"}, ""),
    ],
)
def test_a_decoder_of_the_bert_family_is_refused_with_the_remedy(
    tiny: Tiny, options: dict[str, Any], other_remedy: str
) -> None:
    """Before it is loaded, and on every device; compiled, it gets the mask of a decoder."""
    folder = set_field(
        tiny("bert", config={"hidden_size": 64, "intermediate_size": 64}), "config.json", is_decoder=True
    )
    reason = "is_decoder is true, so that tokens do not attend to later ones, and bert encoders attend to all: "
    with pytest.raises(InputError) as raised:
        describe(folder, EncoderOptions(**options))
    assert str(raised.value) == f"{folder}/config.json: {reason}set it to false{other_remedy}"
    describe(folder, EncoderOptions(compile="always"))
    set_field(folder, "config.json", is_decoder=False)
    describe(folder, EncoderOptions())
    set_field(with_modules(folder), "sentence_bert_config.json", config_args={"is_decoder": True})
    with pytest.raises(InputError, match=r"sentence_bert_config\.json: is_decoder is true"):
        describe(folder, EncoderOptions())


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"title": "tab"}, {"dtype": "float16"}, {"query_length": 0}])
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        EncoderOptions(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def partial(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with what AutoModel.from_pretrained leaves of the model some/model: configuration and weights."""
    from huggingface_hub import constants

    model = tmp_path / "hub" / "models--some--model"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny("bert") / name, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def online(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_hub_completes_what_another_program_left(partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    online(monkeypatch)
    asked = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: object) -> str:
        if not local_files_only:
            asked.append((name, "*.json" in allow_patterns))
            (partial / "modules.json").write_text("[]")
        return str(partial)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: None)
    assert find_model_folder("some/model") == partial
    assert (partial / "modules.json").exists()
    assert asked == [("some/model", True)]


@pytest.mark.parametrize("hub", ["silent", "refusing", "offline"])
def test_without_the_hub_the_cache_is_used_with_a_warning(
    partial: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hub: str
) -> None:
    from huggingface_hub import constants

    server = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(model_folder, "_HUB_SECONDS", 0.3, raising=False)
    if hub != "offline":
        online(monkeypatch)
    if hub == "refusing":
        server.close()
    begun = time.monotonic()
    with server, caplog.at_level(logging.INFO):
        assert find_model_folder("some/model") == partial
        assert time.monotonic() - begun < 30  # a process's first request waits 3 s more, for a list of the hub's own
        (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert message.startswith("some/model: ")
        assert "no modules.json" in message
        assert "pooling is the default (mean) unless given" in message
        assert "\n" not in message
        caplog.clear()
        (partial / "modules.json").write_text("[]")
        assert find_model_folder("some/model") == partial
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_silent_hub_and_an_empty_cache(partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    online(monkeypatch)
    monkeypatch.setattr(model_folder, "_HUB_SECONDS", 0.3, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(InputError, match=r"other/model: .*not from the Hugging Face hub either \(.*timed out"):
            find_model_folder("other/model")


@pytest.mark.parametrize(
    ("cpuinfo", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n", "intel"),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "amd"),
        ("vendor_id : CentaurHauls\n", "centaurhauls"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_vendor_of_the_processor(tmp_path: Path, cpuinfo: str | None, vendor: str) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert cpu_vendor(tmp_path / "cpuinfo") == vendor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numerics_class_names_the_vendor(dtype: str) -> None:
    options = EncoderOptions(dtype=dtype)  # type: ignore[arg-type]
    assert expected_numerics(options, "cpu", "bert").startswith(f"cpu {cpu_vendor()} ")
