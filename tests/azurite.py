"""Azurite, Microsoft's emulator of Azure Blob Storage: `make azurite` installs it by npm in .venv."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

ACCOUNT = "devstoreaccount1"  # the emulator's account; its key is the same on every machine and is published
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"  # of the REST API, for the one request that is made here
PROGRAM = Path(sys.prefix) / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def is_installed() -> bool:
    """Returns whether Azurite and Node.js are on this machine."""
    return PROGRAM.exists() and shutil.which("node") is not None


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """Runs Azurite in memory during the block; yields its port. folder: for its log."""
    options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
    command = ["node", str(PROGRAM), *options, "--blobHost", "127.0.0.1", "--blobPort", "0"]
    log = folder / "log"
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder)
    try:
        while not (address := re.search(r"listens on http://127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8"))):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.05)
        yield int(address[1])
    finally:
        process.kill()
        process.wait()


def variables(port: int) -> dict[str, str]:
    """Returns the environment variables of clients."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }


def create_container(port: int, name: str) -> None:
    """Creates a container, by the one request that obstore lacks, signed with the shared key."""
    date = formatdate(usegmt=True)
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{VERSION}\n{resource}"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {
        "x-ms-date": date,
        "x-ms-version": VERSION,
        "Content-Length": "0",
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
    }
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    response = connection.getresponse()
    assert response.status == 201, response.read()
