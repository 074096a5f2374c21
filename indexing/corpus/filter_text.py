"""Parses filters written as text, such as `year >= 2000 and lang in (en, de) and not editor = null`.

    filter     = group { "or" group }
    group      = term { "and" term }
    term       = "not" term | "(" filter ")" | condition
    condition  = FIELD operator value | FIELD [ "not" ] "in" "(" value { "," value } ")"
    operator   = "=" | "!=" | "<" | "<=" | ">" | ">="
    value      = null | true | false | NUMBER | WORD | text in single or double quotes

The words of the grammar may be in capitals. A WORD has no spaces, quotes or any of `= ! < > ( ) ,`; other fields and
values are written in quotes, with `\\` before a quote or backslash in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from riptide.base.errors import InputError

MAX_CHARACTERS = 1 << 16
MAX_NESTED = 20  # levels of parentheses and of `not`
_TOKEN = re.compile(
    r"""\s*+(?:(?P<quoted>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')"""
    r"""|(?P<sign>[<>!]=|[=<>(),])|(?P<word>[^\s"'=<>!(),]++)|(?P<end>\Z)|(?P<bad>.))""",
    re.DOTALL,
)
_NUMBER = re.compile(r"-?[0-9]{1,300}(?P<fraction>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]{1,3})?")
_BOUNDS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}


def parse_filter_text(text: str, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Parses a filter text into a JSON object of the form that `riptide.indexing.corpus.filters` describes.

    Args:
        text: The text, in the grammar of this module.
        columns: The types of the fields. A word is a text, and no number, true or false, if its field has strings or
            timestamps.

    Raises:
        InputError: With the number of the first wrong character, from 1.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"filter: expected up to {MAX_CHARACTERS:,} characters, found {len(text):,}")
    parser = _Parser(text, columns)
    document = parser.parse_filter()
    if parser.kind != "end":
        raise parser.error("and, or, or the end")
    return document


class _Parser:
    """Recursive-descent parser of a filter text; holds the next token with its kind, start and end."""

    def __init__(self, text: str, columns: Mapping[str, pa.DataType]):
        self.text, self.columns, self.end, self.nested = text, columns, 0, 0
        self.advance()

    def parse_filter(self, separator: str = "or") -> dict[str, Any]:
        """Parses groups joined by `or`; with the separator "and", one group: terms joined by `and`."""
        terms: list[dict[str, Any]] = []
        while not terms or self.accept(separator):
            terms.append(self.parse_filter("and") if separator == "or" else self.parse_term())
        return terms[0] if len(terms) == 1 else {separator: terms}

    def parse_term(self) -> dict[str, Any]:
        is_negated = self.accept("not")
        if not is_negated and not self.accept("("):
            return self.parse_condition()
        self.nested += 1
        if self.nested > MAX_NESTED:
            raise self.error(f"up to {MAX_NESTED} levels of parentheses and not")
        document = {"not": self.parse_term()} if is_negated else self.parse_filter()
        if not is_negated:
            self.expect(")")
        self.nested -= 1
        return document

    def parse_condition(self) -> dict[str, Any]:
        if self.is_word("and", "or", "in"):
            raise self.error("a field (in quotes if it has spaces), not or (")
        name = self.take("a field (in quotes if it has spaces), not or (")
        is_negated = self.accept("not")
        if self.accept("in"):
            self.expect("(")
            values = [self.parse_value(name)]
            while self.accept(","):
                values.append(self.parse_value(name))
            self.expect(")")
            return {"not": {name: values}} if is_negated else {name: values}
        if is_negated or self.token not in ("=", "!=", *_BOUNDS):
            raise self.error("in" if is_negated else f"=, !=, {', '.join(_BOUNDS)}, in or not in")
        operator = self.token
        self.advance()
        condition = {name: self.parse_value(name)}
        if operator in _BOUNDS:
            return {name: {_BOUNDS[operator]: condition[name]}}
        return condition if operator == "=" else {"not": condition}

    def parse_value(self, field: str) -> Any:
        is_word, text = self.kind == "word", self.take("a value")
        kind = self.columns.get(field, pa.null())
        kind = kind.value_type if pa.types.is_list(kind) else kind
        has_texts = pa.types.is_string(kind) or pa.types.is_timestamp(kind)
        if not is_word or (has_texts and text.lower() != "null"):
            return text
        if number := _NUMBER.fullmatch(text):
            return float(text) if number["fraction"] or number["exponent"] else int(text)
        return {"null": None, "true": True, "false": False}.get(text.lower(), text)

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.token.lower() in words

    def accept(self, token: str) -> bool:
        """Consumes the next token if it is the given sign or word, and returns whether it was."""
        is_next = self.is_word(token) or (self.kind == "sign" and self.token == token)
        if is_next:
            self.advance()
        return is_next

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(token)

    def take(self, expected: str) -> str:
        """Consumes a field name or a value, and returns it without quotes."""
        if self.kind not in ("word", "quoted"):
            raise self.error(expected)
        token = re.sub(r"\\(.)", r"\1", self.token[1:-1], flags=re.DOTALL) if self.kind == "quoted" else self.token
        self.advance()
        return token

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.end)
        assert match is not None
        self.kind = str(match.lastgroup)
        self.token, (self.start, self.end) = match[self.kind], match.span(self.kind)

    def error(self, expected: str) -> InputError:
        is_open = self.kind == "bad" and self.token in "\"'"
        actual = "a quote that is not closed" if is_open else repr(self.token[:40]) if self.token else "the end"
        return InputError(f"filter: at character {self.start + 1}: expected {expected}, found {actual}")
