"""Reads files of judgements with the three columns of BEIR or the four columns of TREC."""

from __future__ import annotations

import re

import pyarrow as pa

from riptide.indexing.files import limits
from riptide.indexing.files.raw import FilePiece, Lines, no_rows_error, short_repr, split_tsv_line
from riptide.indexing.files.rows import BadRows, file_and_line, halve_text, parse_valid_rows, row_error, text_lines

QRELS_SCHEMA = pa.schema(
    [("query_id", pa.string()), ("corpus_id", pa.string()), ("score", pa.int32()), ("line", pa.int64())]
)
HEADER = ["query-id", "corpus-id", "score"]
LINES_AT_ONCE = 65_536
MAX_GRADE = 100_000  # trec_eval's time and memory for a query grow with its largest grade
GRADE = f"an integer from {-MAX_GRADE:,} to {MAX_GRADE:,}"


def read_qrels(file: str, bad_rows: BadRows | None = None) -> pa.Table:
    """Reads a file of judgements into a table of QRELS_SCHEMA, whose column `line` has 1-based line numbers.

    Args:
        file: BEIR's three columns (with their header, quoted as by Python's csv module) or TREC's four (query, ignored,
            passage, grade; separated by tabs or spaces), .gz or not.
        bad_rows: Receives the bad lines, which are left out; None: they are refused.

    Raises:
        InputError: With file and line, for bad lines. If the file cannot be read, or has no judgements.
    """
    lines = Lines(file)
    num_fields = 0

    def parse(piece: FilePiece) -> pa.Table:
        nonlocal num_fields
        query_ids, corpus_ids, scores, numbers = [], [], [], []
        for line, row in text_lines(piece):
            delimiter = "\t" if "\t" in row else " "
            if len(row) > limits.MAX_COLUMNS:
                limits.check_columns(file_and_line(piece, line), row, delimiter)
            if delimiter == " ":
                fields = [field for field in row.split(" ") if field]
            else:
                fields = split_tsv_line(file_and_line(piece, line), row) if '"' in row else row.split("\t")
            if line == 1 and fields == HEADER:
                num_fields = len(fields)
                continue
            if len(fields) not in ((num_fields,) if num_fields else (3, 4)):
                expected = str(num_fields or "3 (BEIR) or 4 (TREC)")
                raise row_error(piece, line, f"{len(fields)} columns ({short_repr(row)})", expected, "fix the line")
            if not fields[0] or not fields[-2]:
                raise row_error(
                    piece, line, f"an empty id ({short_repr(row)})", "a query and a passage id", "fix the line"
                )
            if not re.fullmatch(r"-?[0-9]{1,9}", fields[-1]) or abs(int(fields[-1])) > MAX_GRADE:
                expected = GRADE if line > 1 else f"{GRADE}, or the header query-id<TAB>corpus-id<TAB>score"
                raise row_error(piece, line, f"score {short_repr(fields[-1])}", expected, "fix the line")
            num_fields = len(fields)  # the first valid line determines it for all lines
            query_ids.append(fields[0])
            corpus_ids.append(fields[-2])
            scores.append(int(fields[-1]))
            numbers.append(line)
        return pa.table([query_ids, corpus_ids, scores, numbers], schema=QRELS_SCHEMA)

    tables, bad = [QRELS_SCHEMA.empty_table()], BadRows()
    while piece := lines.take(LINES_AT_ONCE):
        tables += parse_valid_rows(piece, parse, halve_text, bad)
    qrels = pa.concat_tables(tables).combine_chunks()
    if bad_rows is None:
        bad.refuse()
    else:
        bad_rows.extend(bad.facts())
    if not len(qrels) and not bad.count:
        raise no_rows_error(file)
    return qrels
