"""Intermediate pretraining: losses against the papers and transformers, batches, and saved models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rip_cases import (
    CPU,
    REPEATED,
    TEXTS,
    add_mask,
    four_steps,
    options,
    repeated_steps,
    rip_system,
    split_at_periods,
)
from tiny import VOCABULARY, save_bert
from training_cases import Checkpoints, whole_and_resumed
from transformers import AutoTokenizer
from two_workers import TwoWorkers

from riptide.base.cuts import Cuts, sum_of_cuts
from riptide.base.errors import InputError
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.forward import batching
from riptide.retriever.forward.batching import Tokens
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems import rip
from riptide.retriever.systems.condenser import HeadShape, describe_head
from riptide.retriever.systems.masking import MaskedLanguageModel, Masking, TiedHead
from riptide.retriever.systems.rip import RipSystem, are_eligible, draw_pair, passages_at, rip_loss
from riptide.retriever.training.hooks import WorkerHooks
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters

MASK = 4 + VOCABULARY - 1  # the id of the last word, which is the mask token of these tests


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without a head, whose tokenizer has a mask token."""
    return add_mask(save_bert(tmp_path_factory.mktemp("bert"), spread=0.2), f"w{VOCABULARY - 1}")


@pytest.fixture(autouse=True)
def _sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rip, "split_sentences", split_at_periods)


def load_masked(folder: Path) -> Any:
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(folder).eval()


def gather(system: RipSystem, step: int = 0, world: int = 1) -> dict[int, tuple[list[int], list[int]]]:
    """Returns the masked ids and labels of each row of a batch, from the shares of all workers."""
    rows = {}
    for rank in range(world):
        for chunk in system.batch(step, rank, world).chunks:
            ids, lengths, labels, _ = chunk.inputs
            assert len(ids) == len(chunk.rows["dense"])
            for row, one, length, label in zip(chunk.rows["dense"], ids, lengths, labels, strict=True):
                assert int(row) not in rows
                rows[int(row)] = (one[:length].tolist(), label[:length].tolist())
                assert (label[length:] == -100).all()
    return rows


def test_units_of_the_same_passage_and_equal_units_are_no_negatives() -> None:
    vectors = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    passages, texts = [3, 3, 5, 5, 3, 3, 8, 8, 9, 9], [0, 1, 2, 3, 0, 4, 5, 2, 6, 6]
    total = 0.0
    for i, own in enumerate(vectors):
        partner = i + 1 if i % 2 == 0 else i - 1
        below = [partner]
        below += [
            j
            for j in range(10)
            if j not in (i, partner) and passages[j] != passages[i] and texts[j] not in (texts[i], texts[partner])
        ]
        total -= math.log(
            math.exp(float(own @ vectors[partner])) / sum(math.exp(float(own @ vectors[j])) for j in below)
        )
    actual = rip_loss(vectors, torch.tensor(passages), torch.tensor(texts))
    assert float(actual) == pytest.approx(total / 10, abs=1e-12)
    alone = rip_loss(vectors[:4], torch.tensor([3, 3, 3, 3]))
    assert float(alone) == 0.0  # the partners are the only terms


def test_a_batch_knows_its_passages_and_equal_units(bert: Path) -> None:
    system = rip_system(bert, REPEATED)
    batch = system.batch(1, 0, 1)
    passages, texts = batch.arguments["passages"].tolist(), batch.arguments["texts"].tolist()
    assert passages == np.repeat(passages_at(system.options, np.arange(3), 1)[0], 2).tolist()
    units = {}
    for row, (ids, labels) in gather(system, step=1).items():
        units[row] = tuple(label if label != -100 else number for number, label in zip(ids, labels, strict=True))
    for i in range(14):
        assert [texts[i] == text for text in texts] == [units[i] == units[j] for j in range(14)]
    shared = (2, *range(5, 8), 3)  # w1 w2 w3 is a sentence of two passages
    assert len({passages[row] for row in range(14) if units[row] == shared}) == 2
    vectors = torch.randn(14, 32, generator=torch.Generator().manual_seed(0))
    expected = rip_loss(vectors, batch.arguments["passages"], batch.arguments["texts"])
    assert float(system.loss({"dense": vectors}, batch)) == float(expected) < float(rip_loss(vectors))


def test_repeated_passages_with_two_workers_and_cached_gradients(
    bert: Path, monkeypatch: pytest.MonkeyPatch, two_workers: TwoWorkers
) -> None:
    first, second = two_workers.run(repeated_steps, bert, 2)
    assert first == second == pytest.approx(repeated_steps(0, monkeypatch, bert, 1), rel=1e-4)


def test_a_resumed_run_ends_with_the_same_bytes(bert: Path, tmp_path: Path) -> None:
    loop = LoopOptions(steps=4, lr=1e-3, checkpoint_every=2)

    def run(checkpoints: Checkpoints) -> dict[str, torch.Tensor]:
        trainer = Trainer(rip_system(bert, REPEATED), loop, device=CPU, dtype=torch.float32)
        trainer.train(checkpoints.hooks())
        return trainer.stepper.state()

    whole, resumed = whole_and_resumed(run, tmp_path)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_batch_has_at_most_the_eligible_passages() -> None:
    assert rip.limit_batch(options(batch=2048), 5).batch == 5
    assert rip.limit_batch(options(batch=4), 5).batch == 4
    assert rip.limit_batch(options(batch=2048, objective="mlm"), 5).batch == 2048
    with pytest.raises(InputError, match="two sentences of at least 8 words: 1; the pairs of one passage have no neg"):
        rip.limit_batch(options(min_words=8), 1)


@pytest.mark.parametrize("unit", ["sentence", "span"])
def test_units_have_eight_words(unit: str) -> None:
    defaults = options(min_words=8, unit=unit)
    seven, eight = " ".join("abcdefg"), " ".join("hijklmno")
    texts = [f"{seven}. {eight}.", f"{eight}. {seven}. {eight} p.", f"{seven}. {seven} q.", f"{eight} - {seven} !"]
    assert are_eligible(texts, defaults).tolist() == [False, True, False, False]
    for epoch in range(50):
        pair = draw_pair(texts[1], defaults, epoch, 0)
        assert min(len(text.split()) for text in pair) >= 8


def test_masks_follow_bert(bert: Path) -> None:
    masking = Masking(read_recipe(bert, EncoderOptions()), 4 + VOCABULARY, 0.15)
    assert masking.mask_id == MASK
    draw = np.random.default_rng(1)
    lengths = np.array([2, 3, 4, *draw.integers(5, 60, size=3000)])
    rows = [[2, *draw.integers(4, MASK, size=length - 2), 3] for length in lengths]
    rows[100][3] = 1  # an unknown word is special too
    ids = np.concatenate(rows).astype(np.int32)
    tokens = Tokens(ids, lengths)
    masked, labels = masking(tokens, [[0, row] for row in range(len(lengths))])
    at = labels.ids != -100
    assert (labels.ids[at] == ids[at]).all()
    assert (masked.ids[~at] == ids[~at]).all()
    assert not np.isin(ids[at], [0, 1, 2, 3, MASK]).any()
    for start, length in zip(tokens.starts, lengths, strict=True):
        own = slice(start, start + length)
        ordinary = int((ids[own] >= 4).sum())
        assert at[own].sum() == (min(ordinary, max(1, round(0.15 * ordinary))))
    fates = masked.ids[at]
    count = at.sum()
    random = (fates != MASK) & (fates != ids[at])
    assert np.mean(fates == MASK) == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / count))
    assert np.mean(random) == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / count))
    assert not np.isin(fates[random], [0, 1, 2, 3]).any()
    assert len(np.unique(fates[random])) > 200
    again, _ = masking(Tokens(rows_of(ids, tokens, 50), lengths[50:51]), [[0, 50]])
    assert (again.ids == rows_of(masked.ids, tokens, 50)).all()  # independent of the other rows


def rows_of(ids: np.ndarray, tokens: Tokens, row: int) -> np.ndarray:
    return ids[tokens.starts[row] : tokens.starts[row] + tokens.lengths[row]]


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({}, "sentences"),
        ({"unit": "span"}, None),  # they are cut by design
        ({"objective": "mlm"}, "passages"),
    ],
)
def test_sentences_and_whole_passages_that_are_cut_are_counted(
    bert: Path, changes: dict[str, Any], noun: str | None
) -> None:
    system = rip_system(bert, max_length=6, **changes)
    passages, epochs = passages_at(system.options, np.arange(len(TEXTS)), 0)
    texts = [TEXTS[passage] for passage in passages]
    if system.options.has_pairs:
        drawn = zip(texts, epochs.tolist(), passages.tolist(), strict=True)
        texts = [unit for text, *key in drawn for unit in draw_pair(text, system.options, *key)]
    lengths = np.array([len(ids) for ids in AutoTokenizer.from_pretrained(bert)(texts)["input_ids"]])
    kept = np.minimum(lengths, 6)
    counts = [chunk.cuts for chunk in system.batch(0, 0, 1).chunks]
    assert {each for chunk in counts for each in chunk} == ({noun} if noun else set())
    if noun:
        assert sum_of_cuts(chunk[noun] for chunk in counts) == Cuts.from_lengths(kept, lengths - kept, 6)


def test_passages_with_too_few_units_are_not_drawn() -> None:
    texts = ["a b c. d e f.", "a b.", "", "same words. same words.", "x. y. z."]
    assert are_eligible(texts, options()).tolist() == [True, False, False, False, True]
    assert are_eligible(texts, options(unit="span")).tolist() == [True, True, False, True, True]
    assert are_eligible(texts, options(objective="mlm")).tolist() == [True, True, False, True, True]


def test_epochs_are_permutations_and_pairs_differ() -> None:
    rows = np.array([3, 5, 8, 11, 20])
    draws = [passages_at(options(batch=3), rows, step) for step in range(10)]
    passages, epochs = (np.concatenate(part) for part in zip(*draws, strict=True))
    assert epochs.tolist() == sorted(epochs)
    orders = [tuple(passages[epochs == epoch]) for epoch in range(6)]
    assert all(sorted(order) == rows.tolist() for order in orders)
    assert len(set(orders)) > 1
    pairs = {draw_pair("a. b. c. d.", options(), epoch, 3) for epoch in range(200)}
    assert pairs == {(x, y) for x in "abcd" for y in "abcd" if x != y}
    assert draw_pair("a. b. c. d.", options(), 5, 3) == draw_pair("a. b. c. d.", options(), 5, 3)


@pytest.mark.parametrize("changes", [{}, {"unit": "span"}, {"objective": "mlm", "max_length": 60}])
def test_the_batch_is_the_same_for_every_number_of_workers(bert: Path, changes: dict[str, Any]) -> None:
    system = rip_system(bert, **changes)
    expected = gather(system, step=3)
    batch = system.batch(3, 0, 1)
    mlm = changes.get("objective") == "mlm"
    assert {name: output.rows for name, output in batch.outputs.items()} == ({} if mlm else {"dense": 14})
    assert sorted(expected) == list(range(7 if mlm else 14))
    made_of_two = pytest.MonkeyPatch()
    made_of_two.setattr("torch.distributed.all_reduce", lambda tensor: None)
    with made_of_two.context():
        for world in (2, 3, 7):
            assert gather(system, step=3, world=world) == expected
    made_of_two.undo()
    assert gather(system, step=2) != expected


def test_a_row_holds_a_unit_of_its_passage(bert: Path) -> None:
    system = rip_system(bert)
    passages, _ = passages_at(system.options, np.arange(len(TEXTS)), 1)
    for row, (ids, labels) in gather(system, step=1).items():
        original = [label if label != -100 else number for number, label in zip(ids, labels, strict=True)]
        sentences = [s.strip().split() for s in TEXTS[passages[row // 2]].split(".")]
        assert [f"w{number - 4}" for number in original[1:-1]] in sentences


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("with_head", [True, False])
def test_the_masked_loss_equals_transformers(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, with_head: bool
) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = add_mask(tiny(kind), "water")
    if with_head:
        torch.manual_seed(3)
        whole = AutoModelForMaskedLM.from_pretrained(folder)
        for parameter in whole.parameters():  # so that biases have an effect
            torch.nn.init.normal_(parameter, std=0.3)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "whole")
        whole.save_pretrained(tmp_path / "whole")
        folder = tmp_path / "whole"
    words = ["the", "river", "of", "bank", "money", "flows", "a", "fast", "slow", "question", "passage", "query"]
    texts = [f"{' '.join(words[row : row + 5])}. {' '.join(words[row + 2 : row + 4])}" for row in range(7)]
    system = rip_system(folder, texts, max_length=20)
    assert system.model.fresh_head is not with_head
    system.save(tmp_path / "saved")
    reference = load_masked(folder if with_head else tmp_path / "saved")
    assert system.model.head.decoder.weight is system.model.backbone.get_input_embeddings().weight
    total, count, loss = 0.0, 0, 0.0
    rows = torch.zeros(14, 32)
    for chunk in system.batch(0, 0, 1).chunks:
        ids, lengths, labels, masked = chunk.inputs
        with torch.no_grad():
            outputs, part = system.forward(chunk)
            loss += float(part)
            inside = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
            output = reference(input_ids=ids, attention_mask=inside, labels=labels, output_hidden_states=True)
        here = int((labels != -100).sum())
        total, count = total + float(output.loss) * here, count + here
        torch.testing.assert_close(outputs["dense"], output.hidden_states[-1][:, 0], atol=1e-5, rtol=1e-5)
        rows[torch.from_numpy(chunk.rows["dense"])] = outputs["dense"]
    assert count == masked >= 14
    assert loss == pytest.approx(total / count, rel=1e-5)
    assert float(system.loss({"dense": rows}, system.batch(0, 0, 1))) == pytest.approx(float(rip_loss(rows)))


def test_a_head_with_operations_after_its_table_gives_the_same_loss(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rip_system(bert).save(tmp_path / "whole")
    losses = []
    for cut in (True, False):
        if not cut:
            monkeypatch.setattr("riptide.retriever.systems.masking._computes_same", lambda *_: False)
        system = rip_system(tmp_path / "whole")
        assert (system.model.head.decoder is not None) is cut
        chunk = system.batch(0, 0, 1).chunks[0]
        _, part = system.forward(chunk)
        part.backward()
        gradient = system.model.backbone.get_input_embeddings().weight.grad
        losses.append((part.detach(), gradient))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


def test_a_missing_head_is_tied_before_and_after_saving(bert: Path, tmp_path: Path) -> None:
    system = rip_system(bert)
    assert system.model.fresh_head
    system.save(tmp_path / "saved")
    for whole in (system.model.whole, load_masked(tmp_path / "saved")):
        table, decoder = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
        assert table.data_ptr() == decoder.data_ptr()
    again = rip_system(tmp_path / "saved")
    assert not again.model.fresh_head
    torch.testing.assert_close(again.module.state_dict(), system.module.state_dict(), atol=0, rtol=0)


def test_an_architecture_without_a_class_gets_a_tied_head(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    system = rip_system(tiny("t5"), pooling="mean")  # without a mask token, the unknown token is the mask
    assert system.masking.mask_id == 1
    assert isinstance(system.model.head, TiedHead)
    table = system.model.backbone.get_input_embeddings().weight
    assert system.model.head.decoder.weight is table
    [chunk, *_] = system.batch(0, 0, 1).chunks
    outputs, part = system.forward(chunk)
    ids, lengths, labels, total = chunk.inputs
    inside = torch.arange(ids.shape[1])[None] < lengths[:, None]
    hidden = system.model.backbone(input_ids=ids, attention_mask=inside.long()).last_hidden_state
    head = system.model.head
    words = head.scale * head.norm(torch.nn.functional.gelu(head.transform(hidden)))
    logits = torch.nn.functional.linear(words, table, head.decoder.bias)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
    torch.testing.assert_close(part, expected)
    torch.testing.assert_close(outputs["dense"][0], hidden[0, : lengths[0]].mean(0))
    system.save(tmp_path / "saved")
    stock = T5EncoderModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(stock.get_input_embeddings().weight, table)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_saved_model_gives_the_same_vectors_in_other_libraries(bert: Path, tmp_path: Path, pooling: str) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    system = rip_system(bert, pooling=pooling)
    step(system)
    system.module.eval()
    system.save(tmp_path / "saved")
    texts = [" ".join(text.replace(".", " ").split()[:10]) for text in TEXTS[:5]]
    expected = []
    for text in texts:
        ids = torch.from_numpy(system.tokenizer([text], side="passage").ids.astype(np.int64))[None]
        with torch.no_grad():
            expected.append(system.model(ids, torch.tensor([ids.shape[1]]), torch.full_like(ids, -100))[0][0])
    vectors = torch.stack(expected).numpy()
    stock = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert stock.max_seq_length == 64
    assert [type(module).__name__ for module in stock] == ["Transformer", "Pooling"]
    np.testing.assert_allclose(stock.encode(texts), vectors, atol=1e-5)
    ours = Encoder(tmp_path / "saved", EncoderOptions(dtype="float32", compile="never"), device="cpu")
    np.testing.assert_allclose(ours.encode(texts, side="passage"), vectors, atol=1e-5)
    AutoModel.from_pretrained(tmp_path / "saved")
    assert load_masked(tmp_path / "saved").config.attention_probs_dropout_prob == 0.1


def step(system: RipSystem, **loop: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Runs one step; returns the loss and the gradients that the optimizer received."""
    trainer = Trainer(system, LoopOptions(steps=4, lr=1e-3, warm_up=0.0, **loop), device=CPU, dtype=torch.float32)
    caught: dict[str, torch.Tensor] = {}
    before = trainer.stepper.step

    def catch(lr: float) -> float:
        caught.update({n: p.grad.clone() for n, p in trained_parameters(system.module).items() if p.grad is not None})
        return before(lr)

    trainer.stepper.step = catch  # type: ignore[method-assign]
    return trainer.step(0), caught


@pytest.mark.parametrize("objective", ["rip", "cocondenser", "condenser", "mlm"])
def test_the_loop_computes_the_gradients_of_the_whole_batch(
    bert: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    monkeypatch.setitem(batching.BATCH_TOKENS, "cpu", 100)
    system = rip_system(bert, objective=objective, max_length=40)
    batch = system.batch(0, 0, 1)
    assert len(batch.chunks) > 2
    passed = [system.forward(chunk) for chunk in batch.chunks]
    order = torch.from_numpy(np.concatenate([chunk.rows["dense"] for chunk in batch.chunks])).argsort()
    vectors = torch.cat([outputs["dense"] for outputs, _ in passed])[order]
    masked = torch.stack([part for _, part in passed]).sum()
    loss = system.loss({"dense": vectors}, batch) + masked
    loss.backward()
    expected = {name: p.grad for name, p in trained_parameters(system.module).items() if p.grad is not None}
    value, actual = step(rip_system(bert, objective=objective, max_length=40), grad_cache="on")
    assert value == pytest.approx(loss.item(), rel=1e-5)
    assert actual.keys() == expected.keys() == trained_parameters(system.module).keys() - unused(system)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3)


def unused(system: RipSystem) -> set[str]:
    return {name for name, p in trained_parameters(system.module).items() if p.grad is None}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of four layers."""
    folder = save_bert(tmp_path_factory.mktemp("deep"), layers=4, spread=0.2)
    return add_mask(folder, f"w{VOCABULARY - 1}")


@pytest.mark.parametrize("objective", ["condenser", "cocondenser"])
@pytest.mark.parametrize("skip_from", [None, 1])
def test_the_condenser_loss_reaches_all_layers(
    deep: Path, monkeypatch: pytest.MonkeyPatch, objective: str, skip_from: int | None
) -> None:
    system = rip_system(deep, objective=objective, skip_from=skip_from)
    model: MaskedLanguageModel = system.model
    chunk, *_ = system.batch(0, 0, 1).chunks
    ids, lengths, labels, _ = chunk.inputs
    losses = []
    original = MaskedLanguageModel._masked_loss
    with monkeypatch.context() as patch:
        patch.setattr(
            MaskedLanguageModel,
            "_masked_loss",
            lambda self, *inputs: losses.append(original(self, *inputs)) or losses[-1],
        )
        inputs_of_head = []
        layers = model.condenser.layers
        handle = layers[0].register_forward_hook(lambda module, inputs, output: inputs_of_head.append(inputs[0]))
        _, total = model(ids, lengths, labels)
        handle.remove()
        model.late_loss = False
        _, head_alone = model(ids, lengths, labels)
    assert len(layers) == 2
    condenser, late, again = losses
    torch.testing.assert_close(total, late + condenser)
    torch.testing.assert_close(head_alone, condenser)
    torch.testing.assert_close(again, condenser)
    states = model.backbone(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1])[None] < lengths[:, None]).long(),
        output_hidden_states=True,
    ).hidden_states
    early = 2 if skip_from is None else skip_from
    torch.testing.assert_close(inputs_of_head[0], torch.cat([states[4][:, :1], states[early][:, 1:]], 1))
    condenser.backward()
    for layer in (*model.backbone.encoder.layer, *layers):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters() if p.ndim > 1)


def test_condenser_masks_passages_and_pairs_nothing(bert: Path) -> None:
    system = rip_system(bert, objective="condenser", max_length=60)
    batch = system.batch(0, 0, 1)
    assert batch.outputs == {}
    passages, _ = passages_at(system.options, np.arange(len(TEXTS)), 0)
    for row, (ids, labels) in gather(system).items():
        original = [label if label != -100 else number for number, label in zip(ids, labels, strict=True)]
        words = [word.strip(".") for word in TEXTS[passages[row]].split()]
        known = [f"w{number - 4}" for number in original[1:-1] if number != 1]  # a full stop is an unknown token
        assert known == words[: len(known)]
        assert len(known) > 10 or known == words


def test_the_second_stage_starts_from_the_head_of_the_first(deep: Path, tmp_path: Path) -> None:
    first = rip_system(deep, objective="condenser", head_layers=3, skip_from=1)
    step(first)
    first.save(tmp_path / "first")
    second = rip_system(tmp_path / "first", objective="cocondenser", seed=5)
    assert second.model.condenser.shape == HeadShape(layers=3, skip_from=1)
    torch.testing.assert_close(second.module.state_dict(), first.module.state_dict(), atol=0, rtol=0)
    fresh = rip_system(deep, objective="cocondenser", head_layers=3, seed=5).model.condenser.state_dict()
    assert not torch.equal(fresh["layers.0.linear1.weight"], first.model.condenser.layers[0].linear1.weight)
    rip_system(tmp_path / "first").save(tmp_path / "rip")
    assert describe_head(tmp_path / "rip") is None
    load_masked(tmp_path / "first")  # the head next to the weights is ignored


@pytest.mark.parametrize(
    ("file", "content", "changes", "message"),
    [
        (
            None,
            None,
            {"head_layers": 3},
            "has parameter head_layers 2 and parameter skip_from 2, found parameter head_layers 3",
        ),
        ("config.json", None, {}, "config.json: no such file: the model folder is incomplete"),
        ("config.json", '{"layers": "2"}', {}, "expected the integers layers and skip_from, got"),
        ("config.json", '{"layers": 1, "skip_from": 2}', {}, "model.safetensors: expected tensors"),
        ("model.safetensors", "no tensors", {}, "model.safetensors: "),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    deep: Path, tmp_path: Path, file: str | None, content: str | None, changes: dict[str, Any], message: str
) -> None:
    rip_system(deep, objective="condenser").save(tmp_path / "saved")
    if file is not None:
        (tmp_path / "saved" / "condenser" / file).unlink()
        if content is not None:
            (tmp_path / "saved" / "condenser" / file).write_text(content)
    with pytest.raises(InputError, match=message):
        rip_system(tmp_path / "saved", objective="cocondenser", **changes)


def test_training_lowers_the_loss_and_starts_the_same_each_time(bert: Path) -> None:
    none = WorkerHooks(lambda: None, lambda *_: None, lambda: None, lambda *_: None, lambda _: None)
    curves = []
    for _ in range(2):
        system = rip_system(bert, steps=8)
        trainer = Trainer(system, LoopOptions(steps=8, lr=3e-3), device=CPU, dtype=torch.float32)
        curves.append([line[1] for line in trainer.train(none).curve])
    assert curves[0] == curves[1]
    assert np.mean(curves[0][-2:]) < 0.9 * np.mean(curves[0][:2])


def test_prompts_alone_train_over_a_frozen_backbone(bert: Path, tmp_path: Path) -> None:
    system = rip_system(bert, train="prompts", prompt_length=3)
    names = set(trained_parameters(system.module))
    assert {name.split(".")[0] for name in names} == {"prompt", "model"}
    assert all(name.startswith(("prompt.", "model.head.")) for name in names)
    before = {name: p.clone() for name, p in system.model.backbone.named_parameters()}
    _, gradients = step(system)
    assert gradients["prompt.embedding"].abs().sum() > 0
    for name, parameter in system.model.backbone.named_parameters():
        assert torch.equal(parameter, before[name])
    (tmp_path / "prompt").mkdir()
    system.save(tmp_path / "prompt")
    prompt = load_prompt(tmp_path / "prompt")
    assert prompt.query is prompt.passage
    assert system.prompt is not None
    torch.testing.assert_close(prompt.query, system.prompt.matrix())


def test_bfloat16_computes_nearly_the_same(bert: Path) -> None:
    system = rip_system(bert)
    [chunk, *_] = system.batch(0, 0, 1).chunks
    outputs, part = system.forward(chunk)
    system.dtype = torch.bfloat16
    low_outputs, low_part = system.forward(chunk)
    vectors, low = outputs["dense"], low_outputs["dense"]
    assert low.dtype == torch.float32
    assert not torch.equal(low, vectors)
    assert float(torch.cosine_similarity(low, vectors).min()) > 0.99
    assert float(low_part) == pytest.approx(float(part), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "parameter steps 0: expected at least 1"),
        ({"lr": float("nan")}, "parameter lr nan"),
        ({"mlm_probability": 0.0}, "parameter mlm_probability 0.0"),
        (
            {"objective": "spans"},
            "parameter objective 'spans': expected one of rip, cocondenser, condenser, mlm, pairs",
        ),
        ({"mask": "words"}, "parameter mask 'words': expected one of token, word"),
        ({"objective": "condenser", "pooling": "mean"}, "parameter pooling cls"),
        ({"head_layers": 2}, "objective rip has no head"),
        ({"min_words": 0}, "parameter min_words 0: expected at least 1"),
        ({"batch": 1}, "have no negatives"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**changes)


def test_a_backbone_that_cannot_be_used_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than the 64 positions"):
        rip_system(bert, max_length=65)
    with pytest.raises(InputError, match="skip_from 2: expected at least 1 layer, and one of the backbone's layers 0 "):
        rip_system(bert, objective="condenser", skip_from=2)
    with pytest.raises(InputError, match="cannot be shared by 8 workers"):
        rip_system(bert).batch(0, 0, 8)
    assert replace(options(), seed=1) != options()


@pytest.mark.parametrize("kind", ["DistilBert", "Electra", "ModernBert", "MPNet"])
def test_heads_of_any_structure_run_at_masked_positions_only(tmp_path: Path, kind: str) -> None:
    import transformers

    add_mask(save_bert(tmp_path / "bert"), f"w{VOCABULARY - 1}")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes_of_kind = {
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "Electra": {**shape, "embedding_size": 16},
    }.get(kind, shape)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=4 + VOCABULARY,
        **sizes_of_kind,
        pad_token_id=0,
        bos_token_id=2,
        cls_token_id=2,
        sep_token_id=3,
        eos_token_id=3,
    )
    whole = getattr(transformers, f"{kind}ForMaskedLM")(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    whole.save_pretrained(tmp_path / "bert")  # replaces the BERT next to its tokenizer
    system = rip_system(tmp_path / "bert")
    assert not system.model.fresh_head
    [chunk] = system.batch(0, 0, 1).chunks
    ids, lengths, labels, total = chunk.inputs
    sizes = []
    decoder = system.model.head.decoder
    handle = decoder.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].shape[:-1]))
    _, part = system.forward(chunk)
    handle.remove()
    assert sizes == [(total,)]
    inside = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    logits = load_masked(tmp_path / "bert")(input_ids=ids, attention_mask=inside).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero", [None, 3])
def test_two_workers_train_as_one(
    request: pytest.FixtureRequest, bert: Path, monkeypatch: pytest.MonkeyPatch, zero: int | None
) -> None:
    """Sentences of the other worker are negatives, masked tokens are counted over both workers, and the tied table is
    gathered where it is sharded."""
    pair: TwoWorkers = request.getfixturevalue("two_workers" if zero is None else "two_deepspeed_workers")
    actual, _ = pair.run(four_steps, bert, 2, zero)
    expected = four_steps(0, monkeypatch, bert, 1, None)
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(actual["losses"], expected["losses"], atol=1e-4, rtol=1e-4)
    for name in actual:
        # The gradient of a key's bias is 0 except for rounding, which AdamW amplifies.
        if name.startswith("weight.") and not name.endswith("key.bias"):
            torch.testing.assert_close(actual[name], expected[name], atol=2e-4, rtol=1e-2)
