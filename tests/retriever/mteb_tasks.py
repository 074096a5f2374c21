"""Tasks of mteb over local data, which need no network: retrieval from a BEIR folder, and pairs with scores (STS).

Each function imports mteb itself, because that takes some seconds.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def retrieval_task(folder: Path, *, name: str = "LocalRetrieval", prompt: Any = None) -> Any:
    """Returns a retrieval task over a BEIR folder that `write_corpus` wrote, with the prompt of its metadata."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    class LocalRetrieval(AbsTaskRetrieval):
        metadata = _metadata(name, "Retrieval", "ndcg_at_10", prompt)

        def load_data(self, **_options: Any) -> None:
            corpus, queries = (read_lines(folder / f"{kind}.jsonl") for kind in ("corpus", "queries"))
            self.dataset = {
                "default": {
                    "test": {
                        "corpus": Dataset.from_list([{"id": row.pop("_id"), **row} for row in corpus]),
                        "queries": Dataset.from_list([{"id": row.pop("_id"), **row} for row in queries]),
                        "relevant_docs": read_qrels(folder / "qrels" / "test.tsv"),
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    return LocalRetrieval()


def sts_task(pairs: list[tuple[str, str, float]], *, name: str = "LocalSts", **prompt_types: Any) -> Any:
    """Returns an STS task of pairs with scores; `prompt_types` are attributes of AbsTaskSTS."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    class LocalSts(AbsTaskSTS):
        metadata = _metadata(name, "STS", "cosine_spearman", None)

        def load_data(self, **_options: Any) -> None:
            first, second, scores = zip(*pairs, strict=True)
            columns = {"sentence1": list(first), "sentence2": list(second), "score": list(scores)}
            self.dataset = {"test": Dataset.from_dict(columns)}
            self.data_loaded = True

    for attribute, value in prompt_types.items():
        setattr(LocalSts, attribute, value)
    return LocalSts()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_qrels(file: Path) -> dict[str, dict[str, int]]:
    """Returns the judgements of a BEIR file, by query and passage."""
    qrels: dict[str, dict[str, int]] = {}
    with open(file, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    return qrels


def _metadata(name: str, kind: str, main_score: str, prompt: Any) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name,
        description="Texts of random words.",
        type=kind,
        category="t2t",
        dataset={"path": "local/texts", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
        prompt=prompt,
    )
