"""csv-spectrum: the fields of each CSV file are those of its JSON form; a stray quote is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_suites import load_suite, parse_source, refusal

from riptide.indexing.files.columns import PassageNames
from riptide.indexing.formats.sources import detect_source

FILES = load_suite("csv_spectrum")
STRAY_QUOTE = "location_coordinates"  # 37°36'37.8"N, without quotes around the field; its JSON form has other digits


@pytest.mark.parametrize("name", sorted(FILES.keys() - {STRAY_QUOTE}))
def test_fields_are_those_of_the_json_form(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    file = tmp_path / "file.csv"
    file.write_bytes(content.encode("latin-1"))
    text, *others = expected[0]
    source = detect_source(str(file), names=PassageNames(text=text, metadata=tuple(others)))
    rows = parse_source(source, rows_per_chunk=1).to_pylist()
    fields = [{text: row["text"], **dict.fromkeys(others, ""), **json.loads(row["metadata"] or "{}")} for row in rows]
    assert fields == expected


def test_a_stray_quote_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    file.write_bytes(FILES[STRAY_QUOTE][0].encode("latin-1"))
    assert f"{file}:2: found a quote within a field" in str(refusal(detect_source, str(file)))
