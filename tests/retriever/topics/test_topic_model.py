"""Topic models: inference against the equation in float64, their saved form and what it refuses; words that count."""

import math
from dataclasses import replace

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.retriever.topics.model import NO_TOPIC, TopicModel
from riptide.retriever.topics.words import STOP_WORDS, topic_words

VOCABULARY = ("cell", "galaxy", "gene", "naïve", "protein", "star")


def make_model(seed: int = 0, paths: int = 5) -> TopicModel:
    """Returns a random model of three topics; several paths belong to one topic."""
    random = np.random.default_rng(seed)
    log_words = np.log(random.dirichlet(np.full(len(VOCABULARY), 0.3), paths)).astype(np.float32)
    log_prior = np.log(random.dirichlet(np.ones(paths))).astype(np.float32)
    return TopicModel(
        VOCABULARY,
        (("star", "galaxy"), ("gene",), ("protein", "cell", "gene")),
        np.arange(paths, dtype=np.int64) % 3,
        log_prior,
        log_words,
    )


def test_infers_the_most_probable_path() -> None:
    model = make_model()
    random = np.random.default_rng(1)
    texts = [" ".join(random.choice(VOCABULARY, random.integers(1, 9))) for _ in range(60)]
    expected = []
    for text in texts:
        numbers = [VOCABULARY.index(word) for word in text.split()]
        scores = [math.fsum([model.log_prior[c], *(model.log_words[c, n] for n in numbers)]) for c in range(5)]
        expected.append(int(model.path_topics[scores.index(max(scores))]))
    assert model.infer(texts).tolist() == expected
    assert len(set(expected)) == 3, "the case is too easy: some topic is never inferred"
    assert model.infer(texts).dtype == np.int64


def test_unknown_words_do_not_count() -> None:
    model = make_model()
    assert model.infer(["The GENE, of: unheard-of things!"]).tolist() == model.infer(["gene"]).tolist()
    assert model.infer(["", "nothing of it", "42 🙂"]).tolist() == [NO_TOPIC] * 3
    assert model.infer([]).shape == (0,)


def test_saved_form_returns_the_same_model() -> None:
    model = make_model()
    again = TopicModel.from_arrays(model.arrays_by_name(), model.json_fields(), "prompt.json")
    assert again.vocabulary == model.vocabulary
    assert again.words == model.words
    assert again.fingerprint() == model.fingerprint()
    assert again.infer(["star gene", "cell"]).tolist() == model.infer(["star gene", "cell"]).tolist()


def test_fingerprint_covers_all_content() -> None:
    model = make_model()
    changed = [
        replace(model, vocabulary=(*VOCABULARY[:-1], "stars")),
        replace(model, words=(model.words[0], model.words[2], model.words[1])),
        replace(model, path_topics=model.path_topics[::-1].copy()),
        replace(model, log_prior=np.nextafter(model.log_prior, np.float32(0))),
        replace(model, log_words=np.nextafter(model.log_words, np.float32(0))),
    ]
    assert len({model.fingerprint(), *(each.fingerprint() for each in changed)}) == 6


@pytest.mark.parametrize(
    ("named", "settings", "message"),
    [
        ({"log_prior": None}, {}, "holds log_words, path_topics, vocabulary: expected log_prior"),
        ({"more": np.zeros(1)}, {}, "holds log_prior, log_words, more"),
        ({"log_words": np.zeros((5, 6))}, {}, "log_words is float64, expected float32"),
        ({"log_words": np.zeros((5, 7), np.float32)}, {}, r"log_words is float32 \(5, 7\), expected float32 \(5, 6\)"),
        ({"log_prior": np.full(5, np.nan, np.float32)}, {}, "log_prior holds numbers that are not finite"),
        ({"path_topics": np.array([0, 1, 2, 3, 0])}, {}, "path_topics: expected topics from 0 to 2"),
        ({"path_topics": np.array([0, 1, 2, -1, 0])}, {}, "path_topics: expected topics from 0 to 2"),
        ({"path_topics": np.zeros((5, 1), np.int64)}, {}, r"path_topics is int64 \(5, 1\)"),
        ({"vocabulary": np.frombuffer(b"a\nb\nc\nd\ne\na", np.uint8)}, {}, "vocabulary: expected at least one word"),
        ({"vocabulary": np.frombuffer(b"a\nb\nc\nd\n\xff\nf", np.uint8)}, {}, "vocabulary: not UTF-8"),
        ({"vocabulary": np.full(1 << 20, 10, np.uint8)}, {}, "vocabulary: 1,048,577 words, expected up to 1,048,576"),
        ({}, {"words": [["star"], [], ["gene"]]}, "words: expected a list of words for each topic"),
        ({}, {"words": [["star"], [7], ["gene"]]}, "words: expected a list of words for each topic"),
        ({}, {"words": "star"}, "words: expected a list of words for each topic, got .star"),
        ({}, {"other": 1}, "expected an object with the field words"),
    ],
)
def test_damaged_files_are_refused(named: dict, settings: dict, message: str) -> None:
    model = make_model()
    arrays = {name: array for name, array in (model.arrays_by_name() | named).items() if array is not None}
    with pytest.raises(InputError, match=rf"^prompt\.json: topic model: .*{message}"):
        TopicModel.from_arrays(
            arrays, (model.json_fields() | settings) if "other" not in settings else settings, "prompt.json"
        )


def test_words_are_letters_in_lower_case() -> None:
    words = topic_words("Deep-Learning's 3D results: café, cafe\u0301, ab, x_ray; GANs!")
    assert words == ["deep", "learning", "results", "café", "café", "ray", "gans"]
    assert topic_words("He doesn't, and it isn't of the kind that they were.") == ["kind"]
    assert all(len(word) >= 3 and word.isalpha() and word.islower() for word in STOP_WORDS)
