"""The folder of a judging: pairs to judge, the verdicts so far, the page, and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.judging.judging_pool import JudgingPool
from riptide.indexing.judging.verdicts import Pair, Verdict, json_lines, read_verdicts, write_lines
from riptide.indexing.store.result_files import write_files
from riptide.jobs.comparison.shown_passages import ShownTexts
from riptide.jobs.judging.judging_page import render_page

REPORT, PAIRS, ALL_PAIRS, PAGE = "judging.json", "pairs.jsonl", "all-pairs.jsonl", "page.html"
PEOPLE, MODEL = "verdicts.jsonl", "model-verdicts.jsonl"


class JudgingFolder:
    """The folder of a judging, which a later call continues.

    Args:
        path: The folder.
        identity: A hash of what is compared and how.

    Raises:
        InputError: If the folder holds anything else.
    """

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        report = path / REPORT
        if not report.is_file():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(
                    f"{Parameter('folder', str(path))}: it has no {REPORT}, expected a new folder or one of judge; "
                    "name another one"
                )
            return
        try:
            known = json.loads(report.read_bytes())["identity"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{report}: expected the report of judge; restore it, or name another folder") from None
        if known != identity:
            raise InputError(
                f"{Parameter('folder', str(path))}: it holds verdicts for other runs, queries or settings; name "
                "another folder, or give the former ones"
            )

    def read_verdicts(
        self, people: Sequence[str], model: Sequence[str], pairs: Mapping[Pair, int]
    ) -> tuple[dict[Pair, Verdict], dict[Pair, Verdict]]:
        """Returns the verdicts of people and of the model: those of the folder, and those of further files.

        Args:
            people: Files of verdicts of people.
            model: Files of verdicts of a model.
            pairs: The pairs that may be judged.

        Raises:
            InputError: As `indexing.judging.verdicts.read_verdicts`, and if verdicts of a model come after those of
                people.
        """
        earlier_people, earlier_model = (
            [str(file)] if file.is_file() else [] for file in (self.path / PEOPLE, self.path / MODEL)
        )
        earlier = read_verdicts(earlier_model, pairs, by_model=True)
        by_model = read_verdicts([*earlier_model, *model], pairs, by_model=True)
        values, earlier_values = ([verdict.value for verdict in each.values()] for each in (by_model, earlier))
        if earlier_people and values != earlier_values:
            people_file = earlier_people[0]
            raise InputError(
                f"{Parameter('model_verdicts', model[0])}: {people_file} has verdicts of people already, and those of "
                f"a model set the order in which people judge; give {Parameter('verdicts', people_file)} and "
                f"{Parameter('model_verdicts')} with another {Parameter('folder')}"
            )
        return read_verdicts([*earlier_people, *people], pairs), by_model

    def write(
        self,
        report: Mapping[str, Any],
        people: Mapping[Pair, Verdict],
        model: Mapping[Pair, Verdict],
        pending: Sequence[Mapping[str, str]],
        all_pairs: Sequence[Mapping[str, str]] | None,
    ) -> None:
        """Writes all files of the folder.

        Args:
            report: The report.
            people: The verdicts of people.
            model: The verdicts of a model.
            pending: The pairs to judge, with their texts.
            all_pairs: All pairs; None: they are not written.
        """
        contents: list[tuple[str, str]] = [
            (str(self.path / PEOPLE), write_lines(people)),
            (str(self.path / MODEL), write_lines(model)),
            (str(self.path / PAIRS), json_lines(pending)),
            (str(self.path / PAGE), render_page(pending, self.identity)),
            (str(self.path / REPORT), json.dumps({"identity": self.identity, **report}, indent=1) + "\n"),
        ]
        if all_pairs is not None:
            contents.append((str(self.path / ALL_PAIRS), json_lines(all_pairs)))
        write_files([each for each in contents if each[1] or Path(each[0]).exists()], overwrite=True)


def pair_texts(
    corpus: Corpus, texts: Mapping[str, str], pool: JudgingPool, numbers: np.ndarray
) -> list[dict[str, str]]:
    """Returns query_id, id, query, title and text of pairs, sorted by query and then in the given order.

    Args:
        corpus: The corpus.
        texts: The texts of the queries by id.
        pool: The pairs.
        numbers: The numbers of the pairs, int64 [n].
    """
    by_query = sorted(numbers.tolist(), key=lambda at: pool.query_ids[at])
    shown = ShownTexts(corpus, [pool.ids[at] for at in by_query])
    rows = []
    for at in by_query:
        query, id = pool.query_ids[at], pool.ids[at]
        passage = shown.shown_passage(id, {})
        row = {"query_id": query, "id": id, "query": texts[query]}
        rows.append(row | {"title": passage.title or "", "text": passage.text or ""})
    return rows
