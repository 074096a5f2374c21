"""Reads YAML files and reports any mistake in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from riptide.base.errors import InputError


def read_yaml(path: str, expected: str) -> Any:
    """Reads a YAML file and returns its content.

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
    # A ValueError means invalid UTF-8, or a date or number that does not exist.
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise InputError(f"{path}: not YAML that can be read: its lists or mappings are nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys; SafeLoader would silently keep the last value."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Builds a mapping node before `<<` merges keys into it. Raises YAMLError for a duplicate key."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value} occurs twice")
                seen.add(key.value)
        return node
