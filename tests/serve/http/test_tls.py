"""TLS of a server: a certificate and a key that fit answer HTTPS, and others are refused in one line."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import signal
import ssl
import threading
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from riptide.base.errors import InputError
from riptide.serve.http.guard import Tokens
from riptide.serve.http.tls import open_tls
from riptide.serve.one_process import run_server

ENCODING, FORM = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate for 127.0.0.1 and its key, and other files that do not fit it."""
    folder, key, now = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    plain, secret = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")
    contents = {
        "certificate": certificate.public_bytes(ENCODING),
        "key": key.private_bytes(ENCODING, FORM, plain),
        "other key": ec.generate_private_key(ec.SECP256R1()).private_bytes(ENCODING, FORM, plain),
        "key with a password": key.private_bytes(ENCODING, FORM, secret),
        "text": b"tides\n",
        "empty file": b"",
    }
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    return {name: str(folder / name) for name in (*contents, "missing file", ".")}


@pytest.mark.parametrize(
    ("certificate", "key", "expected"),
    [
        ("certificate", "other key", "found KEY VALUES MISMATCH: expected a certificate and its key in PEM form"),
        ("certificate", "key with a password", "the key has a password: expected one without"),
        ("text", "key", "found no PEM: expected a certificate and its key in PEM form"),
        ("certificate", "empty file", "found no PEM"),
        ("missing file", "key", "No such file or directory: expected a readable PEM file"),
        ("certificate", ".", "Is a directory: expected a readable PEM file"),
        ("certificate", None, "parameter tls_key is missing: TLS needs a certificate and its key"),
        (None, "key", "parameter tls_certificate is missing"),
    ],
)
def test_files_that_make_no_tls_are_refused(
    files: dict[str, str], certificate: str | None, key: str | None, expected: str
) -> None:
    with pytest.raises(InputError) as raised:
        open_tls(certificate and files[certificate], key and files[key])
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_server_with_a_certificate_answers_https(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    service, answers = SimpleNamespace(), list[Any]()

    async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] == "lifespan":
            await receive()
            service.on_live()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    def ask(address: str) -> None:
        try:
            trust = ssl.create_default_context(cafile=files["certificate"])
            with urllib.request.urlopen(address, timeout=60, context=trust) as answer:
                answers.extend([address.partition(":")[0], answer.read()])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("riptide.serve.app.build_app", lambda *arguments, **options: application)
    monkeypatch.setattr("riptide.serve.one_process.ReleaseChanges", lambda service: None)
    monkeypatch.setattr("riptide.serve.one_process.favour_event_loop", lambda: None)
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    threads = list[threading.Thread]()

    def announce(address: str) -> None:
        threads.append(threading.Thread(target=ask, args=(address,)))
        threads[0].start()

    try:
        tls = open_tls(files["certificate"], files["key"])
        asyncio.run(run_server(service, Tokens(), "127.0.0.1", 0, announce, tls=tls))  # type: ignore[arg-type]
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    threads[0].join()
    assert answers == ["https", b"https"]
    assert open_tls(None, None) is None
