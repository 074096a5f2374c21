"""Intermediate pretraining: the losses are the papers' and transformers' own, batches do not depend on the workers,
and what is saved opens everywhere with the same vectors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCABULARY, save_bert

from retriever import rip
from retriever.batching import Tokens
from retriever.encoder import Encoder
from retriever.errors import InputError
from retriever.masking import MaskedBackbone, Masking, TiedHead
from retriever.options import EncoderOptions
from retriever.prompts import load_prompt
from retriever.recipe import read_recipe
from retriever.rip import RipData, RipOptions, RipSystem, eligible, pair_of, passages_at, rip_loss
from retriever.stepping import trained
from retriever.training import Hooks, LoopOptions, Trainer

CPU = torch.device("cpu")
MASK = 4 + VOCABULARY - 1  # the id of the last word, which these tests let be the mask


def add_mask(folder: Path, piece: str) -> Path:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": piece})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a BERT without a head, whose tokenizer has a mask token."""
    return add_mask(save_bert(tmp_path_factory.mktemp("bert"), spread=0.2), f"w{VOCABULARY - 1}")


def make_texts(passages: int = 30) -> list[str]:
    draw = np.random.default_rng(0)
    texts = []
    for _ in range(passages):
        sizes = draw.integers(3, 12, size=draw.integers(2, 6))
        texts.append(" ".join(" ".join(f"w{n}" for n in draw.integers(VOCABULARY - 1, size=k)) + "." for k in sizes))
    return texts


TEXTS = make_texts()


@pytest.fixture(autouse=True)
def _units(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nonsense has no capitals, by which sentences are told apart.
    monkeypatch.setattr(rip, "split_sentences", lambda text, _: [s.strip() for s in text.split(".") if s.strip()])


def options(**given: Any) -> RipOptions:
    return RipOptions(**{"steps": 4, "batch": 7, "max_length": 16, **given})


def system(folder: Path, texts: list[str] = TEXTS, **given: Any) -> RipSystem:
    data = RipData(len(texts), lambda rows: [texts[row] for row in rows], np.arange(len(texts)))
    made = RipSystem(folder, options(**given), data, device=CPU)
    made.module.eval()
    return made


def load_masked(folder: Path) -> Any:
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(folder).eval()


def gather(made: RipSystem, step: int = 0, world: int = 1) -> dict[int, tuple[list[int], list[int]]]:
    """Of each row of a batch, from the shares of all workers: masked ids and labels."""
    rows = {}
    for rank in range(world):
        for chunk in made.batch(step, rank, world).chunks:
            ids, lengths, labels, _ = chunk.inputs
            assert len(ids) == len(chunk.rows)
            for row, one, length, label in zip(chunk.rows, ids, lengths, labels, strict=True):
                assert int(row) not in rows
                rows[int(row)] = (one[:length].tolist(), label[:length].tolist())
                assert (label[length:] == -100).all()
    return rows


def test_the_contrastive_loss_is_equation_4() -> None:
    vectors = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for i, own in enumerate(vectors):
        partner = i + 1 if i % 2 == 0 else i - 1
        below = sum(math.exp(float(own @ other)) for j, other in enumerate(vectors) if j != i)
        total -= math.log(math.exp(float(own @ vectors[partner])) / below)
    assert float(rip_loss(vectors)) == pytest.approx(total / 10, abs=1e-12)


def test_masks_are_berts(bert: Path) -> None:
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
    assert (again.ids == rows_of(masked.ids, tokens, 50)).all()  # whatever stands beside it


def rows_of(ids: np.ndarray, tokens: Tokens, row: int) -> np.ndarray:
    return ids[tokens.starts[row] : tokens.starts[row] + tokens.lengths[row]]


def test_what_is_no_passage_to_draw_is_left_out() -> None:
    texts = ["a b c. d e f.", "a b.", "", "same words. same words.", "x. y. z."]
    assert eligible(texts, options()).tolist() == [True, False, False, False, True]
    assert eligible(texts, options(unit="span")).tolist() == [True, True, False, True, True]
    assert eligible(texts, options(objective="mlm")).tolist() == [True, True, False, True, True]


def test_epochs_are_permutations_and_pairs_differ() -> None:
    rows = np.array([3, 5, 8, 11, 20])
    found = [passages_at(options(batch=3), rows, step) for step in range(10)]
    passages, epochs = (np.concatenate(part) for part in zip(*found, strict=True))
    assert epochs.tolist() == sorted(epochs)
    orders = [tuple(passages[epochs == epoch]) for epoch in range(6)]
    assert all(sorted(order) == rows.tolist() for order in orders)
    assert len(set(orders)) > 1
    pairs = {pair_of("a. b. c. d.", options(), epoch, 3) for epoch in range(200)}
    assert pairs == {(x, y) for x in "abcd" for y in "abcd" if x != y}
    assert pair_of("a. b. c. d.", options(), 5, 3) == pair_of("a. b. c. d.", options(), 5, 3)


@pytest.mark.parametrize("given", [{}, {"unit": "span"}, {"objective": "mlm", "max_length": 60}])
def test_the_batch_is_the_same_for_every_number_of_workers(bert: Path, given: dict[str, Any]) -> None:
    made = system(bert, **given)
    expected = gather(made, step=3)
    batch = made.batch(3, 0, 1)
    mlm = given.get("objective") == "mlm"
    assert batch.total == (0 if mlm else 14)
    assert sorted(expected) == list(range(7 if mlm else 14))
    made_of_two = pytest.MonkeyPatch()
    made_of_two.setattr("torch.distributed.all_reduce", lambda tensor: None)
    with made_of_two.context():
        for world in (2, 3, 7):
            assert gather(made, step=3, world=world) == expected
    made_of_two.undo()
    assert gather(made, step=2) != expected


def test_a_row_holds_a_unit_of_its_passage(bert: Path) -> None:
    made = system(bert)
    passages, _ = passages_at(made.options, np.arange(len(TEXTS)), 1)
    for row, (ids, labels) in gather(made, step=1).items():
        told = [label if label != -100 else number for number, label in zip(ids, labels, strict=True)]
        sentences = [s.strip().split() for s in TEXTS[passages[row // 2]].split(".")]
        assert [f"w{number - 4}" for number in told[1:-1]] in sentences


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("with_head", [True, False])
def test_the_masked_loss_is_transformers_own(tiny: Callable[..., Path], tmp_path: Path, kind: str,
                                             with_head: bool) -> None:  # fmt: skip
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = add_mask(tiny(kind), "water")
    if with_head:
        torch.manual_seed(3)
        whole = AutoModelForMaskedLM.from_pretrained(folder)
        for parameter in whole.parameters():  # so that biases count too
            torch.nn.init.normal_(parameter, std=0.3)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "whole")
        whole.save_pretrained(tmp_path / "whole")
        folder = tmp_path / "whole"
    words = ["the", "river", "of", "bank", "money", "flows", "a", "fast", "slow", "question", "passage", "query"]
    texts = [f"{' '.join(words[row : row + 5])}. {' '.join(words[row + 2 : row + 4])}" for row in range(7)]
    made = system(folder, texts, max_length=20)
    assert made.model.fresh_head is not with_head
    made.save(tmp_path / "saved")
    reference = load_masked(folder if with_head else tmp_path / "saved")
    assert made.model.head.decoder.weight is made.model.backbone.get_input_embeddings().weight
    total, count, found = 0.0, 0, 0.0
    rows = torch.zeros(14, 32)
    for chunk in made.batch(0, 0, 1).chunks:
        ids, lengths, labels, masked = chunk.inputs
        with torch.no_grad():
            vectors, part = made.forward(chunk)
            found += float(part)
            inside = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
            output = reference(input_ids=ids, attention_mask=inside, labels=labels, output_hidden_states=True)
        here = int((labels != -100).sum())
        total, count = total + float(output.loss) * here, count + here
        torch.testing.assert_close(vectors, output.hidden_states[-1][:, 0], atol=1e-5, rtol=1e-5)
        rows[torch.from_numpy(chunk.rows)] = vectors
    assert count == masked >= 14
    assert found == pytest.approx(total / count, rel=1e-5)
    assert float(made.loss(rows, made.batch(0, 0, 1))) == pytest.approx(float(rip_loss(rows)))


def test_a_head_that_does_more_after_its_table_gives_the_same_loss(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(bert).save(tmp_path / "whole")
    losses = []
    for cut in (True, False):
        if not cut:
            monkeypatch.setattr("retriever.masking._same", lambda *_: False)
        made = system(tmp_path / "whole")
        assert (made.model.head.decoder is not None) is cut
        chunk = made.batch(0, 0, 1).chunks[0]
        _, part = made.forward(chunk)
        part.backward()
        gradient = made.model.backbone.get_input_embeddings().weight.grad
        losses.append((part.detach(), gradient))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


def test_a_head_that_was_missing_is_tied_before_and_after_saving(bert: Path, tmp_path: Path) -> None:
    made = system(bert)
    assert made.model.fresh_head
    made.save(tmp_path / "saved")
    for whole in (made.model.whole, load_masked(tmp_path / "saved")):
        table, decoder = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
        assert table.data_ptr() == decoder.data_ptr()
    again = system(tmp_path / "saved")
    assert not again.model.fresh_head
    torch.testing.assert_close(again.module.state_dict(), made.module.state_dict(), atol=0, rtol=0)


def test_an_architecture_without_a_class_gets_a_tied_head(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    made = system(tiny("t5"), pooling="mean")  # without a mask token: the unknown one is the mask
    assert made.masking.mask_id == 1
    assert isinstance(made.model.head, TiedHead)
    table = made.model.backbone.get_input_embeddings().weight
    assert made.model.head.decoder.weight is table
    [chunk, *_] = made.batch(0, 0, 1).chunks
    vectors, part = made.forward(chunk)
    ids, lengths, labels, total = chunk.inputs
    inside = torch.arange(ids.shape[1])[None] < lengths[:, None]
    hidden = made.model.backbone(input_ids=ids, attention_mask=inside.long()).last_hidden_state
    head = made.model.head
    words = head.scale * head.norm(torch.nn.functional.gelu(head.transform(hidden)))
    logits = torch.nn.functional.linear(words, table, head.decoder.bias)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
    torch.testing.assert_close(part, expected)
    torch.testing.assert_close(vectors[0], hidden[0, : lengths[0]].mean(0))
    made.save(tmp_path / "saved")
    stock = T5EncoderModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(stock.get_input_embeddings().weight, table)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_what_is_saved_gives_the_same_vectors_everywhere(bert: Path, tmp_path: Path, pooling: str) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    made = system(bert, pooling=pooling)
    step(made)
    made.module.eval()
    made.save(tmp_path / "saved")
    texts = [" ".join(text.replace(".", " ").split()[:10]) for text in TEXTS[:5]]
    expected = []
    for text in texts:
        ids = torch.from_numpy(made.tokenizer([text], side="passage").ids.astype(np.int64))[None]
        with torch.no_grad():
            expected.append(made.model(ids, torch.tensor([ids.shape[1]]), torch.full_like(ids, -100))[0][0])
    vectors = torch.stack(expected).numpy()
    stock = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert stock.max_seq_length == 64
    assert [type(module).__name__ for module in stock] == ["Transformer", "Pooling"]
    np.testing.assert_allclose(stock.encode(texts), vectors, atol=1e-5)
    ours = Encoder(tmp_path / "saved", EncoderOptions(dtype="float32", compile="never"), device="cpu")
    np.testing.assert_allclose(ours.encode(texts, side="passage"), vectors, atol=1e-5)
    AutoModel.from_pretrained(tmp_path / "saved")
    assert load_masked(tmp_path / "saved").config.attention_probs_dropout_prob == 0.1


def step(made: RipSystem, **loop: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """One step of the loop; the loss, and the gradients that the optimizer was given."""
    trainer = Trainer(made, LoopOptions(steps=4, lr=1e-3, warm_up=0.0, **loop), device=CPU, dtype=torch.float32)
    caught: dict[str, torch.Tensor] = {}
    before = trainer.stepper.step

    def catch(lr: float) -> float:
        caught.update({n: p.grad.clone() for n, p in trained(made.module).items() if p.grad is not None})
        return before(lr)

    trainer.stepper.step = catch  # type: ignore[method-assign]
    return trainer.step(0), caught


@pytest.mark.parametrize("objective", ["rip", "condenser", "mlm"])
def test_the_loops_gradients_are_those_of_the_whole_batch(bert: Path, monkeypatch: pytest.MonkeyPatch,
                                                          objective: str) -> None:  # fmt: skip
    monkeypatch.setitem(rip._CHUNK, "cpu", 100)
    made = system(bert, objective=objective, max_length=40)
    batch = made.batch(0, 0, 1)
    assert len(batch.chunks) > 2
    passed = [made.forward(chunk) for chunk in batch.chunks]
    order = torch.from_numpy(np.concatenate([chunk.rows for chunk in batch.chunks])).argsort()
    vectors = torch.cat([vectors for vectors, _ in passed])[order]
    masked = torch.stack([part for _, part in passed]).sum()
    loss = made.loss(vectors, batch) + masked
    loss.backward()
    expected = {name: p.grad for name, p in trained(made.module).items() if p.grad is not None}
    value, found = step(system(bert, objective=objective, max_length=40), grad_cache="on")
    assert value == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == expected.keys() == trained(made.module).keys() - unused(made)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3)


def unused(made: RipSystem) -> set[str]:
    return {name for name, p in trained(made.module).items() if p.grad is None}


def test_the_condensers_own_loss_reaches_early_layers_past_the_late_ones(tmp_path: Path) -> None:
    folder = add_mask(save_bert(tmp_path / "bert", layers=4, spread=0.2), f"w{VOCABULARY - 1}")
    made = system(folder, objective="condenser")
    model: MaskedBackbone = made.model
    [chunk, *_] = made.batch(0, 0, 1).chunks
    ids, lengths, labels, _ = chunk.inputs
    kept = []
    monkeypatch = pytest.MonkeyPatch()
    original = MaskedBackbone._masked_loss
    monkeypatch.setattr(MaskedBackbone, "_masked_loss",
                        lambda self, *given: kept.append(original(self, *given)) or kept[-1])  # fmt: skip
    seen = []
    handle = model.condenser[0].register_forward_hook(lambda module, given, output: seen.append(given[0]))
    _, total = model(ids, lengths, labels)
    handle.remove()
    monkeypatch.undo()
    late, own = kept
    torch.testing.assert_close(total, late + own)
    states = model.backbone(
        input_ids=ids, attention_mask=(torch.arange(ids.shape[1])[None] < lengths[:, None]).long(),
        output_hidden_states=True,
    ).hidden_states  # fmt: skip
    torch.testing.assert_close(seen[0], torch.cat([states[4][:, :1], states[2][:, 1:]], 1))
    own.backward()
    for layer in (*model.backbone.encoder.layer, *model.condenser):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters() if p.ndim > 1)


def test_training_lowers_the_loss_and_starts_the_same_each_time(bert: Path) -> None:
    none = Hooks(lambda: None, lambda *_: None, lambda: None, lambda *_: None, lambda _: None)
    curves = []
    for _ in range(2):
        made = system(bert, steps=8)
        trainer = Trainer(made, LoopOptions(steps=8, lr=3e-3), device=CPU, dtype=torch.float32)
        curves.append([line[1] for line in trainer.train(none).curve])
    assert curves[0] == curves[1]
    assert np.mean(curves[0][-2:]) < 0.9 * np.mean(curves[0][:2])


def test_prompts_alone_train_over_a_frozen_backbone(bert: Path, tmp_path: Path) -> None:
    made = system(bert, train="prompts", prompt_length=3)
    names = set(trained(made.module))
    assert {name.split(".")[0] for name in names} == {"prompt", "model"}
    assert all(name.startswith(("prompt.", "model.head.")) for name in names)
    before = {name: p.clone() for name, p in made.model.backbone.named_parameters()}
    _, gradients = step(made)
    assert gradients["prompt.embedding"].abs().sum() > 0
    for name, parameter in made.model.backbone.named_parameters():
        assert torch.equal(parameter, before[name])
    (tmp_path / "prompt").mkdir()
    made.save(tmp_path / "prompt")
    kept = load_prompt(tmp_path / "prompt")
    assert kept.query is kept.passage
    assert made.prompt is not None
    torch.testing.assert_close(kept.query, made.prompt.matrix())


def test_bfloat16_computes_nearly_the_same(bert: Path) -> None:
    made = system(bert)
    [chunk, *_] = made.batch(0, 0, 1).chunks
    vectors, part = made.forward(chunk)
    made.dtype = torch.bfloat16
    low, low_part = made.forward(chunk)
    assert low.dtype == torch.float32
    assert not torch.equal(low, vectors)
    assert float(torch.cosine_similarity(low, vectors).min()) > 0.99
    assert float(low_part) == pytest.approx(float(part), rel=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"mlm_probability": 0.0}, "mlm_probability=0.0"),
        ({"objective": "cocondenser"}, "objective='cocondenser' is not one of rip, condenser, mlm"),
        ({"objective": "condenser", "pooling": "mean"}, "pooling=cls"),
        ({"batch": 1}, "have no negatives"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**given)


def test_a_backbone_that_cannot_be_used_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than the 64 positions"):
        system(bert, max_length=65)
    with pytest.raises(InputError, match="cannot be shared by 8 workers"):
        system(bert).batch(0, 0, 8)
    assert replace(options(), seed=1) != options()


@pytest.mark.parametrize("kind", ["DistilBert", "Electra", "ModernBert", "MPNet"])
def test_heads_of_any_structure_run_at_the_masked_places_alone(tmp_path: Path, kind: str) -> None:
    import transformers

    add_mask(save_bert(tmp_path / "bert"), f"w{VOCABULARY - 1}")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    own = {"DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
           "Electra": {**shape, "embedding_size": 16}}.get(kind, shape)  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=4 + VOCABULARY, **own, pad_token_id=0, bos_token_id=2, cls_token_id=2, sep_token_id=3, eos_token_id=3
    )
    whole = getattr(transformers, f"{kind}ForMaskedLM")(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    whole.save_pretrained(tmp_path / "bert")  # in the place of the BERT, beside its tokenizer
    made = system(tmp_path / "bert")
    assert not made.model.fresh_head
    [chunk] = made.batch(0, 0, 1).chunks
    ids, lengths, labels, total = chunk.inputs
    sizes = []
    decoder = made.model.head.decoder
    handle = decoder.register_forward_hook(lambda module, given, output: sizes.append(given[0].shape[:-1]))
    _, part = made.forward(chunk)
    handle.remove()
    assert sizes == [(total,)]
    inside = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    logits = load_masked(tmp_path / "bert")(input_ids=ids, attention_mask=inside).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


def four_steps(bert: Path, rank: int, world: int, zero: int | None) -> dict[str, Any]:
    """The loss of the last of four steps, without dropout, and what the optimizer then holds."""
    made = system(bert)
    for module in made.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loop = LoopOptions(steps=6, lr=1e-3, zero=zero)
    trainer = Trainer(made, loop, device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(4)]
    return {"losses": torch.tensor(losses), **trainer.stepper.state()}


def work(rank: int, folder: str, bert: str, zero: int | None) -> None:
    import torch.distributed as dist

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rip.split_sentences = lambda text, _: [s.strip() for s in text.split(".") if s.strip()]
    found = four_steps(Path(bert), rank, 2, zero)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("zero", [None, 3])
def test_two_workers_are_one(bert: Path, tmp_path: Path, zero: int | None) -> None:
    """Each other's sentences as negatives, masked tokens counted over both, the tied table gathered where it is cut."""
    import torch.multiprocessing as processes

    processes.spawn(work, (str(tmp_path), str(bert), zero), nprocs=2)  # type: ignore[no-untyped-call]
    found, expected = torch.load(tmp_path / "found.pt"), four_steps(bert, 0, 1, None)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["losses"], expected["losses"], atol=1e-4, rtol=1e-4)
    for name in found:
        # The gradient of a key's bias is 0 but for rounding, which AdamW makes large.
        if name.startswith("weight.") and not name.endswith("key.bias"):
            torch.testing.assert_close(found[name], expected[name], atol=2e-4, rtol=1e-2)
