"""A small knowledge source in KILT's form, and files of its eleven tasks; all texts and facts are invented.

The forms are those of KILT's README and mapping scripts: the fields of an entry of provenance, and those of `meta`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ABSTRACT = "Section::::Abstract."


def page(id: str, title: str, *paragraphs: str) -> dict[str, Any]:
    """Returns a page; its paragraph 0 is its title."""
    return {
        "_id": id,
        "wikipedia_id": id,
        "wikipedia_title": title,
        "text": [f"{title}\n", *(f"{paragraph}\n" for paragraph in paragraphs)],
        "anchors": [{"text": title, "href": title.replace(" ", "%20"), "paragraph_id": 1, "start": 0, "end": 3}],
        "categories": "Invented,Small",
        "history": {"pageid": id, "title": title, "url": f"https://wiki.test/{id}"},
        "wikidata_info": {"description": "invented", "wikidata_id": f"Q{id}"},
    }


PAGES = [
    page(
        "101",
        "Lake Orrin",
        "Lake Orrin is a mountain lake. It freezes in November and thaws in April. Its water is clear.",
        "Section::::Wildlife.",
        "Dune foxes drink at the lake. A colony of grey herons nests on its northern shore.",
    ),
    page(
        "102",
        "Tessa Varn",
        "Tessa Varn was a novelist. She was born in Port Mirel in 1871. Her best book is The Glass Harbour.",
        "Section::::Life.",
        "Varn worked as a pilot of the night ferry before she wrote.",
    ),
    page(
        "103",
        "The Glass Harbour",
        "The Glass Harbour is a novel by Tessa Varn. It tells of a lighthouse keeper who counts ships.",
    ),
    page(
        "104",
        "Port Mirel",
        "Port Mirel is a harbour city at the mouth of the river Mirel. Its old town burned down in 1802.",
        "Section::::Economy.",
        "The city lives from salt and copper. The night ferry links it with the island of Hale.",
        "Section::::Sport.",
        "The Mirel Rangers play football at the Salt Ground.",
    ),
    page(
        "105",
        "Mirel Rangers",
        "The Mirel Rangers are a football club of Port Mirel. Their coach is Harl Quint. They play in green shirts.",
    ),
    page(
        "106", "Dune fox", "The dune fox is a small fox with large ears. It sleeps by day and hunts beetles at night."
    ),
    page(
        "107",
        "Salt bridge",
        "The salt bridge is an old bridge over the river Mirel. It is made of oak, and merchants crossed it with salt.",
    ),
    page("108", "Night ferry", "The night ferry is a ship that sails at ten in the evening. It carries eighty people."),
    page(
        "109",
        "Copper tea",
        "Copper tea is a drink of roasted barley. It tastes of bread because the barley is roasted for two hours.",
        "Section::::Making.",
        "Barley is roasted in a copper pan, ground and boiled with water.",
    ),
    page("110", "Mount Hale", "Mount Hale is a mountain of 1,240 metres. Lake Orrin lies below its western ridge."),
    page("111", "Mirel (river)", "The Mirel is a river. It rises in the moor, and reaches the sea at Port Mirel."),
    page("112", "Harl Quint", "Harl Quint is a football coach. He was born on the island of Hale and keeps bees."),
]
BY_ID = {each["wikipedia_id"]: each for each in PAGES}


def on_page(id: str) -> dict[str, Any]:
    """Returns an entry of provenance without a span, as in entity linking."""
    return {"wikipedia_id": id, "title": BY_ID[id]["wikipedia_title"]}


def at(id: str, text: str, **fields: object) -> dict[str, Any]:
    """Returns an entry of provenance for a text of a page."""
    number, paragraph = next((n, each) for n, each in enumerate(BY_ID[id]["text"]) if text in each)
    start = paragraph.index(text)
    headings = [each.strip() for each in BY_ID[id]["text"][:number] if each.startswith("Section::::")]
    return on_page(id) | {
        "section": headings[-1] if headings else ABSTRACT,
        "start_paragraph_id": number,
        "start_character": start,
        "end_paragraph_id": number,
        "end_character": start + len(text),
        "bleu_score": 1.0,
        "meta": {},
        **fields,
    }


def task(id: str, text: str, output: list[dict], meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a line of a task file."""
    return {"id": id, "input": text, "output": output, **({} if meta is None else {"meta": meta})}


def linked(id: str, left: str, mention: str, right: str, target: str) -> dict[str, Any]:
    """Returns a line of entity linking."""
    answer = {"answer": BY_ID[target]["wikipedia_title"], "provenance": [on_page(target)]}
    meta = {"left_context": left, "mention": mention, "right_context": right}
    return task(id, f"{left} [START_ENT] {mention} [END_ENT] {right}", [answer], meta)


def cited(id: str, text: str, sentence: int) -> dict[str, Any]:
    """Returns an entry of provenance of FEVER."""
    meta = {"fever_page_id": BY_ID[id]["wikipedia_title"].replace(" ", "_"), "fever_sentence_id": sentence}
    return at(id, text, meta=meta)


FROZEN, BORN, KEEPER = "It freezes in November and thaws in April.", "She was born in Port Mirel in 1871.", "Harl Quint"
FERRY = "The night ferry links it with the island of Hale."
TASKS: dict[str, list[dict[str, Any]]] = {
    "fever-train-kilt": [
        task(
            "3301", "Lake Orrin is frozen in winter.", [{"answer": "SUPPORTS", "provenance": [cited("101", FROZEN, 1)]}]
        ),
        task(
            "3302",
            "Tessa Varn was born in Lake Orrin.",
            [
                {"answer": "REFUTES", "provenance": [cited("102", BORN, 1)]},
                {
                    "answer": "REFUTES",
                    "provenance": [cited("102", "Tessa Varn was a novelist.", 0), cited("101", FROZEN, 1)],
                },
            ],
        ),
    ],
    "aidayago2-train-kilt": [
        linked(
            "a_947testa RANGERS:0", "FOOTBALL -", "RANGERS", "WIN AT HOME . Their coach praised the green team .", "105"
        ),
        linked(
            "b_947testa RANGERS:1",
            "The old town of",
            "Mirel",
            "burned down , a reporter wrote from the harbour .",
            "104",
        ),
    ],
    "wned-dev-kilt": [linked("c_Orrin:0", "Below the western ridge of Mount Hale lies", "Orrin", ", a lake .", "101")],
    "cweb-dev-kilt": [linked("d_clue:3", "We drank", "copper tea", "and ate bread by the sea .", "109")],
    "trex-train-kilt": [
        task(
            "t1",
            "The Glass Harbour [SEP] author",
            [
                {"answer": "Tessa Varn", "provenance": [at("103", "a novel by Tessa Varn")]},
                {"answer": "Varn"},
            ],
            {"subj_aliases": [], "sub_surface": ["The Glass Harbour"], "obj_surface": ["Tessa Varn", "Varn"]},
        ),
        task(
            "t2",
            "Mirel Rangers [SEP] head coach",
            [{"answer": "Harl Quint", "provenance": [at("105", KEEPER)]}],
            {"subj_aliases": ["Rangers"], "sub_surface": ["Mirel Rangers"], "obj_surface": ["Harl Quint"]},
        ),
    ],
    "structured_zeroshot-train-kilt": [
        task(
            "z1",
            "Tessa Varn [SEP] place of birth",
            [{"answer": "Port Mirel", "provenance": [at("102", BORN)]}],
            {"template_questions": ["Where was Tessa Varn born?"]},
        ),
        task(
            "z2",
            "salt bridge [SEP] material used",
            [{"answer": "oak", "provenance": [at("107", "It is made of oak")]}],
            {"template_questions": ["What is salt bridge made of?"]},
        ),
    ],
    "nq-train-kilt": [
        task(
            "-5004457603684974952",
            "when does the night ferry sail",
            [
                {"answer": "ten in the evening", "provenance": [at("108", "ten in the evening")]},
                {"answer": "at ten"},
                {
                    "provenance": [
                        at("108", "The night ferry is a ship that sails at ten in the evening.", bleu_score=0.9)
                    ]
                },
                {
                    "provenance": [
                        at(
                            "108",
                            "sails at ten",
                            start_character=-1,
                            end_character=-1,
                            bleu_score=-1.0,
                            meta={"evidence_span": ["sails at ten in the evening"]},
                        )
                    ]
                },
            ],
        ),
        task(
            "77",
            "where does the mirel reach the sea",
            [{"answer": "Port Mirel", "provenance": [at("111", "at Port Mirel")]}],
        ),
    ],
    "hotpotqa-train-kilt": [
        task(
            "5a7a06935542990198eaf050",
            "On which island was the coach of the Mirel Rangers born?",
            [
                {
                    "answer": "Hale",
                    "provenance": [
                        at("105", "Their coach is Harl Quint."),
                        at("112", "He was born on the island of Hale and keeps bees."),
                    ],
                }
            ],
            {"level": "medium", "type": "bridge"},
        ),
        task(
            "5a8b57f25542995d1e6f1371",
            "Which lake lies below the mountain of 1,240 metres?",
            [
                {
                    "answer": "Lake Orrin",
                    "provenance": [
                        at("110", "Mount Hale is a mountain of 1,240 metres."),
                        at("101", "a mountain lake"),
                    ],
                }
            ],
            {"level": "hard", "type": "bridge"},
        ),
    ],
    "triviaqa-train-kilt": [
        task(
            "tc_33",
            "What does the dune fox hunt?",
            [{"answer": "Beetles", "provenance": [at("106", "hunts beetles at night")]}, {"answer": "Beetle"}],
        ),
        task(
            "qw_1021",
            "Who is the coach of the Mirel Rangers?",
            [{"answer": "Harl Quint", "provenance": [at("105", KEEPER)]}, {"answer": "H. Quint"}],
        ),
    ],
    "eli5-train-kilt": [
        task(
            "1oy5tc",
            "Why does copper tea taste of bread?",
            [
                {"answer": "The barley in it is roasted for so long that it turns into a crust.", "meta": {"score": 7}},
                {"provenance": [at("109", "It tastes of bread because the barley is roasted for two hours.")]},
            ],
        ),
    ],
    "wow-train-kilt": [
        task(
            "w0",
            "I would love to visit the island of Hale.\nHow do you get there?",
            [{"answer": "There is a ferry at night.", "provenance": [at("104", FERRY)]}],
        ),
        task(
            "w1",
            "I like foxes.\nMe too, which one?\nThe one with large ears.",
            [{"answer": "That is the dune fox.", "provenance": [at("106", "a small fox with large ears")]}],
        ),
    ],
}


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_kilt(folder: Path) -> dict[str, Path]:
    """Writes the knowledge source and all task files; returns the files by their names without endings.

    The tasks with a train file have a dev file too, with the same queries.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks = TASKS | {name.replace("-train-", "-dev-"): rows for name, rows in TASKS.items()}
    files = {name: write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in tasks.items()}
    files["kilt_knowledgesource"] = write_jsonl(folder / "kilt_knowledgesource.json", PAGES)
    hidden = [{"id": row["id"], "input": row["input"]} for row in TASKS["fever-train-kilt"]]
    files["fever-test"] = write_jsonl(folder / "fever-test_without_answers-kilt.jsonl", hidden)
    for split, fields in (("train_id", ("id", "output")), ("test_id_without_answers", ("id",))):
        rows = [{name: row[name] for name in fields} for row in TASKS["triviaqa-train-kilt"]]
        files[f"triviaqa-{split}"] = write_jsonl(folder / f"triviaqa-{split}-kilt.jsonl", rows)
    return files
