"""The store of the Python API, with methods that make, read, search and measure artifacts."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from riptide.base.arguments import closest_name, plain_value, refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, list_first
from riptide.indexing.storage.cache import NodeCache
from riptide.jobs.api.making import Making
from riptide.jobs.api.parameters import check_name, named_parameters, path_text, plain_argument

if TYPE_CHECKING:
    from riptide.indexing.corpus.corpus import Corpus
    from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
    from riptide.indexing.hit_sources.search_options import By
    from riptide.indexing.queries.queries import Queries
    from riptide.indexing.store.artifact import Artifact
    from riptide.jobs.api.keywords import (
        CompareKeywords,
        EvaluateKeywords,
        JudgeKeywords,
        ReplayKeywords,
        SearchQueriesKeywords,
    )
    from riptide.jobs.api.open_search import Search
    from riptide.jobs.api.stored_run import Run
    from riptide.jobs.comparison.comparison import Comparison
    from riptide.jobs.evaluation.evaluation import Evaluation
    from riptide.jobs.judging.judging import Judging
    from riptide.jobs.replay import Replayed
    from riptide.retriever.options import EncoderPrecision

    Measured = str | os.PathLike[str] | Run


@refuse_unknown_names
class Store(Making):
    """A store of artifacts: a local folder, or a prefix of a bucket in a cloud.

    Args:
        url: The folder, or `s3://`, `gs://` or `az://bucket/prefix`.
        cache: The cache of files of this machine; default: the one of all stores.
        verbose: Print the lines that the jobs print.
    """

    def __init__(self, url: str | os.PathLike[str], *, cache: NodeCache | None = None, verbose: bool = False):
        if not isinstance(url, str | os.PathLike):
            raise InputError(f"url: found {url!r}, expected a folder or s3://bucket/prefix")
        super().__init__(os.fspath(url), cache=cache)
        self.verbose = verbose

    def __dir__(self) -> list[str]:
        """Returns the names of the public API, without internal names of the base class."""
        methods = {name for cls in (Making, Store) for name in vars(cls) if not name.startswith("_")}
        return sorted(methods | {"cache", "keys", "names", "open", "url"})

    def corpus(self) -> Corpus:
        """Opens the corpus. `len(corpus)`, `corpus["id"]`, `"id" in corpus` and iteration leave out deleted passages.

        Raises:
            InputError: If the store has no complete corpus.
        """
        from riptide.indexing.corpus.corpus import Corpus

        with named_parameters():
            return Corpus.open(self)

    def remove(self, key: str, *, with_dependents: bool = False) -> int:
        """Removes an artifact: "corpus", "index/minilm", "runs/NAME".

        Args:
            key: The key, as `riptide store list` prints it; without a generation, all of them.
            with_dependents: Also remove everything that was made from it.

        Returns:
            The bytes freed.

        Raises:
            InputError: If there is no such artifact, or if another one needs it.
        """
        with named_parameters():
            check_name("key", key)
            return super().remove(key, with_dependents=with_dependents)

    def copy_to(self, to: str | os.PathLike[str], key: str | None = None, *, verify: bool = False) -> list[str]:
        """Copies artifacts to another store, for a backup: the job `riptide store copy`. A repeated call resumes it.

        riptide.Store("data/squad").copy_to("s3://bucket/squad")

        Args:
            to: The other store.
            key: The artifact, with all that it was made from; None: all complete ones, and the record of the live
                release.
            verify: Also hash the artifacts that the other store has already.

        Returns:
            The keys of the copied artifacts, without those that the other store had.

        Raises:
            InputError: If there is no such artifact, or if the other store has another one under its name.
        """
        from riptide.jobs.store_actions.store_options import StoreJob
        from riptide.jobs.store_actions.transfer import copy_store

        with self._in_job() as store:
            check_name("key", key)
            options = StoreJob(store=self.url, action="copy", to=path_text("to", to), verify=verify)
            return copy_store(store.require_not_empty(), (key or "").strip("/"), options)

    def import_model(self, model: str | os.PathLike[str], *, name: str) -> Artifact:
        """Stores a model, so that nodes need no hub: the job `riptide store import-model`.

        store.import_model("intfloat/e5-large-v2", name="e5")

        Args:
            model: A Hugging Face name, or a folder that save_pretrained wrote.
            name: Its name: every parameter that names a model takes models/NAME.

        Returns:
            The model.

        Raises:
            InputError: If it is no model with safetensors, or if another one has this name.
        """
        from riptide.jobs.store_actions.store_options import StoreJob
        from riptide.jobs.store_actions.transfer import import_model

        with self._in_job() as store:
            check_name("name", name)
            folder = path_text("model", model)
            import_model(store, StoreJob(store=self.url, action="import-model", model=folder, name=name))
            return store.open("models", name)

    def queries(self, name: str | None = None) -> Queries:
        """Opens a query set, whose `split("test")` has the ids and the texts of a split, and `qrels` its judgements.

        Args:
            name: Its name; None: the only one of the store.

        Raises:
            InputError: If it is missing.
        """
        from riptide.indexing.queries.queries import Queries

        with named_parameters():
            check_name("name", name)
            return Queries.open(self, self.only_name("queries", name, choice=f"{Parameter('name', 'NAME')}"))

    def embeddings(self, name: str | None = None) -> EmbeddingsReader:
        """Opens embeddings; `encoder()` returns an encoder with the settings of these embeddings.

        store.embeddings("minilm").encoder().encode(["what is a rip current?"], side="query")

        Args:
            name: Their name; None: the only ones of the store.

        Raises:
            InputError: If they are missing, or do not cover the corpus.
        """
        with named_parameters():
            check_name("name", name)
            return self._open_embeddings(self.only_name("embeddings", name, choice=f"{Parameter('name', 'NAME')}"))

    def search(
        self,
        source: str | None = None,
        *,
        embeddings: str | None = None,
        index: str | None = None,
        rerank: str | os.PathLike[str] | None = None,
        rerank_depth: int | None = None,
        rerank_dtype: EncoderPrecision = "auto",
        by: By | None = None,
        encoder: str | os.PathLike[str] | None = None,
        task: str | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
        depth: int | None = None,
    ) -> Search:
        """Opens a search source, which answers any number of queries in this process.

        with store.search("hybrid") as search:
            hits = search("who wrote Dracula?", k=10, filter="year >= 1900")

        Args:
            source: A mode (hybrid, dense, exact, bm25) or a source, such as "0.4*bm25+0.6*exact:minilm"; None: the
                first that the store has of hybrid, dense, exact, bm25 and a SPLADE index.
            embeddings: Name of dense embeddings, for a mode; None: the only ones.
            index: Name of a FAISS index, for a mode; None: the only one.
            rerank: Re-rank the first hits with this cross-encoder: a Hugging Face name, a folder, or models/NAME.
            rerank_depth: Number of hits that it re-ranks; None: 100.
            rerank_dtype: The dtype of its matrix products. "auto": bfloat16 on CUDA; on a CPU, the faster of bfloat16
                and float32. "int8": for BERT-family models on a CPU; faster, and less exact.
            by: What a hit is in a corpus of split documents: "document" (default) or "passage".
            encoder: Where the encoder of queries is now; None: where it was when the corpus was encoded.
            task: Tuned task of the queries; None: the one that the corpus was encoded for, if any.
            nprobe: Lists of an index that are probed per query; None: the number that its build measured.
            ef_search: Vectors that a search keeps in each graph of an HNSW index; None: the number that its build
                measured.
            depth: Candidates per shard of an index that are scored again; None: the number that its build measured.

        Raises:
            InputError: If an artifact is missing or does not fit the others, or if a setting has no effect.
        """
        from riptide.indexing.hit_sources.search_options import SearchOptions
        from riptide.indexing.store.model_artifacts import resolve_task
        from riptide.jobs.api.open_search import Search
        from riptide.jobs.common.session import num_gpus

        rerank, encoder = (os.fspath(each) if isinstance(each, os.PathLike) else each for each in (rerank, encoder))
        rerank_depth, nprobe, ef_search, depth = map(plain_value, (rerank_depth, nprobe, ef_search, depth))
        with named_parameters():
            self.require_not_empty()
            check_name("task", task)
            task = None if task is None else resolve_task(self, task)
            options = SearchOptions(encoder=encoder, task=task, nprobe=nprobe, ef_search=ef_search, depth=depth)
            return Search(
                self,
                source,
                embeddings=embeddings,
                index=index,
                rerank=rerank,
                rerank_depth=rerank_depth,
                rerank_dtype=rerank_dtype,
                by=by,
                settings=options,
                gpus=num_gpus(),
            )

    def search_queries(
        self, source: str | None = None, *, name: str | None = None, **options: Unpack[SearchQueriesKeywords]
    ) -> Run:
        """Searches all queries of a split: the job `riptide search`. A complete run is not made again.

        store.search_queries("hybrid", split="test", name="hybrid").to_pandas()

        Args:
            source: As of `search`.
            name: Name of the run in the store; default: queries-split-source.
            options: Options of `riptide search`: queries, split, k, filter, rerank, task, ….

        Returns:
            The run.
        """
        from riptide.jobs.api.stored_run import Run

        if isinstance(options.get("filter"), Mapping):
            options["filter"] = json.dumps(plain_argument("filter", options["filter"]), default=repr)
        return Run(self, self._run_job("search_queries", {"source": source, "name": name, **options}))

    def evaluate(self, runs: Measured | Iterable[Measured], **options: Unpack[EvaluateKeywords]) -> Evaluation:
        """Measures runs against judgements, with a paired test of each against the first one.

        store.evaluate(["bm25", "hybrid"], split="test", metrics=["nDCG@10", "R@100"]).to_pandas()

        Args:
            runs: A run or several: a file of TREC or of JSON lines, the name of a run in the store, a `Run`, or a
                source, which is searched first. A name that is both a run and a source is the run.
            options: Options of `riptide evaluate`: queries, split, metrics, relevance, median_length, limit, ….

        Returns:
            The means, the values per query and the p-values, by the names that were given.

        Raises:
            InputError: If a run, a source or a metric does not exist, or does not fit the queries.
        """
        from riptide.jobs.evaluation.evaluating import measure_runs, open_evaluation

        measured = [runs] if isinstance(runs, str) or not isinstance(runs, Iterable) else list(runs)
        if not measured:
            raise InputError("evaluate: expected at least one run, file or source")
        with named_parameters():
            self.require_not_empty()
        titles = [self._run_name(each, "evaluate") for each in measured]
        if repeated := next((title for title in titles if titles.count(title) > 1), None):
            raise InputError(f"evaluate: {repeated!r} is given twice; leave one of them out")
        stored = set(self.names("runs"))
        sources = [title for title in titles if title not in stored and not Path(title).is_file()]
        for title in sources:
            self._check_source(title, stored)
        others = [title for title in titles if title not in sources]
        metrics = options.get("metrics")
        options |= {"metrics": [metrics] if isinstance(metrics, str) else metrics}
        with self._open_job("evaluate", options) as (store, read):
            work = open_evaluation(store, replace(read, run=tuple(others), source=tuple(sources)))
            named = dict(zip([*others, *sources], work.runs, strict=True))
            work.runs = [replace(named[title], title=title) for title in titles]
            work.search()
            return measure_runs(work)

    def compare(self, first: Measured, second: Measured, **options: Unpack[CompareKeywords]) -> Comparison:
        """Compares two runs for the queries of a split: means, tests, and a row per query.

        comparison = store.compare("bm25", "hybrid", metrics=["nDCG@10"])
        comparison.to_pandas()
        comparison.write_page("results/bm25-hybrid.html")

        Args:
            first: The baseline: a file of TREC or of JSON lines, the name of a run in the store, or a `Run`.
            second: The run that is compared with it.
            options: Options of `riptide compare`: queries, split, metrics, limit.

        Returns:
            The comparison.

        Raises:
            InputError: If a run is missing, if the runs are over other queries, or if a metric or a split is unknown.
        """
        from riptide.jobs.comparison.comparing import compare

        with named_parameters():
            self.require_not_empty()
        runs = [self._run_name(each, "compare") for each in (first, second)]
        metrics = options.get("metrics")
        options |= {"metrics": [metrics] if isinstance(metrics, str) else metrics}
        with self._open_job("compare", {"first": runs[0], "second": runs[1], **options}) as (store, read):
            return compare(store, read)

    def judge(self, first: Measured, second: Measured, **options: Unpack[JudgeKeywords]) -> Judging:
        """Compares two runs by few verdicts of people: the job `riptide judge`.

        judging = store.judge("bm25", "hybrid")  # writes a page with the passages to judge
        judging = store.judge("bm25", "hybrid", verdicts=["verdicts.jsonl"])
        judging.decision, judging.estimate, judging.num_needed

        Args:
            first: The baseline: a file of TREC or of JSON lines, the name of a run in the store, or a `Run`.
            second: The run that is compared with it.
            options: Options of `riptide judge`: verdicts, model_verdicts, measure, margin, folder, ….

        Returns:
            The difference so far, and the number of verdicts that is still needed.

        Raises:
            InputError: If a run is missing, if the runs are over other queries or have the same hits, or for verdicts
                that are malformed, on unknown pairs, or that contradict each other.
        """
        from riptide.jobs.judging.judging import judge, open_judging

        with named_parameters():
            self.require_not_empty()
        runs = [self._run_name(each, "judge") for each in (first, second)]
        with self._open_job("judge", {"first": runs[0], "second": runs[1], **options}) as (store, read):
            return judge(open_judging(store, read))

    def replay(self, requests: str | os.PathLike[str], **options: Unpack[ReplayKeywords]) -> Replayed:
        """Sends saved requests again, and compares their hits with the saved ones: the job `riptide replay`.

        assert not store.replay("requests.jsonl").changed

        Args:
            requests: A file of JSON lines with requests and their hits, as the page of a server saves them.
            options: Options of `riptide replay`: release, url, write, overwrite, limit. With `url`, for example that
                of a Client, the server answers instead of a release of this store.

        Returns:
            The release that answered, and the requests with their current hits and differences.

        Raises:
            InputError: If a file or a release is missing or malformed, or if a request fails.
        """
        from riptide.jobs.replay import open_replay, replay

        with self._open_job("replay", {"requests": path_text("requests", requests), **options}) as (_, read):
            if read.url:
                read = replace(read, store="")
            if not _has_event_loop():
                return replay(read, *open_replay(read))
            with ThreadPoolExecutor(1) as pool:
                context = contextvars.copy_context()
                return pool.submit(context.run, lambda: replay(read, *open_replay(read))).result()

    def _run_name(self, run: Any, method: str) -> str:
        """Returns the name of a run of the store, or the path of a run file.

        Raises:
            InputError: If it is no run, or if it is a `Run` that is not in this store.
        """
        from riptide.jobs.api.stored_run import Run

        if isinstance(run, str | os.PathLike):
            return str(os.fspath(run))
        if not isinstance(run, Run):
            raise InputError(f"{method}: found {type(run).__name__}, expected a run: a name, a file or a Run")
        with named_parameters():
            stored = self.open("runs", run.name)
        if stored.fingerprint != run.artifact.fingerprint:
            raise InputError(
                f"{method}: found a run of {run.artifact.url}: {stored.url} is another one; give a run of this store, "
                "or a file of the other one"
            )
        return run.name

    def _check_source(self, source: str, runs: Collection[str]) -> None:
        """Raises InputError for a name that is neither a source in the grammar nor a run."""
        from riptide.indexing.hit_sources.grammar import parse_source
        from riptide.indexing.hit_sources.modes import check_word, find_mode

        if find_mode(source) is None:
            try:
                check_word(source)
                parse_source(source)
            except InputError as error:
                close = closest_name(source, runs)
                remedy = f"; did you mean the run {close!r}?" if close else ""
                listed = list_first(sorted(runs)) or "none"
                raise InputError(
                    f"{source!r}: no run of {self.url} (runs: {listed}), no file, and no {error}{remedy}"
                ) from None


def _has_event_loop() -> bool:
    """Returns whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
