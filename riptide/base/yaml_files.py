"""Reads a YAML file; any mistake in it is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from riptide.base.errors import InputError


def read_yaml(path: str, expected: str) -> Any:
    """Returns the content of a YAML file.

    Args:
        path: The file.
        expected: What the file is for, for the message if it cannot be read: `--config expects a YAML file`.

    Raises:
        InputError: If the file cannot be read, is no YAML, or has a key twice in one mapping.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {expected}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date or number that does not exist
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise InputError(f"{path}: not YAML that can be read: its lists or mappings are nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which by itself keeps the last one of equal keys without an error."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Returns a mapping as it is written, before `<<` adds keys to it. Raises YAMLError if it has a key twice."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value} occurs twice")
                seen.add(key.value)
        return node
