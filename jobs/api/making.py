"""The methods of a store that make artifacts: each runs a job and takes the options of the job as parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import riptide.indexing.store.store
from riptide.base.errors import InputError
from riptide.indexing.store.artifact import Artifact
from riptide.jobs.api.parameters import METHODS, PYTHON, Parameters, named_parameters
from riptide.jobs.common.printing import print_only_warnings

if TYPE_CHECKING:
    from riptide.indexing.corpus.corpus import Corpus
    from riptide.indexing.dense.index import Index
    from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
    from riptide.indexing.lucene.bm25_index import Bm25
    from riptide.indexing.queries.queries import Queries
    from riptide.indexing.sparse.index import ImpactIndex
    from riptide.indexing.topics.topics_reader import Topics
    from riptide.jobs.api.keywords import (
        BuildBm25Keywords,
        BuildIndexKeywords,
        EncodeCorpusKeywords,
        FitTopicsKeywords,
        ImportCorpusKeywords,
        ImportQueriesKeywords,
        MigrateKeywords,
        MineNegativesKeywords,
        PretrainRipKeywords,
        ServeKeywords,
        TrainRerankerKeywords,
        TrainRetrieverKeywords,
        TunePromptsKeywords,
    )
    from riptide.jobs.api.trained import Trained
    from riptide.serve.client import Client


class Making(riptide.indexing.store.store.Store):
    """The methods of a store that make artifacts; each has the name and the options of its job.

    Every method takes the options of its job as keyword arguments, with underscores: `describe_options(METHOD)` returns
    them with their defaults and their help. A call that is repeated makes nothing twice, and one that was interrupted
    is resumed by the same call. Each raises InputError, in one line, for bad input; then nothing half done remains.

    Attributes:
        verbose: Whether the methods print the lines that the jobs print; otherwise they print warnings only, to stderr.
    """

    verbose: bool = False

    @staticmethod
    def describe_options(method: str) -> str:
        """Returns a description of the parameters of a method, for example of "encode_corpus".

        Raises:
            InputError: If there is no such method.
        """
        return _parameters_of(method).describe()

    def import_corpus(self, source: Any = None, **options: Unpack[ImportCorpusKeywords]) -> Corpus:
        """Imports a corpus with its queries and judgements; adds passages, or deletes some.

        store.import_corpus("raw/scifact")
        store.import_corpus(frame, id="number", title="head", text="body", filters={"year": "int64"})
        store.import_corpus(more_rows, append=True)

        Args:
            source: A folder or a file, local or s3://, gs:// or az://; or rows: an iterable of dicts, or a table of
                pandas, polars or pyarrow. None: `delete`, `erase` or `filters` say what to do.
            options: Options of `riptide import-corpus`: id, title, text, metadata, filters, append, split_words, ….

        Returns:
            The whole corpus.
        """
        from riptide.indexing.corpus.corpus import Corpus

        self._run_import("import_corpus", source, options)
        return Corpus.open(self)

    def import_queries(
        self, source: Any, *, name: str | None = None, qrels: Any = None, **options: Unpack[ImportQueriesKeywords]
    ) -> Queries:
        """Imports queries, with judgements, over the corpus.

        store.import_queries("raw/nq/nq-dev.qa.csv", name="nq-dev")
        store.import_queries([{"id": "q1", "query": "who?", "passage_id": "p1"}], name="mine", split="dev")
        store.import_queries("asked.csv", qrels={"q1": {"p1": 2, "p7": 1}})

        Args:
            source: As of `import_corpus`.
            name: Name of the query set; default: that of the file or folder, so rows need one.
            qrels: Judgements, which replace those of the source: a file in the form of TREC or BEIR; a dict, query id
                -> passage id -> integer grade; or rows with the columns query_id, corpus_id and score.
            options: Options of `riptide import-queries`: id, text, relevant, score, split, ….

        Returns:
            The query set.
        """
        if name is None and not isinstance(source, str) and not hasattr(source, "__fspath__"):
            raise InputError("import_queries: name= is required with rows, which have no name of a file")
        from riptide.jobs.api.raw_rows import qrels_path

        with contextlib.ExitStack() as files:
            file = None if qrels is None else files.enter_context(qrels_path(qrels))
            queries: Queries = self._run_import("import_queries", source, {"name": name, "qrels": file, **options})
        return queries

    def encode_corpus(
        self, encoder: str | None = None, *, name: str | None = None, **options: Unpack[EncodeCorpusKeywords]
    ) -> EmbeddingsReader:
        """Encodes the corpus.

        store.encode_corpus("sentence-transformers/all-MiniLM-L6-v2", name="minilm")
        store.encode_corpus(task="squad")

        Args:
            encoder: A Hugging Face name, a folder, or models/NAME of the store; None: `task` names a trained task.
            name: Name of the embeddings; default: that of the task, or the last component of the encoder's.
            options: Options of `riptide encode-corpus`: task, pooling, passage_length, dtype, ….

        Returns:
            The embeddings.
        """
        artifact: Artifact = self._run_job("encode_corpus", {"encoder": encoder, "name": name, **options})
        return self._open_embeddings(_name_of(artifact))

    def build_index(
        self, embeddings: str | None = None, *, name: str | None = None, **options: Unpack[BuildIndexKeywords]
    ) -> Index | ImpactIndex:
        """Builds an index of embeddings.

        store.build_index("minilm", shards=2)

        Args:
            embeddings: Name of the embeddings; None: the only ones of the store.
            name: Name of the index; default: that of the embeddings.
            options: Options of `riptide build-index`: factory, recall, memory_gb, shards, ….

        Returns:
            The index.
        """
        from riptide.indexing.dense.index import Index
        from riptide.indexing.embeddings.dense_embeddings import Embeddings
        from riptide.indexing.sparse.index import ImpactIndex
        from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings

        artifact: Artifact = self._run_job("build_index", {"embeddings": embeddings, "name": name, **options})
        vectors = self._open_embeddings(artifact.config["embeddings"])
        if isinstance(vectors, SparseEmbeddings):
            return ImpactIndex.open(self, _name_of(artifact), vectors)
        assert isinstance(vectors, Embeddings)
        return Index.open(self, _name_of(artifact), vectors)

    def build_bm25(self, **options: Unpack[BuildBm25Keywords]) -> Bm25:
        """Builds a Lucene index of the corpus for BM25.

        store.build_bm25()

        Args:
            options: Options of `riptide build-bm25`: name, k1, b, language, shards, ….

        Returns:
            The index.
        """
        from riptide.indexing.corpus.corpus import Corpus
        from riptide.indexing.lucene.bm25_index import Bm25

        artifact: Artifact = self._run_job("build_bm25", options)
        return Bm25.open(self, _name_of(artifact), Corpus.open(self))

    def fit_topics(self, **options: Unpack[FitTopicsKeywords]) -> Topics:
        """Fits topics to the corpus; for added passages, infers their topics.

        store.fit_topics(name="arxiv", page="arxiv-topics.html")

        Args:
            options: Options of `riptide fit-topics`: name, method, topics, page, ….

        Returns:
            The topics.
        """
        topics: Topics = self._run_job("fit_topics", options)
        return topics

    def mine_negatives(
        self, sources: Any = None, *, name: str | None = None, **options: Unpack[MineNegativesKeywords]
    ) -> Artifact:
        """Mines hard negatives for the queries of a split.

        store.mine_negatives(["bm25", "exact:minilm"], name="hard", split="train", depth=200)

        Args:
            sources: The sources of hits, as search takes them.
            name: Name of the negatives; default: that of the pool, queries-split-sources.
            options: Options of `riptide mine-negatives`: queries, split, depth, reranker, ….

        Returns:
            The negatives.
        """
        artifact: Artifact = self._run_job("mine_negatives", {"sources": sources, "name": name, **options})
        return artifact

    def train_retriever(
        self, task: str | None = None, backbone: str | None = None, **options: Unpack[TrainRetrieverKeywords]
    ) -> Trained:
        """Trains a retriever: deep prompts or LoRA over a frozen backbone, or all weights.

        store.train_retriever("squad", "sentence-transformers/all-MiniLM-L6-v2", train="prompts", dev_split="dev")

        Args:
            task: Name of the task.
            backbone: A Hugging Face name, a folder, or models/NAME of the store.
            options: Options of `riptide train-retriever`: train, negatives, dev_split, lr, epochs, ….

        Returns:
            The key of prompts/TASK, models/TASK or sweeps/TASK, and the quality before and after.
        """
        return self._run_training("train_retriever", {"task": task, "backbone": backbone, **options})

    def tune_prompts(
        self, task: str | None = None, backbone: str | None = None, **options: Unpack[TunePromptsKeywords]
    ) -> Trained:
        """Trains a prompt for a task: train_retriever with other defaults and option names.

        store.tune_prompts("squad", "sentence-transformers/all-MiniLM-L6-v2", negatives="bm25", length=32, lr=7e-3)

        Args:
            task: Name of the task.
            backbone: As of `train_retriever`.
            options: Options of `riptide tune-prompts`: length, negatives, dev_split, lr, epochs, ….

        Returns:
            As `train_retriever`.
        """
        return self._run_training("tune_prompts", {"task": task, "backbone": backbone, **options})

    def train_reranker(
        self, backbone: str | None = None, *, name: str | None = None, **options: Unpack[TrainRerankerKeywords]
    ) -> Trained:
        """Trains a cross-encoder on mined negatives, for re-ranking.

        store.train_reranker("sentence-transformers/all-MiniLM-L6-v2", name="reranker", negatives="bm25")

        Args:
            backbone: As of `train_retriever`.
            name: Name of the model; default: the last part of the backbone's name, with -reranker appended.
            options: Options of `riptide train-reranker`: negatives, split, dev_split, lr, epochs, ….

        Returns:
            The key of models/NAME, and the quality before and after.
        """
        return self._run_training("train_reranker", {"backbone": backbone, "name": name, **options})

    def pretrain_rip(
        self, backbone: str | None = None, *, name: str | None = None, **options: Unpack[PretrainRipKeywords]
    ) -> Trained:
        """Pretrains a backbone on the corpus: RIP, Condenser, coCondenser or plain MLM.

        store.pretrain_rip("google-bert/bert-base-uncased", name="rip")

        Args:
            backbone: As of `train_retriever`.
            name: Name of the model; default: the last part of the backbone's name, with the objective appended.
            options: Options of `riptide pretrain-rip`: objective, train, batch, dev_split, ….

        Returns:
            The key of models/NAME or prompts/NAME, and the quality before and after.
        """
        return self._run_training("pretrain_rip", {"backbone": backbone, "name": name, **options})

    def migrate(self, to: str | None = None, **options: Unpack[MigrateKeywords]) -> dict[str, Any]:
        """Forecasts what another encoder gains and costs; with `require`, passes the gate before a switch to it.

        store.migrate("models/better", split="dev")["choices"]
        store.migrate("models/better", split="dev", require=["nDCG@10 >= -0.005"], switch=True)

        Args:
            to: A Hugging Face name, a folder, or models/NAME of the store; None: `task` names a trained task.
            options: Options of `riptide migrate`: task, embeddings, split, metric, sample, require, switch, ….

        Returns:
            The values of the forecast, as its JSON file has them; of the gate, mean, low and high by requirement.
        """
        values: dict[str, Any] = self._run_job("migrate", {"to": to, **options})
        return values

    @contextlib.contextmanager
    def serve(self, port: int = 0, **options: Unpack[ServeKeywords]) -> Iterator[Client]:
        """Serves search in a separate process, which only this machine reaches and which ends with the block.

        with store.serve() as client:
            hits = client.search("what is a rip current?", k=3)

        Args:
            port: Port of 127.0.0.1; 0: any free one. The URL of the client names it.
            options: Options of `riptide serve-search`: embeddings, index, rerank, renew, ….

        Yields:
            A client of the server.

        Raises:
            InputError: If the server does not start; with its error.
        """
        from riptide.jobs.api.server import start_server

        parameters, keywords = _parameters_of("serve"), {"port": port, **options}
        arguments = parameters.arguments(self.url, keywords)
        with contextlib.ExitStack() as stack:
            with named_parameters():
                client = stack.enter_context(start_server(arguments, verbose=self.verbose))
            yield client

    def _run_import(self, method: str, source: Any, keywords: Mapping[str, Any]) -> Any:
        """Runs the import of a source and returns the result of the job."""
        from riptide.jobs.api.raw_rows import source_path, without_path

        if source is None:
            return self._run_job(method, keywords, without_path)
        with source_path(source) as path:
            return self._run_job(method, {"source": path, **keywords}, without_path)

    def _open_embeddings(self, name: str) -> EmbeddingsReader:
        """Opens embeddings of any kind of vector by name."""
        from riptide.indexing.corpus.corpus import Corpus
        from riptide.indexing.hit_sources.registry import find_index_kind

        reader: type[EmbeddingsReader] = find_index_kind(
            self.generations("embeddings", name)[0].config["encoder"]
        ).reader
        return reader.open(self, name, Corpus.open(self))

    def _run_training(self, method: str, keywords: Mapping[str, Any]) -> Trained:
        """Runs a training job and returns its result."""
        from riptide.jobs.api.trained import read_trained

        return read_trained(self, self._run_job(method, keywords))

    def _run_job(self, method: str, keywords: Mapping[str, Any], clean: Callable[[str], str] = str) -> Any:
        """Runs the job of a method and returns its result. clean: as of `named_parameters`, for warnings too."""
        with self._open_job(method, keywords, clean) as (store, options):
            return _parameters_of(method).run_job(store, options)

    @contextlib.contextmanager
    def _open_job(
        self, method: str, keywords: Mapping[str, Any], clean: Callable[[str], str] = str
    ) -> Iterator[tuple[riptide.indexing.store.store.Store, Any]]:
        """Yields the store and the options of the job of a method, for a block that calls functions of the job.

        In the block, jobs print warnings alone unless `verbose` is set, and errors speak of parameters.
        """
        options = _parameters_of(method).read(self.url, keywords)
        with self._in_job(clean) as store:
            yield store, options

    @contextlib.contextmanager
    def _in_job(self, clean: Callable[[str], str] = str) -> Iterator[riptide.indexing.store.store.Store]:
        """Yields the store as jobs take it; in the block, lines and errors are those of `_open_job`."""
        warnings = print_only_warnings(lambda line: PYTHON.render(clean(line)))
        with contextlib.nullcontext() if self.verbose else warnings, named_parameters(clean):
            yield riptide.indexing.store.store.Store(self.url, cache=self.cache)  # workers need no API


# Options of `riptide evaluate` that measure embeddings or indexes instead of runs or that write a file, and `run` and
# `source`, which are positional parameters.
EXCLUDED_OPTIONS = (
    *("embeddings", "sample", "seed", "certify", "certify_k", "certify_filters", "certify_filter_field"),
    *("rate_queries", "rate_batch", "json", "overwrite", "run", "source"),
)


def _parameters_of(method: str) -> Parameters:
    """Returns the parameters of a method."""
    if method == "serve":
        return Parameters.of_method("serve", job="serve_search", excluded=("host", "tokens"))
    if method == "search_queries":
        return Parameters.of_method("search_queries", job="search", excluded=("query", "explain"))
    if method == "evaluate":
        return Parameters.of_method("evaluate", excluded=EXCLUDED_OPTIONS)
    if method == "compare":
        return Parameters.of_method("compare", excluded=("examples", "json", "html", "overwrite"))
    if method == "judge":
        return Parameters.of_method("judge")
    if method == "replay":
        return Parameters.of_method("replay", excluded=("max_changed",))
    if method not in METHODS or method == "serve_search":
        names = [name for name in METHODS if name != "serve_search"]
        raise InputError(
            f"{method!r} is no method with the options of a job; the methods are "
            f"{', '.join([*names, 'serve', 'search_queries', 'evaluate', 'compare', 'judge', 'replay'])}"
        )
    return Parameters.of_method(method)


def _name_of(artifact: Artifact) -> str:
    """Returns the NAME in the key KIND/NAME/GENERATION of an artifact."""
    return artifact.key.split("/")[1]
