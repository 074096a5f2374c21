"""Texts: passages, queries, names and messages."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from linear_cost import Input
from tiny import WORDS, save_encoder

from riptide.base.unicode import normalize
from riptide.base.wording import LIBRARY, Parameter, cut_words, printable, shorten
from riptide.indexing.files.splitting import DocumentSplit, passage_spans
from riptide.indexing.judging.judging_pool import parse_measure
from riptide.indexing.measures.answers import answers_of, joined_tokens
from riptide.indexing.migration.requirements import Requirement
from riptide.indexing.search.snippets import QueryWords, snippet
from riptide.retriever.encoding.mteb_encoder import _INSTRUCTION
from riptide.retriever.topics.words import topic_words

PIECES = (*"a é.?!'’-_1 \n\t\r\0", "\u0301\u0323", "\u0344", "深", "ค", "한", "\u202e", "\u200d", "😀", "w1 ", "\u00a0")
SPLIT = DocumentSplit(words=100, overlap=10)


def alternating(n: int) -> str:
    """Marks of two classes in turn, which a normal form sorts."""
    return "a" + "\u0301\u0323" * n


TEXTS: dict[str, Any] = {
    "marks of two classes": alternating,
    "marks of one class": lambda n: "\u0301" * n,
    "marks that decompose": lambda n: "\u0344" * n,
    "jamo": lambda n: "\u11a8" * n,
    "letters": lambda n: "é" * n,
    "one word": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "apostrophes": lambda n: "a'" * n,
    "stops": lambda n: "a. " * n,
    "abbreviations": lambda n: "Mr. A.B. " * n,
    "han": lambda n: "深" * n,
    "empty lines": lambda n: "\n" * n,
    "quotes": lambda n: '"(a. ' * n,
}


@functools.cache
def tokenizer(kind: str) -> Any:
    from riptide.retriever.forward.batching import TextTokenizer
    from riptide.retriever.model.recipe import read_recipe
    from riptide.retriever.options import EncoderOptions

    with tempfile.TemporaryDirectory() as folder:
        options = EncoderOptions(passage_length=32)
        return TextTokenizer(read_recipe(save_encoder(Path(folder) / kind, kind), options), options)


def show(text: str) -> None:
    printable(text)
    shorten(text)
    cut_words(text)
    LIBRARY.render(f"{Parameter('name', text)}")
    LIBRARY.render(text)


def query_words(text: str) -> None:
    words = QueryWords(text)
    words.matches(text[:1000])


PLAIN = QueryWords("a w1 深")

INPUTS = [
    Input("text: normal form", lambda text: normalize("NFKC", text), TEXTS, PIECES, modules=("base.unicode",)),
    Input("text: words of topics", topic_words, TEXTS, PIECES, modules=("retriever.topics.words",)),
    Input("text: words of answers", joined_tokens, TEXTS, PIECES, modules=("indexing.measures.answers",)),
    Input(
        "text: passages of a document",
        lambda text: list(passage_spans(text, SPLIT)),
        TEXTS,
        PIECES,
        modules=("indexing.files.splitting",),
    ),
    Input("query: words", query_words, TEXTS, PIECES, modules=("indexing.search.snippets",)),
    Input("text: snippet", lambda text: snippet(text, PLAIN, 80), TEXTS, PIECES),
    *(
        Input(
            f"text: tokens of {kind}",
            lambda text, kind=kind: tokenizer(kind)([text], side="passage"),
            {**TEXTS, "words": lambda n: " ".join(WORDS) * n},
            PIECES,
            max_bytes=1 << 20,
        )
        for kind in ("bert", "roberta", "t5")
    ),
    Input(
        "message: a name that it quotes",
        show,
        {
            "opened placeholders": lambda n: "\ue000" * n,
            "placeholders": lambda n: "\ue000[]\ue001" * n,
            "brackets": lambda n: "\ue000" + "[" * n + "\ue001",
            "one word": lambda n: "a" * n,
            "words of 219": lambda n: ("a" * 219 + "/") * n,
            "escapes": lambda n: "\x1b" * n,
        },
        ("\ue000", "\ue001", "[", '"parameter"', ",", "a", " ", "/", "\x1b", "\u202e", "a" * 300),
        modules=("base.wording",),
    ),
    Input(
        "query: instruction in front of it",
        _INSTRUCTION.match,
        {"instructions": lambda n: "Instruct: " * n, "queries": lambda n: "Instruct: a" + "\nQuery" * n},
        ("Instruct: ", "\nQuery: ", "a", "\n"),
        modules=("retriever.encoding.mteb_encoder",),
    ),
    Input(
        "requirement of a gate",
        Requirement.parse,
        {"signs": lambda n: "a>=" * n + " b", "spaces": lambda n: "a" + " " * n, "digits": lambda n: "a>=" + "1" * n},
        ("nDCG@10", "overlap@", "1", ">=", " ", "-", "0.5", "nan"),
        modules=("indexing.migration.requirements",),
    ),
    Input(
        "measure of judge",
        parse_measure,
        {"digits": lambda n: "DCG@" + "1" * n},
        ("DCG@", "P@", "1", "0", " "),
        modules=("indexing.judging.judging_pool",),
    ),
    Input(
        "metadata of a query: answers",
        answers_of,
        {"answers": lambda n: '{"answers":[' + '"a",' * n + '"b"]}'},
        ("a", "é", "\\u0301", " "),
        refusals=(ValueError,),
        frame=('{"answers":["', '"]}'),
    ),
]
