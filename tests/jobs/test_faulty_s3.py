"""Jobs on an S3 that throttles, loses answers, repeats conflicts, or ignores conditions."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_s3 import FaultyS3, faulty_s3
from job_outcome import Outcome
from local_cluster import LONG
from samples import make_passages, stored_bytes, write_beir

from riptide.base.errors import StorageError
from riptide.indexing.storage import remote
from riptide.indexing.store.store import Store

Done = Callable[..., str]


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    with faulty_s3(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        yield proxy


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "raw", make_passages(60))


def test_an_import_goes_through_a_server_that_throttles_and_loses_answers(
    proxy: FaultyS3, bucket: str, source: Path, done: Done
) -> None:
    """A fifth of the requests gets SlowDown, and a twentieth no answer: the bytes are those of an undisturbed run."""
    command = ("import_corpus", "--source", source, "--part-size", 20, "--store")
    proxy.slow_down, proxy.lost = 0.2, 0.05
    done(*command, f"{bucket}/faulty")
    assert proxy.faults > 3
    proxy.slow_down = proxy.lost = 0
    done(*command, f"{bucket}/sound")
    assert stored_bytes(f"{bucket}/faulty") == stored_bytes(f"{bucket}/sound")


def test_encoding_bm25_and_a_list_go_through_a_server_that_throttles(
    proxy: FaultyS3, bucket: str, source: Path, model: str, done: Done
) -> None:
    store = ("--store", f"{bucket}/s")
    done("import_corpus", *store, "--source", source)
    encode = ("encode_corpus", *store, "--encoder", model, "--name", "enc", "--allow-unknown-tokens", "--cpus", 1)
    proxy.slow_down_every = 30
    for command in (encode, ("build_bm25", *store), ("store", "list", *store)):
        before, proxy.requests = proxy.faults, 20  # the tenth request of each job gets SlowDown
        printed = done(*command)
        assert proxy.faults > before, command
    proxy.slow_down_every = 0
    assert done("store", "list", *store) == printed
    assert {"embeddings/enc/g0000", "bm25/bm25/g0000"} <= {line.split()[0] for line in printed.splitlines()}
    done("verify", *store)


def test_the_last_line_of_a_job_names_a_slow_store(
    proxy: FaultyS3, bucket: str, source: Path, model: str, done: Done, capsys: Any, call_job: Any
) -> None:
    """Of an encoding of few passages, most of the time goes to an S3 whose answers are 200 ms late."""
    store = ("--store", f"{bucket}/slow")
    done("import_corpus", *store, "--source", source, "--part-size", 10)
    proxy.delay_s = 0.2
    encode = ("encode_corpus", *store, "--encoder", model, "--name", "enc", "--allow-unknown-tokens", "--cpus", 1)
    assert call_job(*encode, "--compile", "never") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    shares = {name: int(share) for name, share in re.findall(r"([\w ]+) (\d+)%", last.partition(":")[2])}
    assert last.startswith("spent ")
    assert shares[" S3 reads"] + shares[" S3 writes"] + shares[" S3 commits"] > 50, last
    assert max(shares, key=lambda name: shares[name]).startswith(" S3"), last


def test_conditional_writes_are_tested_once_per_process_and_bucket(
    proxy: FaultyS3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a store that has data: its server may have been replaced by one that ignores conditions."""
    monkeypatch.setattr(remote, "PROBED", set())
    Store(f"{bucket}/s").storage.put("kept", b"")
    counts = []
    for name in ("s", "other", "s"):
        proxy.requests = 0
        Store(f"{bucket}/{name}").storage.require_conditional_writes()
        counts.append(proxy.requests)
    assert counts == [4, 0, 0]
    remote.PROBED.clear()
    proxy.ignores_conditions = True
    store = Store(f"{bucket}/s")
    with pytest.raises(StorageError, match="its server ignores the conditions If-None-Match and If-Match"):
        store.create("runs", "new")
    assert list(store.storage.list("")) == [("kept", 0)]
    store.storage.put(".tmp/probe-of-a-killed-process", b"")
    assert store.storage.abandoned_writes(-60) == [(".tmp/probe-of-a-killed-process", 0)]


@pytest.mark.parametrize(
    ("case", "fault", "expected"),
    [
        ("S3 that always throttles", {"slow_down": 1.0}, "SlowDown"),
        (
            "S3 that answers every conditional write with 409",
            {"refusal": (409, "ConditionalRequestConflict")},
            "answers 3 attempts to write it with 409",
        ),
        (
            "S3 that does not implement conditional writes",
            {"refusal": (501, "NotImplemented")},
            "or a server that implements conditional writes (If-None-Match, If-Match)",
        ),
        ("S3 that ignores conditional writes", {"ignores_conditions": True}, "ignores the conditions If-None-Match"),
    ],
)
def test_what_lasts_is_one_line(
    proxy: FaultyS3,
    bucket: str,
    source: Path,
    refused: Done,
    documented: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    fault: dict[str, object],
    expected: str,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    vars(proxy).update(fault)
    line = refused("import_corpus", "--store", f"{bucket}/s", "--source", source)
    assert expected in line
    documented("Storage", case, line.replace(bucket.removeprefix("s3://"), "BUCKET"), 1)
    proxy.slow_down, proxy.refusal = 0, None
    assert Store(f"{bucket}/s").storage.is_empty()


def test_an_answer_whose_body_is_cut_is_requested_again(
    proxy: FaultyS3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Store(f"{bucket}/s").storage
    storage.put("a", b"vectors" * 9)
    for read in (storage.read, storage.read_tagged, lambda key: storage.read_range(key, 1, 8)):
        sound = read("a")
        proxy.requests, proxy.fault = 0, (1, "cut")
        assert read("a") == sound
        assert proxy.requests == 2
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    proxy.requests = 0
    with pytest.raises(StorageError, match=r"^s3://[^\n]*$"):
        storage.read("a")


@contextlib.contextmanager
def failing_request(proxy: FaultyS3, number: int, fault: str) -> Iterator[list[str]]:
    """Within it, a request fails: as in `FaultyS3.fault`, or by a timeout, of the requests through boto3.

    Yields the addresses of the requests through boto3.
    """
    import boto3
    from botocore.exceptions import ReadTimeoutError

    requests: list[str] = []

    def time_out(request: Any, **_: Any) -> None:
        requests.append(request.url)
        if fault == "timeout" and len(requests) == number:
            proxy.faults += 1
            raise ReadTimeoutError(endpoint_url=request.url)

    def client(*arguments: Any, **options: Any) -> Any:
        boto_client = original(*arguments, **options)
        boto_client.meta.events.register("before-send.s3", time_out)
        return boto_client

    original = boto3.client
    proxy.requests, proxy.faults, proxy.fault = 0, 0, (number, fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boto3, "client", client)
        yield requests
    proxy.fault = None


def test_an_import_of_which_a_request_fails_is_completed_by_the_same_command(
    proxy: FaultyS3,
    bucket: str,
    tmp_path: Path,
    done: Done,
    job: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of a seeded sample fails in each way, each request in the long form.

    Half of the commands may not repeat a request; none of the others fails.
    """
    command = ("import_corpus", "--source", write_beir(tmp_path / "raw", make_passages(4)), "--store")
    Store(bucket).storage.require_conditional_writes()  # once per process
    with failing_request(proxy, 0, "") as by_boto:
        done(*command, f"{bucket}/sound")
    count, expected = proxy.requests, manifests_and_parts(f"{bucket}/sound")
    outcomes: Counter[str] = Counter()
    for kind, fault in enumerate(("500", "503", "timeout", "cut", "lost")):
        numbers = range(1, (len(by_boto) if fault == "timeout" else count) + 1)
        for place, number in enumerate(numbers if LONG else random.Random(fault).sample(numbers, 2)):
            store = f"{bucket}/{fault}-{number}"
            attempts = (1, 3)[(place + kind) % 2]
            monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(attempts))
            with failing_request(proxy, number, fault):
                outcome = job(*command, store)
            if outcome.status:
                assert (outcome.status, outcome.err.count("\n"), attempts) == (1, 1, 1), (fault, number, outcome)
                assert outcome.err.startswith("error: "), (fault, number, outcome)
            outcomes["not met" if not proxy.faults else f"{attempts} attempts: status {outcome.status}"] += 1
            done(*command, store)
            assert manifests_and_parts(store) == expected, (fault, number)
    print(f"{count} requests, {len(by_boto)} through boto3: {dict(outcomes)}")


def manifests_and_parts(url: str) -> dict[str, bytes]:
    """Returns the bytes of the manifests and parts of a store, without drafts and records, which count attempts."""
    return {
        key: data
        for key, data in stored_bytes(url).items()
        if not key.endswith(".json") or key.endswith("/manifest.json")
    }
