"""What a server gives its page: its files with their headers, the stop words, and examples of queries."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from ready_client import serving
from serving import query_texts

from riptide.base.errors import InputError
from riptide.indexing.lucene.stop_words import STOP_WORDS
from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.service.example_queries import read_examples
from riptide.serve.service.service_options import ServiceOptions

PAGE = Path(__file__).parents[2] / "serve" / "page"


@pytest.fixture
def store(tmp_path: Path, served: Path) -> Store:
    shutil.copytree(served / "store", tmp_path / "store")
    return Store(str(tmp_path / "store"))


def test_the_page_loads_and_sends_nothing_elsewhere(client: TestClient) -> None:
    files = [file.name for file in PAGE.iterdir()]
    assert {"index.html", "page.js", "style.css"} <= set(files)
    for path in ("/", *(f"/page/{name}" for name in files)):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("img-src") == "data:"
        assert set(policy.values()) == {"'none'", "'self'"}
        assert (policy["default-src"], answer.headers["referrer-policy"]) == ("'none'", "no-referrer")
        assert not re.search(r"https?:|innerHTML|insertAdjacentHTML|document\.write|eval\(| style=", answer.text)
    assert re.search("javascript", client.get("/page/page.js").headers["content-type"])  # a module needs this type
    assert "content-security-policy" not in client.get("/v1/info").headers


def test_what_the_page_shows_first(store: Store, served: Path, tmp_path: Path) -> None:
    file = tmp_path / "examples.txt"
    file.write_text("\ufefftides\n\n  rip currents \ntides\n", encoding="utf-8")
    texts = list(query_texts(served).values())
    spread = [texts[number * len(texts) // 6] for number in range(6)]
    for examples, expected in ((None, []), (str(file), ["tides", "rip currents"]), ("queries/tiny", spread)):
        texts = read_examples(store, examples)
        service = open_local(store, ServiceOptions(threads=2), device="cpu", examples=texts)
        with serving(service) as client:
            info = client.get("/v1/info").json()
            assert info["examples"] == expected
            assert info["stop_words"] == sorted(STOP_WORDS)
            assert 0 <= info["filter_cache"]["bytes"] <= info["filter_cache"]["max_bytes"] == 256 << 20
            assert info["prompt_bytes"] > 0  # the empty table
    schema = client.get("/openapi.json").json()["components"]["schemas"]["InfoResponse"]["properties"]
    assert schema.keys() == info.keys()


def test_replicas_need_no_file_of_examples(store: Store, tmp_path: Path) -> None:
    from riptide.serve.deployments import Application, build

    file = tmp_path / "examples.txt"
    file.write_text("tides\n", encoding="utf-8")
    application = build(Application(store=store.url, without_tokens=True, examples=str(file)))
    assert application._bound_deployment.init_args[-1] == ["tides"]
    with pytest.raises(InputError, match="queries/none"):
        build({"store": store.url, "without_tokens": True, "examples": "queries/none"})


def test_examples_come_from_a_query_set_at_equal_distances(store: Store) -> None:
    assert len(set(read_examples(store, "queries/tiny"))) == 6
    assert read_examples(store, None) == []


@pytest.mark.parametrize(
    ("case", "content"),
    [
        ("a missing file", None),
        ("a file that is not UTF-8", b"caf\xe9\n"),
        ("an empty file", b"\n"),
        ("a file of too many queries", b"".join(b"query %d\n" % number for number in range(13))),
        ("a file with a long query", b"tides\n" + b"x" * 301),
        ("a large file", b"tides\n" * 20_000),
    ],
)
def test_bad_examples_end_the_job_before_it_makes_a_release(
    case: str,
    content: bytes | None,
    store: Store,
    tmp_path: Path,
    refused: Callable[..., str],
    documented: Callable[..., None],
) -> None:
    if content is not None:
        (tmp_path / "examples.txt").write_bytes(content)
    job = ("serve_search", "--store", store.url, "--renew", "--rerank", "none", "--examples")
    line = refused(*job, tmp_path / "examples.txt")
    assert "--examples" in line
    documented("Serving a store", f"--examples with {case}", line, 1)
    assert "queries/none" in refused(*job, "queries/none")
