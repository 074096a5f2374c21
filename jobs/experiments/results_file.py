"""Files of results: the options of an experiment, the values of each query, the machine and the commit."""

from __future__ import annotations

import gzip
import json
import os
import string
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store
from riptide.jobs.experiments.arms import DataSet, Experiment
from riptide.jobs.experiments.results import Masks, Results, RunValues, markdown_tables, summarise
from riptide.process.native import cpu_info

# What names an experiment: a table and a scale, or a file of arms and those that are measured; and its options
IDENTITY = ("table", "scale", "arms", "only", "experiment")
ENDING = ".json.gz"
LETTERS = string.ascii_letters + string.digits  # for values of which few are different


def identity(experiment: Experiment, **names: Any) -> dict[str, Any]:
    """Returns what must be equal in two runs of an experiment, as JSON values.

    Args:
        experiment: The experiment, in which {store} and {raw} stand for the folders.
        names: What names it: `table` and `scale`, or `arms`, and `only` if not all of these are measured.
    """
    values = experiment.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {**names, "experiment": {**values, "seeds": experiment.seeds}}


def check_name(path: str) -> None:
    """Raises InputError if a file of results may not have a name."""
    if not path.endswith(ENDING) or "://" in path:
        raise InputError(f"{Parameter('results', path)}: expected a local file whose name ends with {ENDING}")


def check_results(path: str, expected: Mapping[str, Any]) -> None:
    """Raises InputError if a file exists and holds the results of other options; names the first that differs."""
    if not Path(path).exists():
        return
    document = read_results(path)
    for key in IDENTITY:
        if document.get(key) != expected.get(key):
            place, found, wanted = _first_difference(key, document.get(key), expected.get(key))
            raise InputError(
                f"{path}: holds results of {place} {found}, expected {wanted}: name another file with "
                f"{Parameter('results')}, or give {Parameter('overwrite')}"
            )


def _first_difference(place: str, one: Any, other: Any) -> tuple[str, str, str]:
    """Returns the key of the first difference of two JSON values, and both values there as short text."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            if one.get(key) != other.get(key):
                return _first_difference(f"{place}.{key}", one.get(key), other.get(key))
    texts = (json.dumps(value) for value in (one, other))
    found, wanted = (text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
    return place, found, wanted


def read_results(path: str) -> dict[str, Any]:
    """Reads a file of results. Raises InputError if it cannot be read or is another file."""
    try:
        document: dict[str, Any] = json.loads(gzip.decompress(Path(path).read_bytes()))
        if not {"experiment", "values"} <= document.keys():
            raise ValueError("a key is missing")
    except OSError as error:
        problem = error.strerror or "not a gzip file"
        raise InputError(f"{path}: {problem}; expected a file of {Parameter('results')}") from error
    except (ValueError, EOFError, AttributeError, RecursionError, zlib.error) as error:
        raise InputError(f"{path}: not a file of {Parameter('results')}: delete it or name another one") from error
    return document


def results_bytes(
    identity: Mapping[str, Any],
    results: Results,
    notes: Mapping[str, Any],
    sets: Mapping[str, DataSet],
    subsets: Masks | None = None,
) -> bytes:
    """Returns the content of a file of results; equal results give equal bytes on one machine and commit.

    Args:
        identity: As `identity` returns it.
        results: The values.
        notes: The chosen options and the qualities on dev splits, by arm.
        sets: The sets, with their stores.
        subsets: Which queries belong to each subset, for `read_subsets`; None: there are no subsets.
    """
    passages = {name: Corpus.open(Store(data_set.store)).num_rows for name, data_set in sets.items()}
    values = {
        set_name: {
            arm: {
                str(seed): {
                    "metrics": {metric: pack_values(each) for metric, each in run.metrics.items()},
                    "figures": run.figures,
                }
                for seed, run in by_seed.items()
            }
            for arm, by_seed in arms.items()
        }
        for set_name, arms in results.values.items()
    }
    document = {**identity, "machine": machine(), "version": version("riptide"), "commit": commit()}
    if subsets:
        document["subsets"] = {
            set_name: {subset: mask.astype(int).tolist() for subset, mask in masks.items()}
            for set_name, masks in subsets.items()
        }
    text = json.dumps({**document, "passages": passages, "chosen": notes, "values": values}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def pack_values(values: np.ndarray) -> list[float] | dict[str, Any]:
    """Returns values as float32: a list, or a letter for each one if few are different, which compresses better."""
    different, places = np.unique(values.astype(np.float32), return_inverse=True)
    numbers = [float(str(value)) for value in different]  # the shortest text of a float32
    if len(numbers) > len(LETTERS):
        return [numbers[place] for place in places]
    return {"numbers": numbers, "letters": "".join(LETTERS[place] for place in places)}


def unpack_values(values: Sequence[float] | Mapping[str, Any]) -> np.ndarray:
    """Returns the values that `pack_values` has packed: float64 [queries]."""
    if isinstance(values, Mapping):
        return np.array(values["numbers"])[[LETTERS.index(letter) for letter in values["letters"]]]
    return np.array(values, np.float64)


def read_values(document: Mapping[str, Any]) -> Results:
    """Returns the values of a file of results.

    Args:
        document: The content of the file.
    """
    results = Results(Experiment.model_validate(document["experiment"]).untrained)
    for set_name, arms in document["values"].items():
        for arm, by_seed in arms.items():
            for seed, run in by_seed.items():
                metrics = {metric: unpack_values(values) for metric, values in run["metrics"].items()}
                results.add(set_name, arm, int(seed), RunValues(metrics, run["figures"]))
    return results


def read_subsets(document: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the subsets of a file of results as masks, for each set: bool [queries]."""
    return {
        set_name: {subset: np.array(mask, bool) for subset, mask in masks.items()}
        for set_name, masks in document.get("subsets", {}).items()
    }


def summarise_results(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `summarise` of a file of results."""
    return summarise(read_values(document), document["experiment"].get("pairs", ()), read_subsets(document))


def results_lines(document: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Returns the tables of a file of results as lines of Markdown, with its seeds, machine and commit.

    Args:
        document: The content of the file.
        summary: Its figures, as `summarise_results` returns them.
    """
    chosen = [
        f"{arm}: {', '.join(f'{option} {value}' for option, value in notes['chosen'].items())}"
        for arm, notes in document["chosen"].items()
        if notes["chosen"]
    ]
    return [
        "Intervals (95%) are over the queries. " + describe_seeds(read_values(document)),
        *([f"Chosen by the dev split: {'; '.join(chosen)}."] if chosen else []),
        "",
        *markdown_tables(summary),
        "",
        describe_origin(document),
    ]


def describe_seeds(results: Results) -> str:
    """Returns a sentence with the seeds of the trained arms."""
    trained = (
        by_seed for arms in results.values.values() for arm, by_seed in arms.items() if arm not in results.untrained
    )
    seeds = {seed for by_seed in trained for seed in by_seed}
    return f"Seeds: {', '.join(map(str, sorted(seeds))) or 'none'}."


def describe_origin(document: Mapping[str, Any]) -> str:
    """Returns the sentences about the machine and the version of a file of results."""
    return f"Machine: {document['machine']}. Version {document['version']}, commit {document['commit'] or 'unknown'}."


def machine() -> str:
    """Returns the CPU, its cores, and the GPUs of this machine."""
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"{cpu_info()[1]}, {os.cpu_count()} cores", *names])


def commit() -> str | None:
    """Returns the commit of this checkout; None outside of one or without git."""
    folder = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    except OSError:
        return None
    # An installed package may lie inside the repository of another project.
    top, _, head = done.stdout.strip().partition("\n")
    return head if head and Path(top) == folder else None
