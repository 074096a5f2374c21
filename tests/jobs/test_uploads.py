"""Uploads of prompts: changed fields are refused with short messages, and the checks do not hold up other changes."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crash_points import failing_calls
from fastapi.testclient import TestClient
from local_cluster import LONG
from serving import OPTIONS, computed_prompt, task_files, upload
from topic_prompts import random_saved_topics

from riptide.base.wording import MAX_MESSAGE
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.encoding.encoder import describe
from riptide.retriever.prompts.task_prompt import SETTINGS, TaskPrompt, backbone_of, load_prompt
from riptide.serve.http import routes
from riptide.serve.one_process import GRACE
from riptide.serve.service import prompt_uploads
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.uploads import UPLOAD_S, PromptUploads
from riptide.serve.service_errors import UploadExpiredError

CALLS = ("fsync", "link", "replace", "mkdir", "unlink")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR)
MAX_RESPONSE = 4 * MAX_MESSAGE  # bytes; a character of a message takes up to three


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, served: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path_factory.mktemp("uploads") / "root"))


@pytest.fixture
def store(root: Path) -> Store:
    return Store(str(root / "store"))


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each field and each item of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from fields_of(inner, (*path, key))


HUGE = "10" * 154  # 308 digits, the longest integer that is read
# JSON texts that take the place of a field's value.
VALUES = [
    r'"\ud800"',
    r'"\udfff\ud800"',
    r'["\ud83d"]',
    r'{"\ud800": 1}',
    '"\x00"'.replace("\x00", r"\u0000"),
    "1" + "0" * 400,
    "-1" + "0" * 400,
    HUGE,
    f"-{HUGE}",
    "1e400",
    "-1e400",
    "1e308",
    "NaN",
    "Infinity",
    "-Infinity",
    str(2**63),
    str(2**64),
    str(-(2**63) - 1),
    "-1",
    "0",
    "0.5",
    "1e-400",
    "true",
    "null",
    '""',
    "[]",
    "{}",
    "[[[]]]",
    '"' + "x" * 100_000 + '"',
    '{"' + "y" * 100_000 + '": 1}',
    "[" + "7," * 10_000 + "7]",
    "[" * 70 + "]" * 70,
    '"\u202e\U0010ffff"',
    "nul",
    "",
]


def mutants(settings: dict[str, Any], draw: random.Random | None = None) -> Iterator[tuple[str, bytes]]:
    """Yields changed settings with their names: each field with each value, renamed fields, and more fields.

    Args:
        settings: The content of prompt.json.
        draw: With it, each field is changed twice, to values that are drawn.
    """
    for path in fields_of(settings):
        for text in draw.sample(VALUES, 2) if draw else VALUES:
            changed = json.loads(json.dumps(settings))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = "REPLACED"
            name = f"{'.'.join(map(str, path))}={text[:40]}"
            yield name, json.dumps(changed).replace('"REPLACED"', text, 1).encode()
    for name in (r"\ud800", "z" * 100_000, "NaN"):
        yield f"more {name[:20]}", f'{json.dumps(settings)[:-1]}, "{name}": 1}}'.encode()


def prompts_of(model: str) -> dict[str, TaskPrompt]:
    """Returns a fixed prompt, one that is computed from each query, and one with topics."""
    backbone = backbone_of(describe(model, OPTIONS))
    topics = TaskPrompt(backbone, OPTIONS, None, None, topics=random_saved_topics())
    return {"computed": computed_prompt(model, 1), "topics": topics}


@pytest.mark.parametrize("kind", ["fixed", "computed", "topics"])
def test_no_changed_field_fails_the_server_and_messages_are_short(
    client: TestClient, model: str, tmp_path: Path, kind: str
) -> None:
    files = task_files(tmp_path, model, 1) if kind == "fixed" else upload(tmp_path, prompts_of(model)[kind])
    settings = json.loads(files["settings"][1])
    refused = 0
    for name, content in mutants(settings, None if LONG else random.Random(3)):
        answer = client.put("/v1/tasks/mutant", files={**files, "settings": (SETTINGS, content)})
        assert answer.status_code in (200, 400), (name, answer.status_code, answer.text[:300])
        assert len(answer.content) <= MAX_RESPONSE, name
        refused += answer.status_code == 400
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
    assert refused > 20


def test_long_and_broken_names_of_tensors_are_cut_in_messages(
    client: TestClient, model: str, tmp_path: Path, documented: Callable[..., None]
) -> None:
    files = task_files(tmp_path, model, 1)
    for name in ("n" * (200 << 10), "\\ud800"):
        header = f'{{"{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'.encode()
        weights = len(header).to_bytes(8, "little") + header
        (tmp_path / "w").write_bytes(weights)
        settings = json.loads(files["settings"][1]) | {"sha256": prompt_uploads.file_sha256(tmp_path / "w")}
        answer = client.put(
            "/v1/tasks/long",
            files={"prompt": ("w", weights), "settings": (SETTINGS, json.dumps(settings))},
        )
        assert answer.status_code == 400
        assert len(answer.content) <= MAX_RESPONSE
        if name.startswith("n"):
            message = answer.json()["error"]["message"]
            documented("HTTP", "a prompt with a tensor name of 200 KiB", message, 400)


DIGEST = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("backbone", "model_type"), "/var/lib/x", "(model_type /var/lib/x instead of bert differ)"),
        (("backbone", "model_type"), DIGEST, f"(model_type {DIGEST} instead of bert differ)"),
        (("/var/lib/x",), 1, "prompt.json: /var/lib/x: unknown field"),
        (("options", "query_prefix"), "s3://b/", "query_prefix 's3://b/' instead of ''"),
        (("options", "query_prefix"), DIGEST, f"query_prefix '{DIGEST}' instead of ''"),
        (("options", "pooling"), "~/x", "prompt.json: options.pooling '~/x': expected one of cls, mean, last, splade"),
        (("sides", "query", "tensor"), "/x", 'prompt.json: sides.query.tensor: expected query or both, got "/x"'),
        (("options", "query_length"), 9_999, "prompt.json: options.query_length 9999: more than the 64 positions"),
        (("options", "dimension"), 99, "prompt.json: options.dimension 99: more than the 32 that the backbone makes"),
        (
            ("position_offset",),
            True,
            "prompt.json: position_offset: parameter query_length 64 and a prompt of 3 tokens",
        ),
    ],
)
def test_the_client_reads_the_field_and_the_value_that_it_sent(
    client: TestClient,
    model: str,
    tmp_path: Path,
    path: tuple[str, ...],
    value: object,
    expected: str,
    documented: Callable[..., None],
) -> None:
    files = task_files(tmp_path, model, 1)
    settings = json.loads(files["settings"][1])
    inner = settings
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    answer = client.put(f"/v1/tasks/{DIGEST}", files={**files, "settings": (SETTINGS, json.dumps(settings))})
    message = answer.json()["error"]["message"]
    assert expected in message
    shown = "a value like a fingerprint" if value == DIGEST else json.dumps(value)
    documented("HTTP", f"a prompt with {'.'.join(path)}: {shown} in prompt.json", message, answer.status_code)


def test_a_task_whose_name_looks_like_a_fingerprint_is_refused_with_the_reason(
    client: TestClient, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riptide.retriever.encoding.encoder_tasks.free_memory", lambda device: 1000)
    answer = client.put(f"/v1/tasks/{DIGEST}", files=task_files(tmp_path, model, 1, 700))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"task {DIGEST}: with a prompt of 700 tokens the table of all")


def test_an_upload_is_answered_while_the_check_of_an_earlier_one_runs(
    client: TestClient, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first check begins, the second upload and a removal are answered, the first check ends: in this order."""
    began, go_on, events = threading.Event(), threading.Event(), []

    def load_slowly(folder: Path) -> TaskPrompt:
        prompt = load_prompt(folder)
        if prompt.query is not None and prompt.query.shape[3] == 5:
            began.set()
            assert go_on.wait(120)
            events.append("first checked")
        return prompt

    monkeypatch.setattr(prompt_uploads, "load_prompt", load_slowly)
    first, second = task_files(tmp_path / "1", model, 1, length=5), task_files(tmp_path / "2", model, 2)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(client.put, "/v1/tasks/slow", files=first)
        assert began.wait(60)
        try:
            assert threads.submit(client.put, "/v1/tasks/quick", files=second).result(30).status_code == 200
            events.append("second answered")
            assert threads.submit(client.delete, "/v1/tasks/quick").result(30).status_code == 200
        finally:
            go_on.set()
        assert slow.result(60).status_code == 200
    assert events == ["second answered", "first checked"]
    assert {task["name"] for task in client.get("/v1/tasks").json()["tasks"]} >= {"slow"}
    assert client.delete("/v1/tasks/slow").status_code == 200


@pytest.mark.parametrize(("call", "error"), [*zip(CALLS, ERRORS, strict=True)])
def test_an_upload_of_which_a_call_fails_changes_nothing_and_can_be_repeated(
    client: TestClient, store: Store, model: str, tmp_path: Path, call: str, error: int
) -> None:
    """The first, the middle and the last call; each of them in the long form."""

    def state() -> tuple[Any, Any, list[str]]:
        """Returns the live release, the tasks and the complete prompts."""
        return store.storage.read("serving/current.json"), client.get("/v1/tasks").json(), store.keys("prompts")

    folder = Path(store.url)
    files = task_files(tmp_path, model, 7)
    for name in ("first", "counted"):  # the first one makes folders too
        with failing_calls(folder, call, -1, error) as counter:
            assert client.put(f"/v1/tasks/{name}", files=files).status_code == 200
    count = counter.count
    assert count > 0
    for number in range(count) if LONG else sorted({0, count // 2, count - 1}):
        before, name = state(), f"{call}-{number}"
        with failing_calls(folder, call, number, error) as counter:
            answer = client.put(f"/v1/tasks/{name}", files=files)
        assert counter.count > number
        assert answer.status_code in (200, 503), (number, answer.text)
        if answer.status_code == 503:
            after = state()
            assert after[:2] == before[:2], number
            assert str(folder) not in answer.json()["error"]["message"]
            assert client.put(f"/v1/tasks/{name}", files=files).status_code == 200, number
        assert client.post("/v1/search", json={"task": name, "queries": ["word"]}).status_code == 200, number
        assert [finding.problem for finding in verify(store) if finding.problem] == [], number


def test_uploads_beyond_the_limit_and_late_ones_are_told_to_come_again(
    client: TestClient, changes: ReleaseChanges, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = task_files(tmp_path, model, 1)
    with monkeypatch.context() as full:
        full.setattr(changes.uploads, "_slots", threading.Semaphore(0))
        answer = client.put("/v1/tasks/more", files=files)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    with monkeypatch.context() as late:
        late.setattr("riptide.serve.service.uploads.UPLOAD_S", 0)
        answer = client.put("/v1/tasks/more", files=files)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "the prompt was not checked within 0 s; try again later"
    assert client.put("/v1/tasks/more", files=files).status_code == 200
    assert client.delete("/v1/tasks/more").status_code == 200


def test_an_upload_that_nobody_waits_for_leaves_no_files_and_one_that_did_not_begin_never_runs(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checks run until the event loop is closed, and a third one expires before."""
    began, go_on, folders = threading.Semaphore(0), threading.Event(), []

    def check(deadline: float) -> prompt_uploads.CheckedPrompt:
        began.release()
        assert go_on.wait(60)
        files = TemporaryFolder("task")
        folders.append(files.path)
        return prompt_uploads.CheckedPrompt(None, files, None, None)  # type: ignore[arg-type]

    async def upload(uploads: PromptUploads) -> None:
        async with uploads.check(check):
            pass

    async def run() -> PromptUploads:
        uploads = PromptUploads()
        running = [asyncio.create_task(upload(uploads)) for _ in range(2)]
        for _ in running:
            assert await asyncio.to_thread(began.acquire, timeout=60)
        monkeypatch.setattr("riptide.serve.service.uploads.UPLOAD_S", 0)
        with pytest.raises(UploadExpiredError):
            await upload(uploads)
        assert uploads._slots._value == 6  # type: ignore[attr-defined]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return uploads

    uploads = asyncio.run(run())
    go_on.set()
    uploads._threads.shutdown()
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    assert uploads._slots._value == 8  # type: ignore[attr-defined]
    assert UPLOAD_S < GRACE


@pytest.mark.parametrize("name", ["x" * 4_000, "x" * 1_000_000])
def test_the_name_of_an_index_is_short(client: TestClient, model: str, tmp_path: Path, name: str) -> None:
    answer = client.put("/v1/tasks/other", files=task_files(tmp_path, model, 1), data={"index": name})
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) < 200


def test_the_time_of_a_request_begins_when_its_body_is_complete(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body that is parsed a minute later is answered at once."""
    times = iter([time.monotonic() - 60])
    monkeypatch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: next(times, time.monotonic())))
    answer = client.post(
        "/v1/search", content=b'{"query":"a"' + b" " * routes.SMALL + b"}", headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 503


@pytest.mark.parametrize(
    ("case", "content_type"),
    [
        ("a prompt as another form than multipart/form-data", "application/x-www-form-urlencoded"),
        ("a prompt as a form with a charset", "multipart/form-data; boundary=b; charset=undefined"),
    ],
)
def test_other_forms_than_multipart_in_utf_8_are_refused(
    client: TestClient, documented: Callable[..., None], case: str, content_type: str
) -> None:
    content = b'--b\r\nContent-Disposition: form-data; name="index"\r\n\r\na\r\n--b--\r\n'
    answer = client.put("/v1/tasks/other", content=content, headers={"Content-Type": content_type})
    documented("HTTP", case, answer.json()["error"]["message"], answer.status_code)
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("boundary", "parameters"),
    [("b", "boundary=b; charset=UTF-8"), ("b", 'charset="utf-8"; boundary=b'), ("charset=b", "boundary=charset=b")],
)
def test_a_form_that_names_utf_8_is_read(client: TestClient, boundary: str, parameters: str) -> None:
    content = f'--{boundary}\r\nContent-Disposition: form-data; name="index"\r\n\r\né\r\n--{boundary}--\r\n'.encode()
    headers = {"Content-Type": f"multipart/form-data; {parameters}"}
    message = client.put("/v1/tasks/other", content=content, headers=headers).json()["error"]["message"]
    assert "prompt" in message, "the form is read, and lacks the files"


def test_an_upload_that_the_memory_does_not_suffice_to_check_is_refused(
    client: TestClient, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documented: Callable[..., None]
) -> None:
    files = task_files(tmp_path, model, 1)
    monkeypatch.setattr(prompt_uploads, "free_memory", lambda: 100 << 20)
    answer = client.put("/v1/tasks/large", files=files)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    documented("HTTP", "a prompt whose check needs more memory than is free", answer.json()["error"]["message"], 503)
