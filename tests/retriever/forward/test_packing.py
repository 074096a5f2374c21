"""Texts end to end: the kernel against attention in float64, the layers against transformers' own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from exact_attention import exact_attention
from kernels import load_for, must_load
from transformers import AutoModel, CamembertConfig, ElectraConfig, XLMRobertaConfig

from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward import packing
from riptide.retriever.forward.batching import plan_packed
from riptide.retriever.forward.numerics import expected_numerics
from riptide.retriever.forward.packing import KernelPrompts, ThreadTeam, load_kernel
from riptide.retriever.forward.prompt_rows import PromptRows
from riptide.retriever.model.configuration import BERT_TYPES

Tiny = Callable[..., Path]
FLOAT32 = EncoderOptions(dtype="float32", compile="never")
KINDS = {"electra": ElectraConfig, "xlm-roberta": XLMRobertaConfig, "camembert": CamembertConfig}


@pytest.mark.skipif(not must_load(), reason="kernels run on Linux")
def test_the_kernel_is_loaded() -> None:
    """Without it texts are encoded with padding, and only a warning says so."""
    assert load_kernel() is not None


def attended(inward: torch.Tensor, lengths: list[int], heads: int, prompt: PromptRows | None = None) -> torch.Tensor:
    """What the kernel makes of queries, keys and values, [t, 3, heads, size]."""
    library = packing.load_kernel()
    assert library is not None
    out = torch.full((len(inward), inward[0, 0].numel()), -7, dtype=inward.dtype)
    texts = torch.tensor(lengths)
    prompts = KernelPrompts.from_rows(prompt, len(lengths))
    library.riptide_attend(
        inward.data_ptr(),
        int(inward.dtype == torch.bfloat16),
        len(lengths),
        texts.data_ptr(),
        heads,
        inward.shape[-1],
        *prompts.layer_arguments(0),
        out.data_ptr(),
    )
    return out


def test_the_bytes_are_those_of_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """For registers of any width. No tiles multiply heads of 20 numbers."""
    torch.manual_seed(0)
    lengths = [1, 7, 16, 17, 130]
    for dtype in (torch.float32, torch.bfloat16):
        inward = torch.randn(sum(lengths), 3, 3, 20).to(dtype)
        expected = attended(inward, lengths, 3)
        library = packing.declare(load_for("haswell", packing.SOURCE))
        with monkeypatch.context() as patch:
            patch.setattr(packing, "load_kernel", lambda library=library: library)
            assert torch.equal(attended(inward, lengths, 3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 32, 64, 20])
@pytest.mark.parametrize("prompted", [False, True])
def test_the_kernel_is_attention(dtype: torch.dtype, size: int, prompted: bool) -> None:
    torch.manual_seed(size)
    heads, lengths = 3, [1, 2, 7, 8, 9, 16, 17, 31, 130, 1, 33]
    inward = (2 * torch.randn(sum(lengths), 3, heads, size)).to(dtype)
    prompt = None
    if prompted:  # of three prompts, one is empty; numbers lie as a table of all tasks has them
        columns = torch.arange(5) < torch.tensor([5, 0, 2])[:, None]
        table = torch.randn(5, 1, 2, 3, heads, size).to(dtype).permute(1, 2, 3, 4, 0, 5)
        prompt = PromptRows(table, torch.arange(len(lengths)) % 3, columns)
    expected = exact_attention(inward, lengths, prompt)
    close = {torch.float32: 2e-5, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(attended(inward, lengths, heads, prompt).double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 24, 384])  # the second is no multiple of what the kernel takes
def test_a_sum_is_normalised_as_torch_does_it(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    norm = torch.nn.LayerNorm(width, eps=1e-5, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    values, added = torch.randn(2, 7, width, dtype=dtype) * 3 + 5
    exact = torch.nn.LayerNorm(width, eps=1e-5).double()
    exact.load_state_dict(norm.state_dict())
    expected = exact(values.double() + added.double())
    with torch.no_grad():
        found = packing._Norm(norm)(values.clone(), added)
    close = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 32])
def test_far_apart_and_broken_numbers(size: int, dtype: torch.dtype) -> None:
    """Weights that are all but one zero; what is not finite stays in its text."""
    inward = torch.zeros(6, 3, 1, size)
    inward[:3, 0], inward[:3, 1, 0, 0] = 100, torch.tensor([0.0, 90, -90])
    inward[:3, 2] = torch.tensor([1.0, 2, 3])[:, None, None]
    inward[4, 2, 0, 3] = float("nan")
    found = attended(inward.to(dtype), [3, 3], 1).float()
    torch.testing.assert_close(found[:3], torch.full((3, size), 2.0))
    assert torch.isnan(found[3:, 3]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_of_the_kind(tiny: Tiny, texts: list[str], kind: str) -> None:
    """Of the kinds that other tests do not open; ELECTRA with embeddings narrower than its layers."""
    folder = tiny("roberta" if kind != "electra" else "bert")
    vocabulary = AutoModel.from_pretrained(folder).config.vocab_size
    narrow = {"embedding_size": 16} if kind == "electra" else {}
    config = KINDS[kind](
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=42,
        initializer_range=0.5,
        pad_token_id=0,
        hidden_act="relu",
        **narrow,
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(folder)
    encoder = Encoder(str(folder), FLOAT32)
    assert " packed " in encoder.numerics
    tokens = encoder.tokenize(texts, side="query")
    found = encoder.encode(texts)
    for row, start in enumerate(tokens.starts):
        ids = torch.from_numpy(tokens.ids[start : start + tokens.lengths[row]].astype(np.int64))
        with torch.no_grad():
            hidden = model(input_ids=ids[None]).last_hidden_state[0]
        np.testing.assert_allclose(found[row], hidden.mean(0), atol=1e-5, rtol=1e-5)


def test_what_packs_and_what_does_not(tiny: Tiny, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert " packed " in Encoder(str(tiny("bert")), FLOAT32).numerics
    for kind in ("t5", "qwen3"):
        assert kind not in BERT_TYPES
        assert " eager " in Encoder(str(tiny(kind)), FLOAT32).numerics
    packed = Encoder(str(tiny("roberta")), FLOAT32).encode(texts)
    monkeypatch.setattr(packing, "load_kernel", lambda: None)  # as without a compiler
    padded = Encoder(str(tiny("roberta")), FLOAT32)
    assert padded.numerics == expected_numerics(FLOAT32, "cpu", "roberta")
    assert " eager " in padded.numerics
    np.testing.assert_allclose(padded.encode(texts), packed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_do_not_depend_on_threads(dtype: str) -> None:
    """Of widths and numbers of tokens at which several threads would share a product's sums."""
    options = replace(FLOAT32, dtype=dtype)  # type: ignore[arg-type]
    lists = [["what is a rip current ?"] * n for n in (1, 5, 40)] + [["word " * n for n in range(1, 300, 7)]]
    found = []
    for threads in (1, 2, 3):
        encoder = Encoder("all-MiniLM-L6-v2", options, threads=threads)
        assert encoder.numerics == expected_numerics(options, "cpu", "bert")
        found.append([encoder.encode(texts).tobytes() for texts in lists])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_fill_up_a_product_change_no_vector(
    tiny: Tiny, texts: list[str], dtype: Literal["float32", "bfloat16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [packing.round_rows(total) for total in (1, 16, 17, 256, 257, 288, 1025)] == [
        16,
        16,
        32,
        256,
        288,
        288,
        1056,
    ]
    folder = tiny("bert")
    found = Encoder(folder, options=EncoderOptions(dtype=dtype)).encode(texts)
    monkeypatch.setattr(packing, "round_rows", lambda total: total + 37)
    more = Encoder(folder, options=EncoderOptions(dtype=dtype)).encode(texts)
    monkeypatch.setattr(packing, "round_rows", lambda total: total)
    none = Encoder(folder, options=EncoderOptions(dtype=dtype)).encode(texts)
    np.testing.assert_allclose(found, none, atol=1e-6 if dtype == "float32" else 4e-3)
    np.testing.assert_allclose(found, more, atol=1e-6 if dtype == "float32" else 4e-3)


def test_lengths_of_all_kinds_meet_few_products() -> None:
    """Of up to 1,024 tokens and a text more there are some forty numbers of rows, not over a thousand."""
    assert len({packing.round_rows(total) for total in range(1, 1200)}) < 48


def test_batches_hold_every_row_once_and_leave_two_threads_work() -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 30, 5_000):
        lengths = random.integers(1, 512, count)
        batches = plan_packed(lengths, min_tokens=192)
        order = np.concatenate([np.empty(0, np.int64), *batches])
        assert sorted(order) == list(range(count))
        assert (np.diff(lengths[order]) <= 0).all()
        tokens = [int(lengths[rows].sum()) for rows in batches]
        assert all(total < 1024 + 512 for total in tokens)
    assert len(plan_packed(np.full(32, 15), min_tokens=192)) == 2
    assert len(plan_packed(np.full(8, 15), min_tokens=192)) == 1
    assert len(plan_packed(np.full(8, 15), min_tokens=32)) == 2


def test_a_thread_that_computes_alone_is_given_a_single_item() -> None:
    """Its vectors have the bytes of the team's, and other threads keep their number of threads."""
    encoder, team = Encoder("all-MiniLM-L6-v2", EncoderOptions(dtype="float32"), threads=2), ThreadTeam(2)
    texts = ["one", "a query of some more words than one"]

    def encode_each() -> tuple[set[int], list[bytes]]:
        met: set[int] = set()
        team.run(lambda _: met.add(threading.get_ident()), [0])
        return met, [encoder.encode([text]).tobytes() for text in texts]

    before = torch.get_num_threads()
    of_team, expected = encode_each()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(packing.compute_alone).result()
        of_thread, found = pool.submit(encode_each).result()
        assert of_thread == {pool.submit(threading.get_ident).result()}
    assert found == expected
    assert threading.get_ident() not in of_team
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == before


def test_without_a_further_thread_none_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def prepare() -> int:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            packing.compute_alone()
        return torch.get_num_threads()

    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(prepare).result() == before
    assert torch.get_num_threads() == before


def test_a_team_raises_what_was_raised_when_none_is_at_work() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("the second")
        done.append(number)

    with pytest.raises(ValueError, match="the second"):
        ThreadTeam(2).run(work, range(5))
    assert sorted(done) == [0, 2, 3, 4]


def test_a_text_that_spells_the_padding_token_has_the_positions_that_it_has_elsewhere(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the river bank", "the [PAD] river [PAD] [PAD] bank", "[PAD]"]
    for kind in ("roberta", "bert"):
        packed = Encoder(str(tiny(kind)), FLOAT32).encode(texts)
        with monkeypatch.context() as without:
            without.setattr(packing, "load_kernel", lambda: None)
            padded = Encoder(str(tiny(kind)), FLOAT32)
        np.testing.assert_allclose(packed, padded.encode(texts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths_of_another_type_and_processors_without_reordering(
    tiny: Tiny, texts: list[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    options = replace(FLOAT32, dtype=dtype, normalize=True)
    encoder = Encoder(str(tiny("bert")), options)
    tokens = encoder.tokenize(texts, side="query")
    found = encoder.forward(tokens)
    assert encoder.forward(replace(tokens, lengths=tokens.lengths.astype(np.int32))).tobytes() == found.tobytes()
    assert packing.PackedBackbone is type(encoder._run)
    assert {layer.widen.reordered for layer in encoder._run.layers.layers} == {packing.takes_reordered(encoder.dtype)}
    assert packing.takes_reordered(torch.float32) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(packing, "takes_reordered", lambda dtype: False)
    plain = Encoder(str(tiny("bert")), options).encode(texts)
    if dtype == "float32":
        np.testing.assert_allclose(plain, found, atol=1e-6)
    assert ((plain * found).sum(1) > 0.999).all()


def test_a_key_that_is_no_number_does_not_become_one() -> None:
    """Whatever its lowest bits are, with which a weight's exponent is made."""
    for bits in (0x7FC00000, 0x7FC00001, 0x7FC00080, 0x7FA12345):
        inward = torch.ones(2, 3, 1, 16)
        inward[1, 1] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert torch.isnan(attended(inward, [2], 1)).all(), hex(bits)
