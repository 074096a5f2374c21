"""A server of `store.serve`: another process, which answers, and which ends with the block or with this process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from riptide import Client, ServerError, Store, jobs
from riptide.base.errors import InputError

ROOT = Path(jobs.__file__).resolve().parents[1]


@pytest.fixture
def store(served: Path, tmp_path: Path) -> Store:
    shutil.copytree(served / "store", tmp_path / "store")
    return Store(str(tmp_path / "store"))


def is_answered(client: Client) -> bool:
    try:
        client.tasks()
    except ServerError:
        return False
    return True


def test_a_server_answers_within_the_block_and_has_ended_after_it(
    store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where an event loop runs, as in a notebook; in a thread, which may set no handler of a signal."""

    async def search() -> str:
        with store.serve(threads=1) as client:
            clients.append(client)
            return client.search("ba", k=3)[0].id

    def run() -> None:
        ids.append(asyncio.run(search()))

    clients: list[Client] = []
    ids: list[str] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(ids) == 1
    assert not is_answered(clients[0])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_an_error_in_the_block_ends_the_server(store: Store) -> None:
    def search() -> None:
        with store.serve() as client:
            clients.append(client)
            assert is_answered(client)
            raise KeyboardInterrupt

    clients: list[Client] = []
    with pytest.raises(KeyboardInterrupt):
        search()
    assert not is_answered(clients[0])


def test_tokens_of_the_environment_are_those_of_the_client(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIPTIDE_USER_TOKENS", "a-user-token-of-this-test")
    with store.serve() as client:
        assert is_answered(client)
        assert not is_answered(Client(client.url))


def test_a_server_that_does_not_start_gives_its_line(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, store.serve(index="none"):
        pass
    assert str(caught.value).startswith(f"{store.url} has a live release, ")
    assert str(caught.value).endswith("leave out what is to be in one, or add renew=")
    with pytest.raises(InputError, match=r"none: there is no store here; store\.import_corpus makes one$"):
        Store(str(tmp_path / "none")).serve().__enter__()
    for name, value in (("host", "0.0.0.0"), ("tokens", "f"), ("plan", True)):
        with pytest.raises(InputError, match=f"serve: unknown parameter {name}; "):
            store.serve(**{name: value}).__enter__()
    with pytest.raises(InputError, match=r"^port=70000: expected 0 to 65535$"):
        store.serve(70_000).__enter__()


PROGRAM = """
import sys, riptide
with riptide.Store(sys.argv[1]).serve() as client:
    print(client.url, flush=True)
    sys.stdin.read()
"""


def test_a_server_ends_with_a_program_that_is_killed(store: Store) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, store.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout is not None
    client = Client(process.stdout.readline().strip())
    assert is_answered(client)
    process.kill()
    process.communicate()
    while is_answered(client):
        time.sleep(0.05)
