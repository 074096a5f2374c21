"""Reads YAML files, and reports any mistake in one line."""

from __future__ import annotations

from typing import Any

import yaml

from riptide.base.arguments import MAX_LEVELS
from riptide.base.errors import InputError
from riptide.base.text_files import read_small_text
from riptide.base.wording import shown

MAX_VALUES = 1_000_000  # maximum number of values of a YAML file, in which an alias counts as often as it is used
MAX_NUMBER = 300  # maximum characters of a number; longer ones have no text, and some take quadratic time to read


def read_yaml(path: str, expected: str) -> Any:
    """Reads a YAML file and returns its content.

    Args:
        path: The file.
        expected: What the file is for, for the message if it cannot be read: `--config expects a YAML file`.

    Raises:
        InputError: If the file cannot be read as `read_small_text` does, is no YAML, has a key twice in one mapping, a
            number of more than MAX_NUMBER characters, more than MAX_LEVELS levels or more than MAX_VALUES values.
    """
    try:
        return yaml.load(read_small_text(path, expected), _Loader)
    except FileNotFoundError as error:
        raise InputError(f"{path}: {error.strerror}; {expected}") from error
    except InputError:
        raise
    # All but YAMLError mean invalid UTF-8, or a date or a number that does not exist.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys, of which SafeLoader would keep the last, and unbounded values."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._open_levels = self._num_nodes = 0
        # Levels and values of each complete node, with those of the nodes that it names by aliases.
        self._extents: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Builds a node. Raises YAMLError if it is nested too deeply, contains itself or has too many values."""
        line = self.peek_event().start_mark.line + 1
        self._open_levels += 1
        if self._open_levels > MAX_LEVELS:
            raise yaml.YAMLError(f"line {line}: more than {MAX_LEVELS} levels of lists and mappings")
        self._num_nodes += 1
        if self._num_nodes > MAX_VALUES:  # at once, as each node takes a kilobyte
            raise yaml.YAMLError(f"line {line}: more than {MAX_VALUES:,} values")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._open_levels -= 1
        if is_alias and node not in self._extents:
            raise yaml.YAMLError(f"line {line}: a list or mapping that contains itself")
        if node is not None and node not in self._extents:
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            nodes = [each for entry in inner for each in (entry if isinstance(entry, tuple) else (entry,))]
            extents = [self._extents[each] for each in nodes]
            levels = 1 + max((extent[0] for extent in extents), default=0)
            values = 1 + sum(extent[1] for extent in extents)
            if levels > MAX_LEVELS or values > MAX_VALUES:
                raise yaml.YAMLError(
                    f"line {line}: with aliases more than {MAX_LEVELS} levels or {MAX_VALUES:,} values"
                )
            self._extents[node] = levels, values
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Builds a mapping node before `<<` merges keys into it. Raises YAMLError for a duplicate key."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {shown(key.value)} occurs twice")
                seen.add(key.value)
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Returns an integer or a float. Raises YAMLError if its text is too long."""
        if len(node.value) > MAX_NUMBER:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: a number of more than {MAX_NUMBER} characters: {shown(node.value)}")
        return self.construct_yaml_float(node) if node.tag.endswith(":float") else self.construct_yaml_int(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
