"""Training of prompts that are computed from queries: gradients, workers, checkpoints, and the saved form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases
from divergence_cases import slow_means
from tiny import save_bert
from training_cases import CPU, ENCODER, Checkpoints, dual_system, gradients, make_data, train, whole_and_resumed
from two_workers import TwoWorkers

from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.forward.prompt_rows import PromptInputs
from riptide.retriever.objectives.divergence_term import DivergenceOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems import prompt_kinds
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.mixture_schedule import SetMixture
from riptide.retriever.training.stepping import trained_parameters

SYNTHESIS = SynthesisOptions(prompts=3, length=4, hidden=6, bottleneck=5, temperature=0.2)
TUNING: dict[str, Any] = {
    "sides": "query",
    "parametrisation": "synthesised",
    "synthesis": SYNTHESIS,
    "terms": (DivergenceOptions(weight=0.5),),
}
TASKS = {"tasks": ("one", "two", "one"), "sizes": (50, 40, 30)}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), spread=0.2)


def system_of(bert: Path, **tuning: Any) -> DualEncoderSystem:
    return dual_system(bert, dropout=0.0, **{**TUNING, **tuning})


def several_tasks(system: DualEncoderSystem) -> DualEncoderSystem:
    assert system.data is not None
    system.data = replace(system.data, mixture=SetMixture(**TASKS, weights=(1.0, 1.0, 1.0)))
    return system


@pytest.mark.parametrize("mix", ["before", "after"])
def test_chunks_and_gradcache_give_the_gradient_of_the_whole_batch(bert: Path, mix: str) -> None:
    """All parameters of the synthesiser have one; the loss holds the regulariser over the queries of all chunks."""
    options = replace(SYNTHESIS, mix=mix)
    whole = gradients(several_tasks(system_of(bert, synthesis=options)), grad_cache="off")
    names = {"basic", "adapter.0.weight", "adapter.2.weight", "norm.weight", "norm.bias", "down.weight", "up.weight"}
    assert {*whole} == {"loss", *(f"prompts.query.synthesiser.{name}" for name in names)}
    assert all(bool(value.abs().max() > 0) for name, value in whole.items() if name != "loss")
    for choice in ("off", "on"):
        cut = several_tasks(system_of(bert, synthesis=options, chunk=60))
        assert len(cut.batch(0, 0, 1).chunks) > 3
        actual = gradients(cut, grad_cache=choice)
        assert actual["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        for name in whole.keys() - {"loss"}:
            torch.testing.assert_close(actual[name], whole[name], atol=1e-5, rtol=1e-3)


def test_a_chunk_whose_prompts_take_much_memory_is_cut(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training and in evaluation: a chunk holds at most 5 queries, and passages are not cut."""
    system = several_tasks(system_of(bert))
    texts = make_data().queries[:12]
    whole, vectors = gradients(system), system.encode(texts, "query")
    [chunk] = system.chunks(texts, "query", np.arange(12))
    provider: Any = system.prompts["query"]
    prompts = provider(PromptInputs(*chunk.inputs[1:])).table
    monkeypatch.setattr(prompt_kinds, "_PROMPT_BYTES", 5 * 4 * prompts.numel() // 12 + 1)
    assert [len(chunk.inputs[1]) for chunk in system.chunks(texts, "query", np.arange(12))] == [5, 5, 2]
    assert len(system.chunks(texts, "passage", np.arange(12))) == 1
    np.testing.assert_allclose(system.encode(texts, "query"), vectors, atol=1e-5)
    actual = gradients(system)
    for name in whole.keys() - {"loss"}:
        torch.testing.assert_close(actual[name], whole[name], atol=1e-5, rtol=1e-3)


def test_the_regulariser_is_that_of_the_tasks_of_the_batch(bert: Path) -> None:
    """Against the slow reference; training sets of one name are one task."""
    system, plain = (several_tasks(system_of(bert, terms=each)) for each in (TUNING["terms"], ()))
    batch = system.batch(1, 0, 1)
    assert set(batch.arguments["tasks"].tolist()) == {0, 1}
    assert batch.outputs["attention"].rows == 12
    assert "attention" not in plain.batch(1, 0, 1).outputs
    weights = torch.zeros(12, 3)
    with torch.no_grad():
        for chunk in batch.chunks:
            if (rows := chunk.rows.get("attention")) is not None:
                weights[rows] = system.forward(chunk)[0]["attention"]
    within, between = slow_means(weights.tolist(), batch.arguments["tasks"].tolist())
    assert between > 1e-6
    expected = gradients(plain, 1)["loss"] + 0.5 * (within - between)
    assert gradients(system, 1)["loss"] == pytest.approx(expected, abs=1e-5)


def test_words_are_found_on_both_sides_of_padding(bert: Path) -> None:
    """Special, unknown and padding tokens are no words."""
    texts = ["w1 w2 w3 w4 w5", "w7", "nothing w8 nothing"]
    by_side = []
    for side in ("left", "right"):
        encoder = replace(ENCODER, padding_side=side)  # type: ignore[arg-type]
        tuning = TuneOptions(**TUNING, prompt_dropout=0.0)
        system = DualEncoderSystem(bert, encoder, tuning, None, device=CPU, dtype=torch.float32)
        table = system.pooled.backbone.get_input_embeddings().weight
        first = system.tokenizer(["w1"], side="query").ids[1] - 1  # the id of w0
        words = [[1, 2, 3, 4, 5], [7], [8]]
        expected = torch.stack([table[[first + word for word in numbers]].amax(0) for numbers in words])
        [chunk] = system.chunks(texts, "query", np.arange(3))
        _, ids, lengths = chunk.inputs
        provider: Any = system.prompts["query"]
        weights = provider.synthesise(PromptInputs(ids, lengths)).weights.detach()
        with torch.no_grad():
            torch.testing.assert_close(weights, provider.synthesiser(expected[chunk.rows["dense"]]).weights)
        by_side.append(weights)
    torch.testing.assert_close(*by_side)


def test_two_workers_train_the_weights_of_one(two_workers: TwoWorkers, bert: Path) -> None:
    """Pairs of queries of both workers are regularised."""
    expected = cases.steps_and_state(bert, TUNING)
    for actual in two_workers.run(cases.four_steps, bert, TUNING):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(actual[name], expected[name], atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("attention", ["learned", "uniform"])
def test_a_run_that_was_killed_ends_with_the_same_weights(bert: Path, tmp_path: Path, attention: Any) -> None:
    def run(checkpoints: Checkpoints) -> DualEncoderSystem:
        terms = () if attention == "uniform" else TUNING["terms"]
        tuning = {"synthesis": replace(SYNTHESIS, attention=attention), "terms": terms}
        system = dual_system(bert, **{**TUNING, **tuning})  # with dropout
        train(system, checkpoints)
        return system

    whole, resumed = whole_and_resumed(run, tmp_path)
    for name, system in (("a", whole), ("b", resumed)):
        (tmp_path / name).mkdir()
        system.save(tmp_path / name)
    for file in ("prompt.json", "prompt.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    names = {name.rpartition("synthesiser.")[2] for name in trained_parameters(whole.module)}
    assert ("norm.weight" in names) == (attention == "learned")


def test_trained_prompts_are_served_and_continued(bert: Path, tmp_path: Path) -> None:
    """The encoder computes the vectors of the trained system, and a new system starts from the saved prompt."""
    system = several_tasks(system_of(bert))
    trainer = Trainer(system, LoopOptions(steps=4, lr=1e-2), device=CPU, dtype=torch.float32)
    losses = [trainer.step(0) for _ in range(12)]  # the same batch
    assert losses[-1] < 0.9 * losses[0]
    system.save(tmp_path)
    prompt = load_prompt(tmp_path)
    texts = make_data().queries[:8]
    expected = system.encode(texts, "query")
    encoder = Encoder(str(bert), ENCODER, tasks={"t": prompt})
    np.testing.assert_allclose(encoder.encode(texts, task="t"), expected, atol=1e-5)
    assert np.abs(encoder.encode(texts) - expected).max() > 1e-3
    tuning = TuneOptions(**TUNING, seed=5)

    def start(tuning: TuneOptions, prompt: Any = prompt) -> DualEncoderSystem:
        return DualEncoderSystem(bert, ENCODER, tuning, None, device=CPU, dtype=torch.float32, start=prompt)

    np.testing.assert_array_equal(start(tuning).encode(texts, "query"), expected)
    with pytest.raises(InputError, match=r"have mix=before \(here after\): use their options"):
        start(replace(tuning, synthesis=replace(SYNTHESIS, mix="after")))
    with pytest.raises(InputError, match="is computed from each query: use parametrisation synthesised"):
        start(TuneOptions(sides="query", length=4))
    fixed = start(TuneOptions(sides="query", length=4), None).prompt()
    with pytest.raises(InputError, match="is the same for all queries, expected one that is computed"):
        start(tuning, fixed)


def test_a_training_query_without_a_word_is_named(bert: Path) -> None:
    data = make_data()
    queries = [*data.queries[:-1], "nothing known"]
    with pytest.raises(InputError, match=r"^the query 'nothing known' has no word that the backbone knows"):
        DualEncoderSystem(
            bert,
            ENCODER,
            TuneOptions(**TUNING),
            replace(data, queries=queries),
            device=CPU,
            dtype=torch.float32,
            vectors=lambda rows: np.zeros((len(rows), 32)),
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"synthesis": None, "terms": ()},
            "found no options of computed prompts, expected them for parametrisation synthes",
        ),
        (
            {"parametrisation": "embedding"},
            "embedding: found options of computed prompts, expected them for parametrisation synth",
        ),
        ({"sides": "tied"}, "sides tied, expected method prompt and sides query or method finetune"),
        ({"position_offset": True}, "parameter position_offset: a text starts at its usual position .*: leave it out"),
        (
            {"synthesis": replace(SYNTHESIS, attention="uniform")},
            "parameter divergence_weight [0-9.]+: expected 0 with parameter attention uniform, as all queries",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        TuneOptions(**{**TUNING, **change})
    with pytest.raises(
        InputError, match="parameter divergence_weight 1: found the parametrisation embedding, expected synth"
    ):
        TuneOptions(terms=(DivergenceOptions(),))


@pytest.mark.parametrize("kind", ["roberta", "t5", "qwen3"])
@pytest.mark.parametrize("mix", ["before", "after"])
def test_training_and_encoding_compute_the_same_vectors(
    tiny: Callable[..., Path], texts: list[str], kind: str, mix: Any
) -> None:
    """Over other backbones too, one of which pads on the left; each text has another number of words."""
    options = EncoderOptions(pooling="last" if kind == "qwen3" else "mean", dtype="float32", compile="never")
    folder, tuning = tiny(kind), TuneOptions(**{**TUNING, "synthesis": replace(SYNTHESIS, mix=mix)})
    system = DualEncoderSystem(folder, options, tuning, None, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        system.prompts["query"].synthesiser.basic.mul_(4)  # type: ignore[union-attr,operator]
    vectors = system.encode(texts[:20], "query")
    encoder = Encoder(str(folder), options, tasks={"t": system.prompt()})
    np.testing.assert_allclose(encoder.encode(texts[:20], task="t"), vectors, atol=2e-5)
    assert np.abs(encoder.encode(texts[:20]) - vectors).max() > 1e-4


def test_prompts_are_trained_with_both_encoders(bert: Path, tmp_path: Path) -> None:
    """Each has its learning rate; the saved prompt is served over the saved encoder of queries."""
    system = several_tasks(system_of(bert, method="finetune", sides="untied", chunk=200))
    by_name = gradients(system)
    for part in ("prompts.query.", "backbone.", "passage.backbone."):
        assert any(bool(value.abs().max() > 0) for name, value in by_name.items() if name.startswith(part)), part
    loop = LoopOptions(steps=4, lr=1e-4, warm_up=0.0, weight_decay=0.0)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in trained_parameters(system.module).items()}
    trainer.step(0)
    changes = {
        name: float((parameter.detach() - before[name]).abs().max())
        for name, parameter in trained_parameters(system.module).items()
    }
    for name, change in changes.items():  # the first step of AdamW is as large as the learning rate
        assert change <= (1.01e-3 if name.startswith("prompts.") else 1.01e-4), name
    assert changes["prompts.query.synthesiser.basic"] > 9e-4
    system.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["passage", "prompt", "query"]
    texts = make_data().queries[:8]
    encoder = Encoder(str(tmp_path / "query"), ENCODER, tasks={"t": load_prompt(tmp_path / "prompt")})
    np.testing.assert_allclose(encoder.encode(texts, task="t"), system.encode(texts, "query"), atol=1e-5)
    assert np.abs(encoder.encode(texts) - system.encode(texts, "query")).max() > 1e-3
    passages = Encoder(str(tmp_path / "passage"), ENCODER)
    np.testing.assert_allclose(passages.encode(texts, side="passage"), system.encode(texts, "passage"), atol=1e-5)
