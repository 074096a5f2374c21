"""What a release leaves out: prompts that its one encoder, or the store's embeddings, cannot serve."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import OPTIONS, SHAPE, computed_prompt

from riptide.base.errors import InputError
from riptide.indexing.embeddings.named_encoders import EncoderSpec, check_prompt_settings
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.jobs.common.starting import COMMAND_LINE
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions, describe
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of
from riptide.serve.one_process import open_local
from riptide.serve.parts.service_models import EncoderPart
from riptide.serve.release.live import live_release_id, save_as_live
from riptide.serve.release.planning import plan_release
from riptide.serve.service.service_options import ServiceOptions

Done = Callable[..., str]
WORDS = {
    "short": "passage_length 32 instead of 64",
    "prefixed": "query_prefix 'query: ' instead of ''",
    "foreign": "the prompt is for another backbone (weights differ)",
    "sides": "its passages' vectors are not those of embeddings/enc (another prompt)",
    "few": "embeddings/few cover 100 of the 240 passages",
    "damaged": "were committed; riptide verify --store STORE names every such file",
    "torn": "manifest.json",
    "misshapen": "synthesis.basic is torch.float32 (3, 4, 32), expected float32 (4, 4, 32), as the settings say",
}


def random_prompt(model: str, *, passage: bool = False, weights: list[str] | None = None, **options: Any) -> TaskPrompt:
    shape = (SHAPE.layers, 2, SHAPE.heads, 3, SHAPE.head_dim)
    described = describe(model, OPTIONS) | ({} if weights is None else {"weights": weights})
    matrix = torch.randn(shape)
    return TaskPrompt(backbone_of(described), replace(OPTIONS, **options), matrix, matrix if passage else None)


def misshapen(model: str) -> TaskPrompt:
    """A computed prompt whose settings name more basic prompts than there are."""
    prompt = computed_prompt(model, 1)
    assert prompt.synthesis is not None
    return replace(prompt, synthesis=replace(prompt.synthesis, options=replace(prompt.synthesis.options, prompts=4)))


def keep(store: Store, name: str, model: str, prompt: TaskPrompt, folder: Path) -> None:
    """prompts/NAME, as `tune_prompts` makes it."""
    folder.mkdir()
    prompt.save(folder)
    with store.create("prompts", name, config={}, inputs={}) as draft:
        draft.add_notes(backbone=model, options=asdict(prompt.options))
        commit_files(draft, folder)


@pytest.fixture
def store(served: Path, model: str, tmp_path: Path, done: Done) -> Store:
    """A store with a prompt that can be served, and one of each kind that cannot."""
    torch.manual_seed(0)
    made = Store(str(shutil.copytree(served / "store", tmp_path / "store")))
    prompts = {
        "good": random_prompt(model),
        "short": random_prompt(model, passage_length=32),
        "prefixed": random_prompt(model, query_prefix="query: "),
        "foreign": random_prompt(model, weights=["0" * 64]),
        "sides": random_prompt(model, passage=True),
        "few": random_prompt(model, passage=True),
        "damaged": random_prompt(model),
        "torn": random_prompt(model),
        "misshapen": misshapen(model),
    }
    for name, prompt in prompts.items():
        keep(made, name, model, prompt, tmp_path / name)
    exact = ("--dtype", "float32", "--compile", "never")
    done("encode_corpus", "--store", made.url, "--task", "few", "--name", "few", "--limit", 100, *exact)
    [*_, weights] = sorted((tmp_path / "store/prompts/damaged").glob("*.file"))
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "store/prompts/torn/manifest.json").write_text("{")
    return made


def test_a_prompt_that_does_not_fit_is_left_out_by_name_with_the_reason(
    store: Store, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    release, left = plan_release(store, embeddings="enc")
    assert [task.name for task in release.tasks] == ["default", "good"]
    left = {name: COMMAND_LINE.render(reason) for name, reason in left.items()}
    assert left.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert left[name].startswith(f"task {name}: ")
        assert words in left[name]
        assert not re.search(r"[0-9a-f]{20}", left[name].replace(store.url, "")), left[name]
    release.save(store)
    open_local(store, ServiceOptions(threads=2), device="cpu").open_release(
        release.id
    )  # what is not left out can be served
    out = done("serve_search", "--store", store.url, "--embeddings", "enc", "--renew", "--plan")
    for name in WORDS:
        line = refused("serve_search", "--store", store.url, "--embeddings", "enc", "--renew", "--tasks", name)
        assert line == f"error: {' '.join(left[name].split())}"
        assert f"left out  {left[name]}" in out
    cases = {
        "short": "a prompt that was tuned with another passage length than the store's embeddings have, by --tasks",
        "foreign": "a prompt of another backbone, by --tasks",
        "sides": "a prompt for passages, without embeddings of its own, by --tasks",
        "damaged": "a damaged prompt, by --tasks",
        "misshapen": "a synthesiser of another shape than its settings say, by --tasks",
    }
    for name, case in cases.items():
        documented("Serving a store", case, left[name], 1)
    case = "a prompt that was tuned with another passage length, without --tasks: the others are served"
    documented("Serving a store", case, f"left out  {left['short']}", 0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"query_length": 20},
        {"passage_length": 20},
        {"query_prefix": "q: "},
        {"passage_prefix": "p: "},
        {"title": "newline"},
        {"pooling": "cls"},
        {"dimension": 8},
        {"append_eos": True},
        {"padding_side": "left"},
        {"normalize": True},
        {"dtype": "bfloat16"},
        {"compile": "always"},
        {"query_length": 64},
    ],
)
def test_the_check_of_settings_says_what_the_encoder_says(model: str, tmp_path: Path, change: dict[str, Any]) -> None:
    """The check loads no model; Encoder.put_task, which has one, must refuse the same prompts."""
    prompt = random_prompt(model, **change)
    prompt = replace(prompt, backbone=backbone_of(describe(model, prompt.options)))  # as tuning would have it

    def refuses(check: Callable[[], object]) -> bool:
        try:
            check()
        except InputError:
            return True
        return False

    encoder = _encoder(model)
    checked = refuses(lambda: check_prompt_settings(prompt, EncoderSpec(Store(str(tmp_path)), model, OPTIONS)))
    assert checked == refuses(lambda: encoder.put_task("t", prompt))
    assert checked == (change.keys().isdisjoint({"dtype", "compile"}) and change not in ({}, {"query_length": 64}))


_ENCODERS: dict[str, Encoder] = {}


def _encoder(model: str) -> Encoder:
    if model not in _ENCODERS:
        _ENCODERS[model] = Encoder(model, EncoderOptions(dtype="float32", compile="never"), tasks={}, threads=1)
    return _ENCODERS[model]


def test_a_prompt_that_cannot_be_opened_is_named_and_not_its_fingerprint(
    served: Path, model: str, tmp_path: Path
) -> None:
    """Its settings fit, so that only the vectors tell: they are not finite."""
    store = Store(str(shutil.copytree(served / "store", tmp_path / "store")))
    prompt = random_prompt(model)
    assert prompt.query is not None
    keep(store, "wild", model, replace(prompt, query=torch.full_like(prompt.query, 3e38)), tmp_path / "wild")
    keep(store, "short", model, random_prompt(model, passage_length=32), tmp_path / "short")
    release, _ = plan_release(store)
    release.save(store)
    with pytest.raises(InputError, match=r"^task wild: the vector of text 0") as raised:
        EncoderPart(store, device="cpu", threads=1).open_release(release.id)
    assert not re.search(r"[0-9a-f]{20}", str(raised.value))


def test_an_index_that_was_begun_is_named(
    served: Path, tmp_path: Path, done: Done, documented: Callable[..., None]
) -> None:
    store = Store(str(shutil.copytree(served / "store", tmp_path / "store")))
    with pytest.raises(KeyboardInterrupt), store.create("index", "half/g0000", config={}, inputs={}):
        raise KeyboardInterrupt
    out = done("serve_search", "--store", store.url, "--embeddings", "enc", "--renew", "--plan")
    line = (
        f"left out  {store.url}/index/half/g0000: was begun and is not complete: run the command that makes it again, "
        "then add --renew"
    )
    assert line in out
    documented("Serving a store", "an index whose build was interrupted: the others are served", line, 0)


def test_a_new_release_has_the_re_ranker_of_the_live_one_unless_an_option_says_otherwise(
    served: Path, tmp_path: Path, done: Done, refused: Done
) -> None:
    store = Store(str(shutil.copytree(served / "store", tmp_path / "store")))

    def make_live(reranker: str) -> None:
        release, _ = plan_release(store, embeddings="enc")
        live = live_release_id(store)
        assert save_as_live(store, replace(release, reranker=reranker), None if live is None else live[1])

    make_live("some/cross-encoder")
    ask = ("serve_search", "--store", store.url, "--embeddings", "enc", "--renew", "--plan")
    assert "re-ranker some/cross-encoder\n" in done(*ask)
    assert "re-ranker another/cross-encoder\n" in done(*ask, "--rerank", "another/cross-encoder")
    assert "re-ranker" not in done(*ask, "--rerank", "none")
    make_live("models/gone")
    assert "the live release re-ranks with it: name another one with --rerank, or --rerank none" in refused(*ask)
    assert "re-ranker" not in done(*ask, "--rerank", "none")
