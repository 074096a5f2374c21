"""Writes packages.csv: name, summary and classifiers of the Python packages that are installed here.

    python examples/own_data/make_packages.py

The rows depend on the environment. The file in the repository is that of the developers' environment, which its
judgements fit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

FILE = Path(__file__).with_name("packages.csv")
COLUMNS = ("package", "about", "topic", "licence", "status", "typed")
LICENCES = {  # the OSI's name or SPDX identifier -> a short name
    "MIT": "MIT",
    "Apache": "Apache",
    "BSD": "BSD",
    "Mozilla": "MPL",
    "MPL": "MPL",
    "Python Software": "PSF",
    "ISC": "ISC",
    "GNU": "GPL",
}


def rows() -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yields a row for each installed package with a summary, by name."""
    packages = {package.metadata["Name"].lower(): package.metadata for package in distributions()}
    for name, metadata in sorted(packages.items()):
        summary = " ".join((metadata.get("Summary") or "").split())
        if not summary or name == "riptide":
            continue
        classifiers = [tuple(text.split(" :: ")) for text in metadata.get_all("Classifier") or []]
        topics = [parts[1] for parts in classifiers if parts[0] == "Topic"]
        statuses = [parts[1][0] for parts in classifiers if parts[0] == "Development Status"]
        licences = [metadata.get("License-Expression") or "", *(p[-1] for p in classifiers if p[0] == "License")]
        licence = next((short for text in licences for word, short in LICENCES.items() if word in text), "")
        typed = str(("Typing", "Typed") in classifiers).lower()
        yield name, summary, (topics or [""])[0], licence, (statuses or [""])[0], typed


def main() -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())


if __name__ == "__main__":
    main()
