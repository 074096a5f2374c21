"""What a model's folder may say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from retriever.encoder import EncoderOptions, describe, resolve
from retriever.errors import InputError

Tiny = Callable[..., Path]


def with_modules(folder: Path, *extra: str, pooling: dict[str, object] | None = None) -> Path:
    """Adds sentence-transformers' files to a plain folder."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *extra]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_M" if i else "", "type": kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_M").mkdir()
    (folder / "1_M" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    return folder


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model", "./nowhere", "/no/such/folder", "a/b/c"])
def test_unknown_model(name: str) -> None:
    with pytest.raises(InputError) as raised:
        resolve(name)
    assert name in str(raised.value)
    assert "give" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve(str(tmp_path))


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
    [{"pooling_mode": "max"}, {"pooling_mode": ["cls", "mean"]}, {"pooling_mode_max_tokens": True},
     {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
     {"pooling_mode": "mean", "include_prompt": False}],
)  # fmt: skip
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


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"title": "tab"}, {"dtype": "float16"}, {"query_length": 0}])
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        EncoderOptions(**wrong)  # type: ignore[arg-type]
