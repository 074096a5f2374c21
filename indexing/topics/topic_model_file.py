"""Reads and writes a topic model and its tree as a safetensors file, with words and tree as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.topics.tree import TopicNode, TopicTree
from riptide.retriever.topics.model import TopicModel

SUFFIX = ".safetensors"
_ENTRY = "topics"  # a single entry, as the order of several entries varies between runs


def write_topics(tree: TopicTree, path: Path) -> None:
    """Writes a topic model and its tree to a file; equal models and trees give equal bytes."""
    from safetensors.numpy import save_file

    document = {"settings": tree.model.json_fields(), "nodes": [asdict(node) for node in tree.nodes]}
    metadata = {_ENTRY: json.dumps(document, ensure_ascii=False, sort_keys=True)}
    save_file(dict(tree.model.arrays_by_name()), path, metadata=metadata)


def read_topics(path: Path) -> TopicTree:
    """Reads a topic model and its tree from a file of `write_topics`. Raises InputError for any other file."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    try:
        arrays_by_name = load_file(path)
        with safe_open(path, "numpy") as file:
            document = json.loads((file.metadata() or {})[_ENTRY])
        json_fields, entries = document["settings"], document["nodes"]
        nodes = tuple(_read_node(entry) for entry in entries)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a file of topics: {' '.join(str(error).split())[:200]}") from error
    return TopicTree(TopicModel.from_arrays(arrays_by_name, json_fields, path), nodes)


def _read_node(entry: Mapping[str, Any]) -> TopicNode:
    return TopicNode(**{**entry, "words": tuple(entry["words"])})
