"""Files: tables of passages and queries, judgements, runs, documents, recipes, settings and results."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from linear_cost import Content, Input

from riptide.base.errors import InputError
from riptide.base.yaml_files import read_yaml
from riptide.indexing.files.columns import PassageNames
from riptide.indexing.files.markup import read_html, read_markdown
from riptide.indexing.files.qrels import read_qrels
from riptide.indexing.files.rows import BadRows
from riptide.indexing.files.titles import Titles
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus, read_queries
from riptide.indexing.formats.sources import describe_columns, detect_query_source, detect_source
from riptide.indexing.formats.text_folder import _parse_document
from riptide.indexing.judging.verdicts import read_verdicts
from riptide.indexing.search.run_files import read_run_file
from riptide.jobs.commands.command_line import read_options_file
from riptide.jobs.commands.steps import read_steps
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.experiments.arms import read_experiment
from riptide.jobs.experiments.results_file import read_results
from riptide.jobs.pictures.measured import read_points
from riptide.jobs.planning.sizes import CorpusSize
from riptide.jobs.replay import read_requests

Pattern = Callable[[int], Content]


def at(name: str) -> Callable[[Path, Content], Path]:
    """Returns a function that writes a content to the file with this name."""

    def write(folder: Path, content: Content) -> Path:
        path = folder / name
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
        return path

    return write


def read_corpus(format: str) -> Callable[[Path], None]:
    """Returns a function that reads the passages of a file, as they are and without the bad rows."""

    def read(file: Path) -> None:
        source = detect_source(str(file), format)
        describe_columns(source)
        names = () if source.columns is None else source.columns.table.names[2:]
        with contextlib.suppress(InputError):  # each column as metadata
            describe_columns(detect_source(str(file), format, PassageNames(metadata=tuple(names) or None)))
        for chunk in cut_into_chunks(source, 1000):
            parse_corpus(source.format, chunk, bad_rows=BadRows())
            parse_corpus(source.format, chunk)

    return read


def read_questions(format: str) -> Callable[[Path], None]:
    def read(file: Path) -> None:
        read_queries(detect_query_source(str(file), format), BadRows())

    return read


def rows(line: str, head: str = "") -> Pattern:
    return lambda n: head + "".join(line.replace("#", str(number)) for number in range(n))


def fields(n: int) -> str:
    return "".join(f',"c{number}":1' for number in range(n))


def parquet(columns: dict[str, Any]) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table(columns), target)
    return target.getvalue()


def footer_of(n: int) -> bytes:
    """The end of a Parquet file whose footer nests structures of Thrift."""
    return b"PAR1" + b"\x1c" * n + struct.pack("<I", n) + b"PAR1"


CSV_PIECES = ("id", "text", ",", "\t", '"', '""', "\n", "\r", "\r\n", "a", " ", "é", "\0", "\ufeff", "1", "[", "{}")
JSON_PIECES = (
    *('{"', '"}', '":', ',"', "{", "}", "[", "]", ":", ",", '"', "\\", "\\u0041", "\\ud800", "id", "text", "a", " "),
    *("1", "-", "1e9", "9" * 25, "0.5", "true", "null", "NaN", "é", "\n", "\r", '{"id":"a","text":"b"}\n', "[[", "{}"),
)
TABLES: dict[str, tuple[str, dict[str, Pattern], tuple[str, ...], tuple[str, str]]] = {
    "csv": (
        "a.csv",
        {
            "rows": rows("#,a\n", "id,text\n"),
            "columns": lambda n: f"id,text,{','.join(map(str, range(n)))}\n" + ",".join(["v"] * (n + 2)) + "\n",
            "quotes": lambda n: 'id,text\na,"' + '""' * n + '"\n',
            "quoted line ends": lambda n: 'id,text\na,"' + "\n" * n + '"\n',
            "fields of quotes": lambda n: "id,text\n" + 'a,"b"\n' * n,
            "bad rows": lambda n: "id,text\n" + "a\n" * n,
            "open quotes": lambda n: "id,text\n" + 'a,"\n' * n,
            "empty lines": lambda n: "id,text\na,b\n" + "\n" * n,
            "carriage returns": lambda n: "id,text\na,b\n" + "\r" * n,
            "lists": lambda n: 'id,text,tags\na,b,"[' + "1," * n + '1]"\n',
        },
        CSV_PIECES,
        ("id,text\na,", "\n"),
    ),
    "tsv": (
        "a.tsv",
        {
            "rows": rows("#\ta\n", "id\ttext\n"),
            "bad rows": lambda n: "id\ttext\n" + "a\tb\tc\n" * n,
            "quotes": lambda n: 'id\ttext\na\t"' + '""' * n + '"\n',
        },
        CSV_PIECES,
        ("id\ttext\na\t", "\n"),
    ),
    "jsonl": (
        "a.jsonl",
        {
            "rows": rows('{"id":"#","text":"x"}\n'),
            "columns": lambda n: '{"id":"a","text":"x"' + fields(n) + "}\n",
            "other columns in each row": lambda n: "".join(
                f'{{"id":"d{row}","text":"x","metadata":{{"n{row}":1,"m{row}":2}}}}\n' for row in range(n)
            ),
            "other columns in 200 rows": lambda n: "".join(
                f'{{"id":"d{row}","text":"x","metadata":{{"k{row}":1' + fields(n).replace("c", f"n{row}k") + "}}\n"
                for row in range(200)
            ),
            "one field many times": lambda n: '{"id":"a","text":"x"' + ',"k":1' * n + "}\n",
            "depth": lambda n: '{"id":"a","text":"x","m":' + "[" * n + "]" * n + "}\n",
            "escapes": lambda n: '{"id":"a","text":"' + "\\u00e9" * n + '"}\n',
            "halves of pairs": lambda n: '{"id":"a","text":"' + "\\ud83d" * n + '"}\n',
            "digits": lambda n: '{"id":"a","text":"x","m":' + "1" * n + "}\n",
            "long integers": lambda n: '{"id":"a","text":"x","m":[' + "12345678901234567890," * n + "1]}\n",
            "bad rows": lambda n: "{}\n" * n,
            "entities": lambda n: '{"id":"a","text":"' + "&#x41;&amp" * n + '"}\n',
            "line separators": lambda n: '{"id":"a","text":"' + "\u2028\x85" * n + '"}\n',
        },
        JSON_PIECES,
        ('{"id":"a","text":"b","m":', "}\n"),
    ),
    "beir": (
        "corpus.jsonl",
        {"rows": rows('{"_id":"#","title":"t","text":"x","metadata":{"k":#}}\n')},
        JSON_PIECES,
        ('{"_id":"a","text":"b","metadata":', "}\n"),
    ),
    "msmarco": (
        "collection.tsv",
        {"rows": rows("#\tx\n"), "bad rows": lambda n: "1\tx\n" + "a\n" * n, "tabs": lambda n: "1\tx" + "\t" * n},
        CSV_PIECES,
        ("1\t", "\n"),
    ),
    "dpr": (
        "psgs_w100.tsv",
        {
            "rows": rows("#\tx\tt\n", "id\ttext\ttitle\n"),
            "quotes": lambda n: 'id\ttext\ttitle\n1\t"' + '""' * n + '"\tt\n',
            "bad rows": lambda n: "id\ttext\ttitle\n" + '1\t"x\n' * n,
        },
        CSV_PIECES,
        ("id\ttext\ttitle\n1\t", "\n"),
    ),
    "kilt": (
        "kilt_knowledgesource.json",
        {
            "pages": rows('{"wikipedia_id":"#","wikipedia_title":"T","text":["T","one"]}\n'),
            "paragraphs": lambda n: '{"wikipedia_id":"1","wikipedia_title":"T","text":["T"' + ',"one"' * n + "]}\n",
            "sections": lambda n: (
                '{"wikipedia_id":"1","wikipedia_title":"T","text":["T"' + ',"Section::::A:::B."' * n + "]}\n"
            ),
        },
        (*JSON_PIECES, '"Section::::A."', '"BULLET::::-'),
        ('{"wikipedia_id":"1","wikipedia_title":"T","text":[', "]}\n"),
    ),
}
MARKDOWN: dict[str, Pattern] = {
    name: (lambda n, unit=unit: "x" + unit * n)
    for name, unit in {
        "brackets": "[a ",
        "images": "![l",
        "CDATA": "a <![CDATA[",
        "declarations": "<?a <!X <!-- ",
        "links": "[a](",
        "emphasis": "*a **a ",
        "quotes": "> a\n",
        "items": "- a\n",
        "definitions": "[a]: u\n",
        "unclosed elements": "a <template> ",
        "backticks": "`a ``",
        "rows of tables": "|a|b|\n|-|-|\n",
        "entities": "&#38;&amp",
        "lines": "\n",
        "front matter": "---\n",
    }.items()
}
HTML: dict[str, Pattern] = {
    name: (lambda n, unit=unit: unit * n)
    for name, unit in {
        "paragraphs": "<p>a",
        "comments": "<!-- ",
        "attributes": "<a b='c' d",
        "elements": "<b>",
        "tables": "<table><tr><td>",
        "scripts": "<script>a",
        "titles": "<title>a</title>",
        "declarations": "<!X <?y <![CDATA[",
        "entities": "&amp;&#x41;&nosuch;",
        "misnested": "<b><i></b></i>",
        "end tags": "</p>",
        "forms": "<form><select><option>",
    }.items()
}
MARKUP_PIECES = (
    *(
        "<p>",
        "</p>",
        "<b",
        ">",
        "<",
        "</",
        "<!--",
        "-->",
        "<script>",
        "</script>",
        "<table>",
        "<td>",
        "<title>",
        "&amp;",
    ),
    *(
        "<svg>",
        "<template>",
        "</template>",
        "*",
        "**",
        "`",
        "```",
        "[",
        "](",
        ")",
        "![",
        "> ",
        "- ",
        "\n",
        "---\n",
        "#",
    ),
    *("a", " ", "é", '"', "'", "=", "|", "\\", "1. ", "\t", "<xmp>", "<pre>", "<main>", "<nav>", "&#x110000;", "\r"),
)
YAML: dict[str, Pattern] = {
    "keys": lambda n: "".join(f"k{number}: v\n" for number in range(n)),
    "items": lambda n: "- a\n" * n,
    "items in a line": lambda n: "[" + "a," * n + "]",
    "aliases": lambda n: "a: &a [b]\nc: [" + "*a," * n + "]\n",
    "merges": lambda n: "a: &a {b: 1}\nc:\n  <<: [" + "*a," * n + "]\n",
    "depth": lambda n: "[" * n,
    "depth in lines": lambda n: "- " * n,
    "explicit keys": lambda n: "? " * n,
    "one word": lambda n: "a" * n,
    "words": lambda n: "a: b" + " c" * n,
    "text of several lines": lambda n: "a: |\n" + "  b\n" * n,
    "folded text": lambda n: "a: >\n" + "  b\n\n" * n,
    "quoted text": lambda n: 'a: "' + "b\n" * n + '"',
    "escapes": lambda n: 'a: "' + "\\u0041" * n + '"',
    "comments": lambda n: "# a\n" * n,
    "directives": lambda n: "%TAG ! !\n" * n,
    "documents": lambda n: "---\n" * n,
    "digits": lambda n: "a: " + "1" * n,
    "digits of base 60": lambda n: "a: 1" + ":1" * n,
    "spaces": lambda n: "a:" + " " * n + "b",
    "tags": lambda n: "a: !" + "b" * n,
    "flow of keys": lambda n: "{" + "".join(f"k{number}: v," for number in range(n)) + "}",
}
YAML_PIECES = (
    *(
        "a",
        "b: ",
        "- ",
        "\n",
        "  ",
        "[",
        "]",
        "{",
        "}",
        ",",
        ": ",
        "? ",
        "&a ",
        "*a",
        "<<: ",
        "!x ",
        "!!int ",
        "|\n",
        ">",
    ),
    *('"', "'", "#", "%", "---\n", "...\n", "1", "0x", "1e9", "2020-01-01", "=", "~", "null", "é", "\t", "!!python/x "),
    *("store: s\n", "steps:\n", "- import_corpus: {source: x}\n", "!!binary ", "!!set ", "2001-99-99", "\x07", "@"),
)


def read_titles(file: Path) -> None:
    list(Titles(str(file))._parse_rows())


def read_recipe(file: Path) -> None:
    read_steps(str(file), store="s")


def one_of(*readers: Callable[[Any], object]) -> Callable[[Any], None]:
    """Returns a function that reads a value by each of several readers. It is refused if the last one refuses it."""

    def read(value: Any) -> None:
        *others, last = readers
        for reader in others:
            with contextlib.suppress(InputError):
                reader(value)
        last(value)

    return read


INPUTS = [
    *(
        Input(
            f"{kind} of {format}",
            reader(format),
            patterns,
            pieces,
            at(name),
            frame=frame,
            modules=(
                *("indexing.files.delimited", "indexing.files.rows", "indexing.files.start", "indexing.formats.format"),
                f"indexing.formats.{'csv_tsv' if format in ('csv', 'tsv') else format}",
            ),
        )
        for format, (name, patterns, pieces, frame) in TABLES.items()
        for kind, reader in (("passages", read_corpus), ("queries", read_questions))
        if kind == "passages" or format in ("csv", "tsv", "jsonl", "beir", "dpr")
    ),
    Input(
        "passages of parquet",
        read_corpus("parquet"),
        {
            "rows": lambda n: parquet({"id": [str(row) for row in range(n)], "text": ["x"] * n}),
            "columns": lambda n: parquet({"id": ["a"], "text": ["x"], **{f"c{number}": [1] for number in range(n)}}),
            "a list": lambda n: parquet({"id": ["a"], "text": ["x"], "m": [[1] * n]}),
            "lists": lambda n: parquet({"id": list(map(str, range(n))), "text": ["x"] * n, "m": [[1]] * n}),
            "names of columns": lambda n: parquet({"id": ["a"], "text": ["x"], "m" * n: [1]}),
            "a footer of structures": footer_of,
        },
        ("\0", "\x15", "\x1c", "PAR1", "a"),
        at("a.parquet"),
        modules=("indexing.formats.parquet", "indexing.files.parquet_rows"),
    ),
    Input(
        "passages of documents",
        lambda file: _parse_document(str(file), file.read_bytes()),
        {"lines": lambda n: "a\n" * n, "spaces": lambda n: " " * n + "a"},
        ("a", "\n", "\0", "é", "\ufeff", " "),
        at("a.txt"),
        modules=("indexing.formats.text_folder",),
    ),
    Input(
        "document: Markdown",
        lambda text: read_markdown("f", text),
        MARKDOWN,
        MARKUP_PIECES,
        max_bytes=1 << 19,
        modules=("indexing.files.markup",),
    ),
    Input(
        "document: HTML",
        lambda text: read_html("f", text),
        HTML,
        MARKUP_PIECES,
        max_bytes=1 << 20,
    ),
    Input(
        "titles of msmarco",
        read_titles,
        {"rows": rows("#\tt\n"), "tabs": lambda n: "1\tt" + "\t" * n, "empty lines": lambda n: "1\tt" + "\n" * n},
        CSV_PIECES,
        at("titles.tsv"),
        frame=("1\t", "\n"),
        modules=("indexing.files.titles",),
    ),
    Input(
        "judgements",
        lambda file: (read_qrels(str(file), BadRows()), read_qrels(str(file))),
        {
            "TREC": rows("q# 0 d# 1\n"),
            "BEIR": rows("q#\td#\t1\n", "query-id\tcorpus-id\tscore\n"),
            "bad rows": lambda n: "q 0 d 1\n" + "q\n" * n,
            "quotes": lambda n: 'q\t"' + '""' * n + '"\t1\n',
            "spaces": lambda n: "q" + " " * n + "0 d 1\n",
            "digits": lambda n: "q 0 d " + "1" * n,
        },
        ("q", " ", "\t", "0", "d", "1", "\n", "-1", '"', "é", "\r", "query-id\tcorpus-id\tscore\n", "99999999999"),
        at("a.tsv"),
        modules=("indexing.files.qrels", "indexing.files.raw"),
    ),
    *(
        Input(
            f"run: {name}",
            lambda file: read_run_file(str(file)),
            patterns,
            pieces,
            at(name),
            frame=frame,
            modules=("indexing.search.run_files",),
        )
        for name, patterns, pieces, frame in (
            (
                "a.trec",
                {
                    "hits": rows("q Q0 d# # 1.5 t\n"),
                    "queries": rows("q# Q0 d 1 1.5 t\n"),
                    "digits": lambda n: "q Q0 d 1 " + "1" * n + " t\n",
                    "spaces": lambda n: "q" + " " * n + "Q0 d 1 1.5 t\n",
                    "one hit many times": lambda n: "q Q0 d 1 1.5 t\n" * n,
                },
                ("q", " ", "Q0", "d", "1", "nan", "inf", "1e400", "_", "\n", "\t", "é", "\xa0", "q Q0 d 1 1.5 t\n"),
                ("q Q0 d 1 1 t\n", "\n"),
            ),
            (
                "a.jsonl",
                {
                    "hits": rows('{"query_id":"q","id":"d#","score":1}\n'),
                    "digits": lambda n: '{"query_id":"q","id":"d","score":' + "1" * n + "}\n",
                },
                (*JSON_PIECES, '{"query_id":"q","id":"d","score":'),
                ('{"query_id":"q","id":"d","score":', "}\n"),
            ),
        )
    ),
    Input(
        "verdicts of people and of a model",
        lambda file: read_verdicts([str(file)], {("q", "d"): 0}, by_model=True),
        {
            "skips": rows('{"query_id":"q","id":"d","verdict":"skip"}\n'),
            "digits": lambda n: '{"query_id":"q","id":"d","verdict":0.' + "1" * n + "}\n",
        },
        (*JSON_PIECES, '{"query_id":"q","id":"d","verdict":', '"relevant"', '"not"', '"skip"'),
        at("a.jsonl"),
        frame=('{"query_id":"q","id":"d","verdict":', "}\n"),
        modules=("indexing.judging.verdicts",),
    ),
    Input(
        "requests of replay",
        lambda file: read_requests(str(file), None, needs_hits=True),
        {
            "lines": rows('{"request":{"query":"q#"},"hits":[{"id":"d"}]}\n'),
            "hits": lambda n: '{"request":{"query":"q"},"hits":[' + '{"id":"d"},' * n + '{"id":"e"}]}\n',
            "digits": lambda n: '{"request":{"query":"q","k":' + "1" * n + '},"hits":[]}\n',
        },
        (*JSON_PIECES, '"request"', '"query":"q"', '"hits"', '{"id":"d"}'),
        at("a.jsonl"),
        frame=('{"request":{"query":"q"},"hits":', "}\n"),
        modules=("jobs.replay",),
    ),
    *(
        Input(
            f"YAML: {name}",
            read,
            YAML,
            YAML_PIECES,
            at("a.yaml"),
            max_bytes=1 << 19,
            modules=modules,
        )
        for name, read, modules in (
            ("any file", lambda file: read_yaml(str(file), "expected YAML"), ("base.yaml_files",)),
            (
                "recipes and options",
                one_of(
                    read_recipe,
                    lambda file: read_options_file(str(file), Evaluate),
                    lambda file: read_experiment(str(file), "s"),
                ),
                ("jobs.commands.command_line", "jobs.commands.steps", "jobs.experiments.arms"),
            ),
        )
    ),
    Input(
        "results: of evaluate, for draw rates",
        lambda file: read_points([str(file)], "nDCG@10", {}, {}),
        {
            "runs": lambda n: '{"mean":{' + ",".join(f'"r{i}":{{"nDCG@10":0.5}}' for i in range(n)) + '},"rates":{}}',
            "depth": lambda n: "[" * n,
            "digits": lambda n: "1" * n,
        },
        (*JSON_PIECES, '"mean"', '"rates"', '"nDCG@10":0.5', '"queries_per_s"'),
        at("a.json"),
        frame=('{"mean":{"a":{"nDCG@10":0.5}},"rates":', "}"),
        modules=("jobs.pictures.measured",),
    ),
    Input(
        "plan: parts of a corpus",
        lambda size: size.first_rows(size.rows - 1),
        {"parts": lambda n: "p" * n},
        prepare=lambda folder, content: CorpusSize([10] * (1 + len(content)), [1] * (1 + len(content))),
    ),
    Input(
        "results: of an experiment",
        lambda file: read_results(str(file)),
        {"values": lambda n: '{"experiment":{},"values":[' + "1," * n + "1]}", "depth": lambda n: "[" * n},
        JSON_PIECES,
        at("a.json.gz"),
        max_bytes=2 << 20,
        frame=('{"experiment":{},"values":', "}"),
        modules=("jobs.experiments.results_file",),
    ),
]
