"""The words of messages: texts that a terminal shows as they are, and placeholders for parameters and commands.

A name or a text of a file may hold escape sequences, which a terminal would obey, and may be long. `printable` escapes
them, and `shown` and `shorten` also bound the length.

The library does not know whether its caller wrote `--limit 3` or `limit=3`. So a message holds a parameter as a value,
`InputError(f"{Parameter('limit', limit)}: expected at least 1")`, and the front end that shows the message writes it:
"parameter limit 3" by itself, "--limit 3" on a command line, "limit=3" in Python.

Within the text of a message, such a value is a mark between private characters of Unicode, so a message can be joined,
cut, logged and sent like any other text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

MAX_MESSAGE = 2_000  # maximum characters of a message, even if it quotes long input
MAX_SHOWN = 200  # maximum characters of a name, a key or a value in a message

_START, _END = "\ue000", "\ue001"
# A placeholder, or a long word; a name that is cut may have quotes and a colon.
_LONG_WORD = re.compile(rf"{_START}[^{_START}{_END}]*{_END}|(?<![^\s/])[^\s/{_START}{_END}]{{{MAX_SHOWN + 20},}}")
# Control characters, line and paragraph separators, characters that reverse the text after them, unpaired surrogates.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, allowed: str = "") -> str:
    """Escapes the characters that are instructions for a terminal, and unpaired surrogates, as in a Python string.

    Args:
        text: The text; it may be of a file or of a client.
        allowed: Characters that stay as they are, for example line breaks of a text of several lines.
    """
    return _CONTROLS.sub(lambda match: match[0] if match[0] in allowed else _escape(match[0]), text)


def shorten(text: str, max_characters: int = MAX_MESSAGE) -> str:
    """Returns a printable text of at most `max_characters`; a longer one has "…" in place of its middle."""
    return _cut(printable(_cut(text, max_characters)), max_characters)


def shown(name: object) -> str:
    """Returns a name, a key or a value as a message shows it: printable, and at most MAX_SHOWN characters."""
    return shorten(str(name), MAX_SHOWN)


def cut_words(text: str) -> str:
    """Cuts the words of a message to MAX_SHOWN characters, so that a name that it quotes does not hide the others.

    Words end at white space, and at the slashes of paths. Placeholders stay whole.
    """
    return _LONG_WORD.sub(lambda match: match[0] if match[0][0] == _START else _cut(match[0], MAX_SHOWN), text)


def list_first(names: Collection[str], max_names: int = 3, max_characters: int = 120) -> str:
    """Lists the first names, each cut to a number of characters, and the count of the others."""
    first = [shorten(name, max_characters) for name in itertools.islice(names, max_names)]
    return ", ".join(first) + (f" and {len(names) - max_names:,} more" if len(names) > max_names else "")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode() if character < "\x7f" else f"\\u{ord(character):04x}"


def _cut(text: str, max_characters: int) -> str:
    end = (max_characters - 1) // 3
    return text if len(text) <= max_characters else f"{text[: max_characters - 1 - end]}…{text[len(text) - end :]}"


class Parameter:
    """A parameter name, with an optional value, in a message.

    Args:
        name: Its name, with underscores.
        value: Its value, which is shown as text, or as the flag that sets a bool; "": the message has the name alone.
    """

    def __init__(self, name: str, value: object = ""):
        self.name, self.value = name, value if isinstance(value, bool) else shorten(cut_words(str(value)))

    def __format__(self, spec: str) -> str:
        """Encodes the parameter as a placeholder in a message."""
        return _mark("parameter", self.name, self.value)


class Command:
    """A riptide command that a message recommends.

    Args:
        job: The job, with dashes: "build-index".
        words: Words before the options.
        **options: Values of options by name, with underscores; "": the option has no value.
    """

    def __init__(self, job: str, *words: str, **options: object):
        self.job, self.words = job, words
        self.options = {name: str(value) for name, value in options.items()}

    def __format__(self, spec: str) -> str:
        """Encodes the command as a placeholder in a message."""
        return _mark("command", self.job, self.words, self.options)


class Words:
    """Renders the placeholders of messages for a front end; the base class uses the syntax of the library."""

    def parameter(self, name: str, value: str | bool) -> str:
        """Formats a parameter with its value, which may be empty."""
        return f"parameter {name} {value}".rstrip(" ")

    def command(self, job: str, words: Sequence[str], options: Mapping[str, str]) -> str:
        """Formats a command line."""
        return " ".join(["riptide", job, *words, *option_words(options)])

    def render(self, message: str) -> str:
        """Replaces the placeholders of a message by their rendered form."""
        first, *others = message.split(_START)
        rendered = [first]
        for piece in others:
            mark, end, rest = piece.partition(_END)
            rendered += [self._render_mark(mark) if end else mark, rest]
        return "".join(rendered)

    def _render_mark(self, mark: str) -> str:
        try:
            placeholder = json.loads(mark)
        except (ValueError, RecursionError):
            return mark
        match placeholder:
            case ["parameter", str(name), str() | bool() as value]:
                return self.parameter(name, value)
            case ["command", str(job), list(words), dict(options)]:
                if all(isinstance(each, str) for each in (*words, *options.values())):
                    return self.command(job, words, options)
        return mark  # The text only happens to contain the characters of a placeholder.


class CommandWords(Words):
    """Writes parameters as options of the command line, and commands with the console script."""

    def parameter(self, name: str, value: str | bool) -> str:
        """Returns a parameter as an option. True has no value, and False becomes --no-NAME."""
        if isinstance(value, bool):
            return " ".join(option_words({name if value else f"no_{name}": ""}))
        return " ".join(option_words({name: value}))


def rename_parameters(message: str, names: Mapping[str, str]) -> str:
    """Returns a message whose parameters have the names of the caller, which it gives by their present names."""
    return _NewNames(names).render(message)


class _NewNames(Words):
    """Renders placeholders as placeholders, with other names of parameters."""

    def __init__(self, names: Mapping[str, str]):
        self._names = names

    def parameter(self, name: str, value: str | bool) -> str:
        return _mark("parameter", self._names.get(name, name), value)

    def command(self, job: str, words: Sequence[str], options: Mapping[str, str]) -> str:
        return _mark("command", job, words, options)


def alternatives(names: Sequence[str]) -> str:
    """Returns names as a list of alternatives: `A, B or C`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def option_words(options: Mapping[str, str]) -> list[str]:
    """Converts options to words of a command line."""
    flags = {"--" + name.replace("_", "-"): value for name, value in options.items()}
    return [word for flag, value in flags.items() for word in ((flag, value) if value else (flag,))]


def _mark(*values: Any) -> str:
    return f"{_START}{json.dumps(values)}{_END}"  # ASCII, so a value cannot end its own placeholder


LIBRARY = Words()
# For texts that artifacts store for people, who read them with `riptide store` or in the file itself.
STORED = CommandWords()
