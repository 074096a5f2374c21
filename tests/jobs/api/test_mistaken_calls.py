"""Mistaken calls of the Python API raise riptide's own error, in one line, and no error of another library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import riptide
from riptide import InputError

TABLE: list[tuple[str, str]] = [
    ("riptide.Store(None)", "url: found None, expected a folder or s3://bucket/prefix"),
    ("riptide.Store(5)", "url: found 5, expected a folder or s3://bucket/prefix"),
    ("riptide.Store('x', verbos=True)", "Store: unknown parameter 'verbos'; did you mean 'verbose'?"),
    ("store.search('bm25', topk=3)", "search: unknown parameter 'topk'; the parameters are source, embeddings, index"),
    ("store.build_bm25(shard=1)", "build_bm25: unknown parameter shard; did you mean shards?"),
    ("store.queries(nam='x')", "queries: unknown parameter 'nam'; did you mean 'name'?"),
    ("store.queries().split('test', limt=3)", "split: unknown parameter 'limt'; did you mean 'limit'?"),
    ("store.remove(5)", "key=5: expected a text"),
    ("store.copy_to(5)", "to=5: expected a text"),
    ("corpus[5]", "a passage has a text as its id, got 5"),
    ("corpus.passages(['p1'])", "rows ['p1']: expected a list of row numbers; corpus[ID] reads a passage by its id"),
    ("corpus.passages(None)", "rows None: expected a list of row numbers"),
    ("corpus.passages(3)", "rows 3: expected a list of row numbers"),
    ("corpus.rows_of(None)", "texts: expected a list of texts, got NoneType"),
    ("corpus.rows_of('p1')", "texts 'p1': expected a list of texts, got one text; write [text]"),
    ("encoder.encode(None)", "texts: expected a list of texts, got NoneType"),
    ("encoder.encode('a text')", "texts 'a text': expected a list of texts, got one text; write [text]"),
    ("encoder.encode(['a'], side='left')", "side 'left': expected query or passage"),
    ("encoder.encode(['a'], sid='query')", "encode: unknown parameter 'sid'; did you mean 'side'?"),
    ("riptide.Encoder(None)", "model None: expected a Hugging Face name or a folder"),
    ("riptide.Encoder(model, device='gpu')", "device 'gpu': expected cpu, cuda or cuda:N"),
    ("riptide.Encoder(model).encode('a text')", "texts 'a text': expected a list of texts, got one text"),
    ("riptide.Reranker(None)", "model None: expected a Hugging Face name or a folder"),
    ("riptide.EncoderOptions(poling='mean')", "EncoderOptions: unknown parameter 'poling'; did you mean 'pooling'?"),
    ("riptide.Client(None)", "None: expected http://… or https://…"),
    (r"riptide.Client(token='abc\n')", "parameter token: expected printable ASCII characters"),
    ("riptide.Client(token='it’s')", "parameter token: expected printable ASCII characters"),
    ("riptide.Client('http://127.0.0.1:1').search('x', k={1j})", "Object of type complex is not JSON serializable"),
]


@pytest.mark.parametrize(("call", "message"), TABLE, ids=[call for call, _ in TABLE])
def test_a_mistaken_call_is_refused_in_one_line(
    shared: riptide.Store, model: str, documented: Callable[..., None], call: str, message: str
) -> None:
    names: dict[str, Any] = {"riptide": riptide, "store": shared, "model": model, "corpus": shared.corpus()}
    with pytest.raises(InputError) as error:
        eval(call, names | {"encoder": shared.embeddings().encoder()})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    documented("Python", f"`{call}`", str(error.value), 1)


def test_an_unknown_parameter_is_a_type_error_too(shared: riptide.Store) -> None:
    for call in (lambda: shared.search("bm25", topk=3), lambda: shared.build_bm25(topk=3)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unknown parameter"):
            call()


def test_the_column_to_name_is_told_once_in_words_of_python(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        riptide.Store(tmp_path / "s").import_corpus([{"id": "a"}])
    assert str(error.value).endswith("; name the column of the text by text=")
    assert str(error.value).count("name the column") == 1
