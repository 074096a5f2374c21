"""A dev pool with hits of BM25: its passages, its refusals, its plan, and that a run with one repeats and resumes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_sets import make_foreign_store
from interruption import interrupt_at
from mined import weights
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.indexing.training.dev_splits import open_dev_pairs, open_dev_set
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.work.local_runner import LocalRunner
from riptide.jobs.commands.command_line import UsageError, parse_arguments
from riptide.jobs.common.flat_options import build_options
from riptide.jobs.training.opening import open_retriever_setup
from riptide.jobs.training.run_options import DevPool
from riptide.jobs.training.training_options import PretrainRip, TrainRetriever

Done = Callable[..., str]
DEV = ("--dev-split", "test", "--dev-limit", 9, "--evaluate-every", 2, "--dev-passages", "40+hard:5")


@pytest.mark.parametrize(("text", "size", "hits"), [("40", 40, 0), ("hard:5", 2000, 5), ("40+hard:5", 40, 5)])
def test_a_pool_is_a_number_or_hits_or_both(text: str, size: int, hits: int) -> None:
    pool = DevPool(text)
    assert (str(pool), pool.size, pool.hits_per_query) == (text, size, hits)
    assert pickle.loads(pickle.dumps(pool)).hits_per_query == hits
    assert DevPool(40) == "40"


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "hard", "hard:", "hard:0", "+hard:5", "40+", "40hard:5", "4.5", "5+40"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_arguments(PretrainRip, ["--store", "s", "--backbone", "b", f"--dev-passages={text}"])
    expected = "expected a number of passages, hard:N or N+hard:N, each number at least 1"
    assert str(raised.value) == f"--dev-passages {text}: {expected}"


def test_the_pool_has_the_random_passages_and_the_hits_of_each_query(world, mined: Store, done: Done) -> None:
    """The hits are those of `search`, and the quality of a run is that over exactly these passages."""
    done("build_bm25", "--store", world.store)
    words = ("--mode", "bm25", "--split", "test", "--limit", 9, "--k", 5, "--name", "words")
    done("search", "--store", world.store, *words)
    corpus = Corpus.open(mined)
    found = [id for table in read_run(mined.open("runs", "words")) for id in table["id"].to_pylist()]
    named = {"store": str(world.store), "backbone": world.model, "negatives": "hand", "task": "t", "train": "prompts"}
    dev = {"length": 4, "dev_split": "test", "dev_limit": 9, "dev_passages": DevPool("40+hard:5")}
    setup = open_retriever_setup(mined, build_options(TrainRetriever, {**named, **dev}))
    assert setup.dev_hits is not None
    [hits] = (each.search(LocalRunner()) for each in setup.dev_hits)
    assert hits.tolist() == np.unique(corpus.rows_of(found)).tolist()
    maker = replace(setup.maker, dev_hits=(hits,))
    system, evaluate, _ = maker.make(device=torch.device("cpu"), dtype=torch.float32, rank=0, world=1)

    def join(titles: list[str], texts: list[str]) -> list[str]:
        return system.tokenizer.compose(titles, texts, system.encoder.title)

    pairs = open_dev_pairs(corpus, Queries.open(mined), "test", 9, ProcessCache())
    random_pool = open_dev_set(corpus, pairs, 40, join)
    pool = open_dev_set(corpus, pairs, 40, join, hits=hits)
    added = {join([each.title], [each.text])[0] for each in corpus.passages(hits)}
    assert len(random_pool.texts) == 40
    assert not added <= {*random_pool.texts}
    assert sorted(pool.texts) == sorted({*random_pool.texts, *added})
    for positives, rows in zip(pool.positives, pairs.rows, strict=True):
        relevant = [join([each.title], [each.text])[0] for each in corpus.passages(np.sort(rows))]
        assert [pool.texts[place] for place in positives] == relevant
    assert evaluate is not None
    assert evaluate() == pool.mrr(system)


@pytest.mark.parametrize(("form", "kind"), [(TUNE, "prompts"), (RIP, "models")])
def test_a_run_with_hits_records_them_repeats_and_resumes(
    world, mined: Store, done: Done, job, refused: Done, monkeypatch: pytest.MonkeyPatch, form: tuple, kind: str
) -> None:
    done("build_bm25", "--store", world.store)
    more = (*DEV, "--steps", 4, "--checkpoint-every", 2)
    passages = "40 passages, relevant ones and random others, and the first 5 hits of BM25 for each"
    assert f"dev       9 queries of test in {passages}\n" in done(*command(form, world, "whole", *more, "--plan"))
    done(*command(form, world, "whole", *more))
    artifact = mined.open(kind, "whole")
    assert artifact.config["dev"] == {"split": "test", "limit": 9, "passages": 40, "hard": 5}
    assert artifact.inputs["dev_bm25/0"]["artifact"] == "bm25/bm25/g0000"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert job(*command(form, world, "cut", *more)).status == 130
    done(*command(form, world, "cut", *more))
    assert mined.open(kind, "cut").notes == artifact.notes
    assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
    assert "dev.hard 5, now 6" in refused(*command(form, world, "whole", *more, "--dev-passages", "40+hard:6"))
    assert "nothing to make" in done(*command(form, world, "whole", *more, "--plan"))


def test_hits_need_an_index_in_the_store_of_each_dev_split(
    world, mined: Store, done: Done, refused: Done, documented: Callable[..., None], tmp_path: Path
) -> None:
    foreign = make_foreign_store(tmp_path, world.model, done)
    for form in (TUNE, RIP):
        for plan in (("--plan",), ()):
            line = refused(*command(form, world, "x", *DEV, "--steps", 2, *plan))
            assert line.startswith(f"error: --dev-passages hard:5: {world.store}/bm25: there is no such artifact")
            assert "riptide build-bm25" in line
        line = line.replace(str(world.store), "…/store")
        documented("Training", f"{form[0]} --dev-passages hard:5 without a BM25 index", line, 1)
    done("build_bm25", "--store", world.store)
    also = ("--queries", "tiny", "--also-train", f"queries=foreign,store={foreign.path},dev=train")
    line = refused(*command(TUNE, world, "x", *DEV, "--steps", 2, *also))
    assert line.startswith(f"error: --dev-passages hard:5: {foreign.path}/bm25: there is no such artifact")
    assert mined.names("prompts") == mined.names("models") == mined.incomplete_keys() == []


def test_hits_need_a_dev_split_and_no_reranker(
    world, mined: Store, refused: Done, documented: Callable[..., None]
) -> None:
    line = refused(*command(RIP, world, "x", "--steps", 2, "--dev-passages", "hard:5"))
    assert line == "error: --dev-passages hard:5: expected --dev-split too, whose queries have the hits"
    line = refused(*command(RERANK, world, "x", "--steps", 2, *DEV))
    documented("Training", "train_reranker --dev-passages hard:5", line, 1)
    assert line == (
        "error: --dev-passages 40+hard:5: a re-ranker orders the mined negatives of each query: expected a number of "
        "passages; mine hits of BM25 for --dev-negatives"
    )
