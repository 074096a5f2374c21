"""Prompts of DPTDR's authors and of PEFT give the vectors of a slow forward pass written from the papers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_prompts import LENGTH, dptdr_state, random_rows, save_dptdr, save_peft
from safetensors.torch import load_file, save_file
from slow_forward import first_vector
from tiny import save_encoder
from transformers import AutoConfig, AutoModel

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.interchange.backbone import open_backbone
from riptide.retriever.interchange.prompt_conversion import make_task_prompt, read_prompt, write_prompt
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions, Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, load_prompt

OPTIONS = EncoderOptions(dtype="float32", compile="never", pooling="cls", query_length=30, passage_length=30)
TEXTS = ["the river", "money flows fast", "a passage: the answer of a slow bank", ""]
KINDS = ("bert", "roberta")


@pytest.fixture(params=KINDS)
def backbone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a tiny random backbone."""
    return save_encoder(tmp_path / "backbone", request.param)


def converted(backbone: Path, source: Path, options: EncoderOptions = OPTIONS, **how: Any) -> TaskPrompt:
    recipe = read_recipe(backbone, options)
    model = open_backbone("backbone", recipe)
    return make_task_prompt(read_prompt(source, model), model, recipe, options, **{"position_offset": True, **how})


def check_vectors(backbone: Path, prompt: TaskPrompt, rows: dict[Side, torch.Tensor]) -> None:
    """Compares the encoder's vectors with those of the slow forward pass."""
    encoder = Encoder(str(backbone), OPTIONS, tasks={"task": prompt})
    state, config = load_file(backbone / "model.safetensors"), AutoConfig.from_pretrained(backbone)
    first = LENGTH + (config.pad_token_id + 1 if config.model_type == "roberta" else 0)
    for side, matrix in rows.items():
        vectors = encoder.encode(TEXTS, side=side, task="task")
        tokens = encoder.tokenize(TEXTS, side=side)
        plain = encoder.encode(TEXTS, side=side)
        assert np.abs(vectors - plain).max() > 1e-2
        for row, vector in enumerate(vectors):
            ids = tokens.ids[tokens.starts[row] :][: tokens.lengths[row]].tolist()
            expected = first_vector(state, config, ids, matrix.double().numpy(), first_position=first)
            np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("form", ["folder", "untied", "dual encoder", "safetensors", "prefix encoder"])
def test_the_prompt_of_dptdrs_authors(backbone: Path, tmp_path: Path, form: str) -> None:
    query, passage = (random_rows(backbone, seed) for seed in (1, 2))
    rows: dict[Side, torch.Tensor] = {"query": query, "passage": query}
    source = tmp_path / "source"
    if form == "folder":
        save_dptdr(source, backbone, query)
    elif form == "untied":
        rows["passage"] = passage
        save_dptdr(source / "query_model", backbone, query)
        save_dptdr(source / "passage_model", backbone, passage)
    elif form == "dual encoder":
        rows["passage"] = passage
        states = {"lm_q": dptdr_state(backbone, query), "lm_p": dptdr_state(backbone, passage)}
        torch.save(
            {f"module.{side}.{name}": value for side, state in states.items() for name, value in state.items()}, source
        )
    elif form == "safetensors":
        source = source.with_suffix(".safetensors")
        save_file({name: value.clone() for name, value in dptdr_state(backbone, query).items()}, source)
    else:
        torch.save({"embedding.weight": query}, source)
    prompt = converted(backbone, source)
    assert (prompt.query is prompt.passage) == (form not in ("untied", "dual encoder"))
    check_vectors(backbone, prompt, rows)


def test_a_weight_with_complex_numbers_is_not_that_of_the_backbone(tmp_path: Path) -> None:
    """Before, it was cast with a warning."""
    backbone = save_encoder(tmp_path / "backbone", "bert")
    name = "embeddings.word_embeddings.weight"
    weight = load_file(backbone / "model.safetensors")[name].to(torch.complex64)
    source = save_dptdr(tmp_path / "source", backbone, random_rows(backbone, 1), more={f"bert.{name}": weight})
    with pytest.raises(InputError, match=f"its bert.{name} is not that of backbone"):
        converted(backbone, source)


def test_a_dual_encoder_with_one_model_is_tied(backbone: Path, tmp_path: Path) -> None:
    """Its state dict names each tensor twice."""
    state = dptdr_state(backbone, random_rows(backbone, 1))
    torch.save({f"{side}.{name}": value for side in ("lm_q", "lm_p") for name, value in state.items()}, tmp_path / "x")
    prompt = converted(backbone, tmp_path / "x")
    assert prompt.query is not None
    assert prompt.query is prompt.passage


def test_the_network_of_dptdrs_authors(backbone: Path, tmp_path: Path) -> None:
    """With --prefix_projection; the network is computed here row by row, in float64."""
    generator = torch.Generator().manual_seed(3)
    columns = random_rows(backbone, 1).shape[1]
    shapes = {
        "embedding.weight": (LENGTH, 32),
        "trans.0.weight": (16, 32),
        "trans.0.bias": (16,),
        "trans.2.weight": (columns, 16),
        "trans.2.bias": (columns,),
    }
    tensors = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    network = {f"prefix_encoder.{name}": value for name, value in tensors.items()}
    save_dptdr(tmp_path / "source", backbone, network["prefix_encoder.embedding.weight"], more=network)
    double = {name: value.double() for name, value in tensors.items()}
    rows = []
    for row in double["embedding.weight"]:
        inner = torch.tanh(double["trans.0.weight"] @ row + double["trans.0.bias"])
        rows.append(double["trans.2.weight"] @ inner + double["trans.2.bias"])
    prompt = converted(backbone, tmp_path / "source")
    check_vectors(backbone, prompt, {"query": torch.stack(rows), "passage": torch.stack(rows)})


@pytest.mark.parametrize("projection", [False, True])
def test_the_prompt_of_peft(backbone: Path, tmp_path: Path, projection: bool) -> None:
    """Against the slow forward pass, and against PEFT's own."""
    model = save_peft(tmp_path / "source", backbone, 1, prefix_projection=projection, encoder_hidden_size=16)
    rows = load_file(tmp_path / "source" / "adapter_model.safetensors")["prompt_embeddings"]
    prompt = converted(backbone, tmp_path / "source")
    assert prompt.query is prompt.passage
    check_vectors(backbone, prompt, {"query": rows, "passage": rows})
    encoder = Encoder(str(backbone), OPTIONS, tasks={"task": prompt})
    check_peft(encoder, model, "query")


def check_peft(encoder: Encoder, model: Any, side: Side) -> None:
    """Compares an encoder's vectors with those of PEFT's own forward pass over a padded batch."""
    tokens = encoder.tokenize(TEXTS, side=side)
    ids = torch.zeros(len(TEXTS), int(tokens.lengths.max()), dtype=torch.int64)
    for row, (start, length) in enumerate(zip(tokens.starts, tokens.lengths, strict=True)):
        ids[row, :length] = torch.from_numpy(tokens.ids[start : start + length].astype(np.int64))
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    vectors = encoder.encode(TEXTS, side=side, task="task")
    np.testing.assert_allclose(vectors, hidden[:, 0].numpy(), atol=1e-5)


def trained(backbone: Path, *, form: str, dtype: torch.dtype = torch.float32) -> TaskPrompt:
    """A prompt of riptide's own form."""
    recipe = read_recipe(backbone, OPTIONS)
    shape = open_backbone("backbone", recipe).shape
    query, passage = (
        torch.randn(
            shape.layers, 2, shape.heads, length, shape.head_dim, generator=torch.Generator().manual_seed(length)
        ).to(dtype)
        for length in (LENGTH, LENGTH + 2)
    )
    from riptide.retriever.model.recipe import settings_of
    from riptide.retriever.prompts.task_prompt import backbone_of

    sides = {"tied": (query, query), "untied": (query, passage), "query": (query, None)}[form]
    return TaskPrompt(backbone_of(settings_of(recipe, OPTIONS)), OPTIONS, *sides, position_offset=True)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["tied", "untied", "query"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_peft_and_back_gives_the_same_bytes(backbone: Path, tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    prompt = trained(backbone, form=form, dtype=dtype)
    write_prompt(tmp_path / "peft", prompt, "some/backbone")
    folders = {"tied": [""], "untied": ["passage/", "query/"], "query": ["query/"]}[form]
    assert sorted(files_of(tmp_path / "peft")) == sorted(
        f"{folder}adapter_{file}" for folder in folders for file in ("config.json", "model.safetensors")
    )
    again = converted(backbone, tmp_path / "peft", side="query" if form == "query" else "both")
    for name, one in (("first", prompt), ("second", again)):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
        load_prompt(tmp_path / name)
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_a_written_prompt_opens_in_peft_and_comes_back_from_it(backbone: Path, tmp_path: Path) -> None:
    """PEFT -> riptide -> PEFT keeps the bytes of the weights; PEFT computes the same vectors with them."""
    from peft import PeftModel

    save_peft(tmp_path / "source", backbone, 2)
    prompt = converted(backbone, tmp_path / "source")
    write_prompt(tmp_path / "peft", prompt, str(backbone))
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("source", "peft")]
    assert weights[0] == weights[1]
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(backbone), tmp_path / "peft").eval()
    check_peft(Encoder(str(backbone), OPTIONS, tasks={"task": prompt}), model, "passage")
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").read_bytes() == weights[0]


def test_the_settings_are_those_that_peft_writes(backbone: Path, tmp_path: Path) -> None:
    """Except for the version of PEFT, which did not write them."""
    import json

    save_peft(tmp_path / "source", backbone, 2)
    write_prompt(tmp_path / "peft", converted(backbone, tmp_path / "source"), str(backbone))
    theirs, ours = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("source", "peft"))
    del theirs["peft_version"]
    assert ours == theirs


def test_a_prompt_of_grouped_heads(tmp_path: Path) -> None:
    """Qwen3 has fewer heads of keys and values than of queries, as PEFT's prompt for it."""
    backbone = save_encoder(tmp_path / "backbone", "qwen3")
    model = save_peft(tmp_path / "source", backbone, 3)
    options = replace(OPTIONS, pooling="last")
    prompt = converted(backbone, tmp_path / "source", options)
    encoder = Encoder(str(backbone), options, tasks={"task": prompt})
    tokens = encoder.tokenize(TEXTS, side="query")
    for row, vector in enumerate(encoder.encode(TEXTS, side="query", task="task")):
        ids = torch.from_numpy(tokens.ids[tokens.starts[row] :][: tokens.lengths[row]].astype(np.int64))[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        np.testing.assert_allclose(vector, hidden[0, -1].numpy(), atol=1e-5)


def test_one_side_alone(backbone: Path, tmp_path: Path) -> None:
    save_dptdr(tmp_path / "source" / "query_model", backbone, random_rows(backbone, 1))
    with pytest.raises(InputError, match=r"no prompt for passages: .* give parameter side query"):
        converted(backbone, tmp_path / "source")
    assert converted(backbone, tmp_path / "source", side="query").passage is None
    (tmp_path / "source" / "query_model").rename(tmp_path / "source" / "passage_model")
    with pytest.raises(InputError, match="no prompt for queries"):
        converted(backbone, tmp_path / "source", side="query")


def test_texts_must_fit_after_the_prompt(backbone: Path, tmp_path: Path) -> None:
    save_dptdr(tmp_path / "source", backbone, random_rows(backbone, 1))
    options = replace(OPTIONS, query_length=None)
    with pytest.raises(InputError, match=r"query_length \d\d and a prompt of 5 tokens need \d\d positions"):
        converted(backbone, tmp_path / "source", options)
    assert not converted(backbone, tmp_path / "source", options, position_offset=False).offset("query")


def test_peft_has_no_prefix_tuning_of_t5s_encoder(tmp_path: Path) -> None:
    backbone = save_encoder(tmp_path / "backbone", "t5")
    prompt = replace(trained(backbone, form="tied"), position_offset=False)
    with pytest.raises(InputError, match="a backbone of type t5: PEFT's prefix tuning"):
        write_prompt(tmp_path / "peft", prompt, None)
    assert not (tmp_path / "peft").exists()
