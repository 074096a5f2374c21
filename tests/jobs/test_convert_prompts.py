"""convert_prompts: prompts of other tools become prompts/TASK, these are written for PEFT, and bad ones are refused."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_prompts import dptdr_state, random_rows, save_dptdr, save_peft
from safetensors.torch import load_file, save_file
from samples import files_of, save_tiny_bert

from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.retriever.prompts.task_prompt import load_prompt

Done = Callable[..., str]
AT = ("--task", "nq", "--pooling", "cls", "--query-length", 32, "--passage-length", 40)


def source_of(world: Any, source: Path, *more: object) -> tuple[object, ...]:
    return ("convert_prompts", "--store", world.store, "--source", source, "--backbone", world.model, *AT, *more)


def test_a_prompt_is_converted_once_and_serves_a_task(world, done: Done, tmp_path: Path) -> None:
    rows = [random_rows(Path(world.model), seed) for seed in (1, 2)]
    for name, side in zip(("query_model", "passage_model"), rows, strict=True):
        save_dptdr(tmp_path / "source" / name, Path(world.model), side)
    command = source_of(world, tmp_path / "source")
    before = files_of(world.store)
    plan = done(*command, "--plan")
    assert "prompt    5 tokens for queries, 5 tokens for passages; texts start after it, of DPTDR's authors" in plan
    assert "equal to the one in the files in all" in plan
    assert "writes    prompts/nq, " in plan
    assert files_of(world.store) == before
    assert "prompts/nq: " in done(*command)
    complete = files_of(world.store)
    assert done(*command, "--plan").endswith("/prompts/nq is complete\n")
    done(*command)
    assert files_of(world.store) == complete
    prompt = load_prompt(model_folder(Store(str(world.store)).open("prompts", "nq")))
    assert prompt.position_offset
    assert (prompt.options.pooling, prompt.options.query_length) == ("cls", 32)
    assert prompt.query is not None
    assert torch.equal(prompt.query[1, 0, 2], rows[0][:, 64 + 16 : 64 + 24])  # keys of layer 1, head 2
    done("encode_corpus", "--store", world.store, "--task", "nq", "--name", "nq", "--dtype", "float32")
    assert len(Store(str(world.store)).names("embeddings")) == 2


def test_other_options_are_refused(world, done: Done, refused: Done, tmp_path: Path) -> None:
    save_dptdr(tmp_path / "source", Path(world.model), random_rows(Path(world.model), 1))
    done(*source_of(world, tmp_path / "source"))
    before = files_of(world.store)
    line = refused(*source_of(world, tmp_path / "source", "--no-position-offset"))
    assert "made otherwise: --position-offset true, now false; give" in line
    save_dptdr(tmp_path / "other", Path(world.model), random_rows(Path(world.model), 2))
    other = tmp_path / "other"
    assert f"made otherwise: --source {tmp_path}/source, now {other}; give" in refused(*source_of(world, other))
    assert files_of(world.store) == before


def test_there_and_back_through_peft_gives_the_same_files(world, done: Done, refused: Done, tmp_path: Path) -> None:
    save_peft(tmp_path / "source", Path(world.model), 1)
    done(*source_of(world, tmp_path / "source"))
    command = ("convert_prompts", "--store", world.store, "--task", "nq", "--to", tmp_path / "peft")
    assert "would write" in done(*command, "--plan")
    assert not (tmp_path / "peft").exists()
    printed = done(*command)
    assert "warning: PEFT's files do not hold pooling='cls', query_length=32, passage_length=40" in printed
    written = files_of(tmp_path / "peft")
    assert sorted(written) == ["adapter_config.json", "adapter_model.safetensors"]
    assert written["adapter_model.safetensors"] == (tmp_path / "source" / "adapter_model.safetensors").read_bytes()
    done(*command)
    assert files_of(tmp_path / "peft") == written
    done(
        "convert_prompts",
        "--store",
        world.store,
        "--source",
        tmp_path / "peft",
        "--backbone",
        world.model,
        *AT,
        "--task",
        "again",
    )
    store = Store(str(world.store))
    folders = [model_folder(store.open("prompts", name)) for name in ("nq", "again")]
    assert files_of(folders[0]) == files_of(folders[1])
    (tmp_path / "peft" / "more").write_text("")
    assert "holds other files, and is kept" in refused(*command)


def test_a_prompt_for_usual_positions_is_written_with_a_warning(world, done: Done, tmp_path: Path) -> None:
    save_peft(tmp_path / "source", Path(world.model), 1)
    done(*source_of(world, tmp_path / "source", "--no-position-offset"))
    printed = done("convert_prompts", "--store", world.store, "--task", "nq", "--to", tmp_path / "peft")
    assert "with texts at their usual positions: pass position_ids" in printed


def test_options_of_the_other_direction_are_refused(world, refused: Done, tmp_path: Path) -> None:
    job = ("convert_prompts", "--store", world.store, "--task", "nq")
    assert "give one of --source" in refused(*job)
    assert "give one of --source" in refused(*job, "--source", tmp_path, "--to", tmp_path / "new")
    assert "expected --backbone too" in refused(*job, "--source", tmp_path)
    assert "--pooling cls: a conversion in this direction" in refused(*job, "--to", tmp_path / "x", "--pooling", "cls")
    assert "--limit 3: a conversion in this direction" in refused(*source_of(world, tmp_path, "--limit", 3))
    assert "there is no such artifact" in refused(*job, "--to", tmp_path / "x")


class Code:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


Damage = Callable[[Path, Path], Path]


def state_dict(**changes: Any) -> Damage:
    """A state dict of the authors with some tensors replaced; None removes one."""

    def make(folder: Path, backbone: Path) -> Path:
        state = {
            **dptdr_state(backbone, random_rows(backbone, 1)),
            **{n.replace("__", "."): v for n, v in changes.items()},
        }
        torch.save({name: value for name, value in state.items() if value is not None}, folder / "prompt.pt")
        return folder / "prompt.pt"

    return make


def adapter(**changes: Any) -> Damage:
    """A folder of PEFT whose adapter_config.json has other fields."""

    def make(folder: Path, backbone: Path) -> Path:
        save_peft(folder, backbone, 1)
        content = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**content, **changes}))
        return folder

    return make


def adapter_with(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    """A folder of PEFT with other tensors."""

    def make(folder: Path, backbone: Path) -> Path:
        save_peft(folder, backbone, 1)
        save_file(edit(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
        return folder

    return make


def of_another(kind: str, **config: Any) -> Damage:
    """A folder of the authors for another backbone."""

    def make(folder: Path, _: Path) -> Path:
        from tiny import save_encoder

        other = save_encoder(folder / "backbone", kind, config=config)
        return save_dptdr(folder / "source", other, random_rows(other, 1))

    return make


def lora(folder: Path, backbone: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    get_peft_model(AutoModel.from_pretrained(backbone), LoraConfig(r=2)).save_pretrained(folder)
    return folder


def without_adapter(folder: Path, backbone: Path) -> Path:
    save_peft(folder, backbone, 1)
    (folder / "adapter_model.safetensors").unlink()
    return folder


def broken_json(folder: Path, backbone: Path) -> Path:
    save_peft(folder, backbone, 1)
    (folder / "adapter_config.json").write_text('{"peft_type": ')
    return folder


def pickled(content: Any) -> Damage:
    def make(folder: Path, _: Path) -> Path:
        (folder / "prompt.pt").write_bytes(pickle.dumps(content))
        return folder / "prompt.pt"

    return make


def with_code(folder: Path, backbone: Path) -> Path:
    torch.save({**dptdr_state(backbone, random_rows(backbone, 1)), "more": Code()}, folder / "prompt.pt")
    return folder / "prompt.pt"


def in_another_format(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[2, 7] = float("nan")
    return rows


def not_finite(folder: Path, backbone: Path) -> Path:
    return save_dptdr(folder / "source", backbone, in_another_format(random_rows(backbone, 1)))


def quantised(folder: Path, backbone: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        rows = torch.quantize_per_tensor(torch.zeros(5, 128), 1.0, 0, torch.qint8)
    return state_dict(prefix_encoder__embedding__weight=rows)(folder, backbone)


def scripted(folder: Path, _: Path) -> Path:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), folder / "prompt.pt")
    return folder / "prompt.pt"


BAD: dict[str, tuple[Damage, str]] = {
    "a prompt of DPTDR for another architecture": (of_another("roberta"), "model_type roberta, and "),
    "a prompt of DPTDR for another number of layers": (
        of_another("bert", num_hidden_layers=3),
        "num_hidden_layers 3, and ",
    ),
    "a prompt of DPTDR for other heads": (of_another("bert", num_attention_heads=2), "num_attention_heads 2, and "),
    "a prompt of DPTDR for other weights of the backbone": (
        of_another("bert", max_position_embeddings=64),
        "is not that of ",
    ),
    "a state dict of DPTDR with rows of another width": (
        state_dict(prefix_encoder__embedding__weight=torch.zeros(5, 96)),
        "is [5, 96], and ",
    ),
    "a state dict of DPTDR without a prompt": (
        state_dict(prefix_encoder__embedding__weight=None),
        "no prefix_encoder.embedding.weight",
    ),
    "a state dict of DPTDR whose network lacks a layer": (
        state_dict(prefix_encoder__trans__0__weight=torch.zeros(16, 32)),
        "no prefix_encoder.trans.0.bias",
    ),
    "a prompt of DPTDR that is not finite": (not_finite, "holds numbers that are not finite"),
    "a state dict of DPTDR with integers": (
        state_dict(prefix_encoder__embedding__weight=torch.zeros(5, 128, dtype=torch.int64)),
        "torch.int64",
    ),
    "a state dict whose pickle would run code": (with_code, "a pickle can run code"),
    "a pickle that is no state dict": (pickled(Code()), "prompt.pt"),
    "an adapter of PEFT that is LoRA": (lora, 'expected PREFIX_TUNING, got "LORA"'),
    "an adapter of PEFT that is prompt tuning": (adapter(peft_type="PROMPT_TUNING"), "expected PREFIX_TUNING"),
    "a prompt of PEFT for another number of layers": (adapter(num_layers=12), "for 12 layers, 4 heads of 8, and "),
    "a prompt of PEFT for other heads": (adapter(num_attention_heads=2), "for 2 layers, 2 heads of 16, and "),
    "a prompt of PEFT for another architecture": (
        adapter(auto_mapping={"parent_library": "transformers.models.roberta.modeling_roberta"}),
        "of roberta, and ",
    ),
    "a prompt of PEFT for a decoder too": (adapter(num_transformer_submodules=2), "encoder-decoder"),
    "an adapter_config.json of PEFT that is cut": (broken_json, "not JSON"),
    "an adapter_config.json of PEFT with half a character": (adapter(peft_type="\ud800"), "an unpaired surrogate"),
    "an adapter_config.json of PEFT with 401 digits": (
        adapter(token_dim=10**400),
        "more than 308 digits",
    ),
    "an adapter of PEFT without weights": (without_adapter, "adapter_model.safetensors: no such file"),
    "an adapter of PEFT without prompt_embeddings": (
        adapter_with(lambda tensors: {"other": torch.zeros(1)}),
        "no prompt_embeddings",
    ),
    "an adapter of PEFT with further tensors": (
        adapter_with(lambda tensors: {**tensors, "base_model.classifier.weight": torch.zeros(1)}),
        "beside prompt_embeddings",
    ),
    "a prompt of PEFT that is not finite": (
        adapter_with(lambda tensors: {"prompt_embeddings": in_another_format(tensors["prompt_embeddings"])}),
        "holds numbers that are not finite",
    ),
    "a prompt of PEFT with fewer rows than its settings": (adapter(num_virtual_tokens=7), "has 5 rows"),
    "a state dict of DPTDR with a tensor without dimensions": (
        state_dict(
            prefix_encoder__embedding__weight=torch.tensor(1.0),
            **{
                f"prefix_encoder__trans__{layer}__{part}": torch.zeros(16)
                for layer in (0, 2)
                for part in ("weight", "bias")
            },
        ),
        "over an embedding of []",
    ),
    "a state dict of DPTDR with a tensor without values": (
        state_dict(prefix_encoder__embedding__weight=torch.zeros(5, 128, device="meta")),
        "is sparse, quantised or without values",
    ),
    "a state dict of DPTDR with a quantised tensor": (quantised, "is sparse, quantised or without values"),
    "an archive of TorchScript": (scripted, "prompt.pt"),
    "an empty folder": (lambda folder, _: folder, "no adapter_config.json, as PEFT writes it"),
    "a source that does not exist": (lambda folder, _: folder / "missing", "no such file or folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    world, refused: Done, documented: Callable[..., None], tmp_path: Path, case: str
) -> None:
    make, message = BAD[case]
    (tmp_path / "made").mkdir()
    backbone = Path(save_tiny_bert(tmp_path / "backbone"))
    source = make(tmp_path / "made", backbone)
    before = files_of(world.store)
    line = refused("convert_prompts", "--store", world.store, "--source", source, "--backbone", backbone, *AT)
    assert message in line
    assert str(tmp_path / "made") in line
    if ", and " in message or "[5, 96]" in message:
        assert str(backbone) in line
    assert files_of(world.store) == before
    documented("Converting prompts", f"convert_prompts: {case}", line, 1)


def test_too_few_positions_are_found_before_anything_is_written(world, refused: Done, tmp_path: Path) -> None:
    save_dptdr(tmp_path / "source", Path(world.model), random_rows(Path(world.model), 1))
    before = files_of(world.store)
    line = refused(
        "convert_prompts",
        "--store",
        world.store,
        "--source",
        tmp_path / "source",
        "--backbone",
        world.model,
        "--task",
        "nq",
    )
    assert "use --query-length 59 or less, or a shorter prompt" in line
    assert files_of(world.store) == before
