"""The folder of a judging: pairs to judge, the verdicts so far, the page, and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.base.text_files import read_small_text
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.judging.judging_pool import JudgingPool
from riptide.indexing.judging.verdicts import Pair, Verdict, read_verdicts, write_lines
from riptide.indexing.store.result_files import json_lines, write_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.comparison.shown_passages import ShownTexts
from riptide.jobs.judging.judging_page import render_page
from riptide.retriever.model.json_fields import parse_json

REPORT, PAIRS, ALL_PAIRS, PAGE = "judging.json", "pairs.jsonl", "all-pairs.jsonl", "page.html"
PEOPLE, MODEL = "verdicts.jsonl", "model-verdicts.jsonl"


class JudgingVerdicts(NamedTuple):
    """The verdicts of a judging.

    Attributes:
        people: Those of people.
        model: Those of a model.
        num_new: How many verdicts of people the folder does not have yet.
    """

    people: dict[Pair, Verdict]
    model: dict[Pair, Verdict]
    num_new: int


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
        self._model_hash: str | None = None  # of the model's verdicts by which people have judged
        report = path / REPORT
        if not report.is_file():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(
                    f"{Parameter('folder', str(path))}: it has no {REPORT}, expected an empty folder or a folder that "
                    "judge wrote; name another one"
                )
            return
        try:
            written = parse_json(read_small_text(report, "expected the report of judge"))
            known, self._model_hash = written["identity"], written["model_hash"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{report}: expected the report of judge; restore it, or name another folder") from None
        if known != identity:
            raise InputError(
                f"{Parameter('folder', str(path))}: it holds verdicts for other runs, queries or settings; name "
                "another folder, or give the previous runs and settings"
            )

    def read_verdicts(self, people: Sequence[str], model: Sequence[str], pairs: Mapping[Pair, int]) -> JudgingVerdicts:
        """Returns the verdicts of people and of the model: those of the folder, and those of further files.

        Args:
            people: Files of verdicts of people.
            model: Files of verdicts of a model.
            pairs: The pairs that may be judged.

        Raises:
            InputError: As `indexing.judging.verdicts.read_verdicts`, and if the verdicts of a model change after
                people have judged.
        """
        earlier_people, earlier_model = (
            [str(file)] if file.is_file() else [] for file in (self.path / PEOPLE, self.path / MODEL)
        )
        by_model = read_verdicts([*earlier_model, *model], pairs, by_model=True)
        if self._model_hash not in (None, _hash_of(by_model)):
            people_file = self.path / PEOPLE
            place = Parameter("model_verdicts", model[0]) if model else self.path / MODEL
            raise InputError(
                f"{place}: people have judged already, in an order that does not depend on these verdicts of a model; "
                f"restore the previous ones, or give {Parameter('verdicts', str(people_file))} and "
                f"{Parameter('model_verdicts')} with another {Parameter('folder')}"
            )
        earlier, by_people = (read_verdicts(files, pairs) for files in (earlier_people, [*earlier_people, *people]))
        num_new = sum(
            pair not in earlier or earlier[pair].value != verdict.value for pair, verdict in by_people.items()
        )
        return JudgingVerdicts(by_people, by_model, num_new)

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
        document = {"identity": self.identity, "model_hash": _hash_of(model) if people else None, **report}
        contents: list[tuple[str, str]] = [
            (str(self.path / PEOPLE), write_lines(people)),
            (str(self.path / MODEL), write_lines(model)),
            (str(self.path / PAIRS), json_lines(pending)),
            (str(self.path / PAGE), render_page(pending, self.identity)),
            (str(self.path / REPORT), json.dumps(document, indent=1) + "\n"),
        ]
        if all_pairs is not None:
            contents.append((str(self.path / ALL_PAIRS), json_lines(all_pairs)))
        write_files([each for each in contents if each[1] or Path(each[0]).exists()], overwrite=True)


def pair_texts(
    store: Store, texts: Mapping[str, str], pool: JudgingPool, numbers: np.ndarray, passages: Mapping[Pair, str]
) -> list[dict[str, str]]:
    """Returns query_id, id, query, title and text of pairs, sorted by query and then in the given order.

    Warns of passages that the corpus lacks.

    Args:
        store: The store.
        texts: The texts of the queries by id.
        pool: The pairs.
        numbers: The numbers of the pairs, int64 [n].
        passages: The passage to show for a pair, if its id is that of a document.
    """
    pairs = sorted(((pool.query_ids[at], pool.ids[at]) for at in numbers.tolist()), key=lambda pair: pair[0])
    shown = ShownTexts(Corpus.open(store), [passages.get(pair, pair[1]) for pair in pairs])
    if shown.missing:
        say(f"warning: {shown.missing_message(store.url)}")
    rows = []
    for query, id in pairs:
        passage = shown.shown_passage(id, {}, passages.get((query, id)))
        row = {"query_id": query, "id": id, "query": texts[query]}
        rows.append(row | {"title": passage.title or "", "text": passage.text or ""})
    return rows


def _hash_of(verdicts: Mapping[Pair, Verdict]) -> str:
    """Returns a hash of verdicts."""
    return fingerprint_of(write_lines(verdicts))
