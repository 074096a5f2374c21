"""Calls Lucene in the JVM of this process: writes a shard as one compound segment, and searches shards.

All passages are added in the order of their rows, so the number of a document is its row minus the first row of its
shard, and Lucene's order of equal scores (by number) is the order of rows. Shards are read as one index: document
frequencies and the mean length are those of all shards.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits
from riptide.indexing.lucene.java import Java, find_anserini_jar, jvm
from riptide.process.temporary_folders import TemporaryFolder

FIELD = "contents"
EXACT_COUNT = 1_000  # number of matches after which Lucene stops counting and skips passages that cannot be hits
BUFFER_MB = 256.0  # size of the postings that Lucene buffers in memory before it writes a segment
PACKAGE = "org.apache.lucene."


@dataclass(frozen=True)
class LuceneSegmentFiles:
    """The files of a compound segment: one large file and a few small ones.

    Attributes:
        bulk: The name of the large file in Lucene's directory; the caller knows its path.
        small: The content of each small file by name, together about a kilobyte.
    """

    bulk: str
    small: dict[str, bytes]


def lucene_jvm() -> Java:
    """Returns the JVM, configured so that Lucene prints only warnings and accepts queries of any length."""
    java = jvm()
    _set_up_jvm(java)
    return java


@functools.cache
def _set_up_jvm(java: Java) -> None:
    logger = java.type("java.util.logging.Logger").getLogger("org.apache.lucene")
    logger.setLevel(java.type("java.util.logging.Level").WARNING)
    _REFERENCES.append(logger)  # Java forgets the level of a logger without references
    java.type(f"{PACKAGE}search.IndexSearcher").setMaxClauseCount(1 << 30)


_REFERENCES: list[Any] = []
_COLLECT_LOCK = threading.Lock()  # pyjnius binds a method to the object of the last call, of any thread
OPEN_LOCK = threading.RLock()  # one thread at a time opens segments, for the same reason


def _lucene_class(name: str) -> Any:
    """Returns a Java class of Lucene. name: its name within org.apache.lucene, for example index.IndexWriter."""
    return lucene_jvm().type(f"{PACKAGE}{name}")


def _cast_java(name: str, value: Any) -> Any:
    """Casts a Java object to an interface or base class of Lucene, as pyjnius selects methods by the exact type."""
    return lucene_jvm().cast(f"{PACKAGE}{name}", value)


@functools.cache
def lucene_versions() -> dict[str, str]:
    """Returns the versions of Lucene and Anserini, which determine the terms of a text."""
    version = _lucene_class("util.Version").LATEST.toString()
    return {"lucene": version, "anserini": find_anserini_jar().name.split("-")[1]}


@functools.cache
def make_analyzer(language: str) -> Any:
    """Returns Anserini's analyzer of a language; for English, with Porter's stemmer and Lucene's stop words.

    Raises:
        InputError: If Anserini has none.
    """
    if language == "en":
        return lucene_jvm().type("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
    analysis = None
    try:
        analysis = lucene_jvm().type("io.anserini.analysis.AnalyzerMap").getLanguageSpecificAnalyzer(language)
    except Exception as error:
        if "JVM exception" not in str(error):
            raise
    if analysis is None:
        raise InputError(f"language {language!r}: Anserini has no analyzer for it; try en, de, fr, zh, …")
    return analysis


def write_shard(passages: Iterable[str], folder: Path, *, language: str = "en") -> LuceneSegmentFiles:
    """Writes passages as a segment, with the analyzer of a language. Raises the errors of `write_segment`."""
    return write_segment(passages, folder, make_analyzer(language))


def write_segment(
    passages: Iterable[str], folder: Path, analysis: Any, *, omit_norms: bool = False
) -> LuceneSegmentFiles:
    """Writes passages, in their order, as a new index with a single segment into an empty folder.

    Args:
        passages: The texts.
        folder: The folder.
        analysis: Lucene's analyzer of the texts.
        omit_norms: Store no lengths of the passages.

    Raises:
        InputError: If the folder's disk is full.
    """
    try:
        return _write_segment(passages, folder, analysis, omit_norms)
    except Exception as error:
        if "java.io.IOException" not in str(error):
            raise
        reason = str(error).splitlines()[0].rpartition(": ")[2]
        raise InputError(
            f"{folder}: Lucene cannot write there: {reason}; free some space, or set TMPDIR to a folder that has it"
        ) from error


def _write_segment(passages: Iterable[str], folder: Path, analysis: Any, omit_norms: bool) -> LuceneSegmentFiles:
    java = lucene_jvm()
    config = _lucene_class("index.IndexWriterConfig")(_cast_java("analysis.Analyzer", analysis))
    config.setRAMBufferSizeMB(BUFFER_MB)
    config.setUseCompoundFile(True)
    policy = _lucene_class("index.LogDocMergePolicy")()  # keeps the order: it merges adjacent segments only
    policy.setNoCFSRatio(1.0)
    policy.setMaxCFSSegmentSizeMB(1e12)
    config.setMergePolicy(_cast_java("index.MergePolicy", policy))
    config.setMergeScheduler(_cast_java("index.MergeScheduler", _lucene_class("index.SerialMergeScheduler")()))
    directory = _lucene_class("store.FSDirectory").open(java.type("java.nio.file.Paths").get(str(folder)))
    writer = _lucene_class("index.IndexWriter")(directory, config)
    kind = _lucene_class("document.FieldType")()
    kind.setStored(False)
    kind.setTokenized(True)
    kind.setOmitNorms(omit_norms)
    kind.setIndexOptions(_lucene_class("index.IndexOptions").DOCS_AND_FREQS)
    empty = java.cast("java.lang.CharSequence", java.type("java.lang.String")(""))
    field = _lucene_class("document.Field")(FIELD, empty, _cast_java("index.IndexableFieldType", kind))
    document = _lucene_class("document.Document")()
    document.add(_cast_java("index.IndexableField", field))
    fields = java.cast("java.lang.Iterable", document)
    count = 0
    for passage in passages:
        field.setStringValue(passage.replace("\0", " "))  # pyjnius passes C strings, which end at NUL
        writer.addDocument(fields)
        count += 1
    writer.forceMerge(1)
    writer.commit()
    writer.close()
    directory.close()
    (folder / "write.lock").unlink(missing_ok=True)
    files = {path.name: path for path in folder.iterdir()}
    [bulk] = [name for name in files if name.endswith(".cfs")] or [""]
    if not bulk:
        raise InputError(f"{count} passages made no segment; give a shard one passage at least")
    return LuceneSegmentFiles(bulk, {name: path.read_bytes() for name, path in files.items() if name != bulk})


class SegmentSearch(abc.ABC):
    """Searches shards as one index. Thread-safe; the shards stay mapped into memory."""

    def __init__(
        self,
        shards: Sequence[tuple[LuceneSegmentFiles, Path]],
        similarity: Any,
        *,
        shard_range: slice = slice(None),
        first_row: int = 0,
    ):
        """Opens the shards for searching with a similarity.

        Args:
            shards: The shards in the order of their rows, each with the path of its bulk.
            similarity: Lucene's similarity, which gives the scores.
            shard_range: The shards that are searched, a slice with step 1; the statistics are those of all.
            first_row: First row of the first shard.
        """
        java = lucene_jvm()
        readers = [_cast_java("index.IndexReader", open_shard(shard, path)) for shard, path in shards]
        self.num_documents = sum(reader.numDocs() for reader in readers[shard_range])
        self.first_row = first_row
        # One shard gets a MultiReader too: closing it also closes the reader of the shard.
        reader = _lucene_class("index.MultiReader")(readers, True)
        self._searcher = _lucene_class("search.IndexSearcher")(_cast_java("index.IndexReader", reader))
        self._searcher.setSimilarity(_cast_java("search.similarities.Similarity", similarity))
        # A shard is one segment, so the leaves of Lucene's reader are the shards.
        first, end, _ = shard_range.indices(len(shards))
        leaves = self._searcher.getTopReaderContext().leaves()
        self._leaves = None if end - first == len(shards) else leaves.subList(first, end)
        self._collectors = _lucene_class("search.TopScoreDocCollector")
        self._mode = _lucene_class("search.ScoreMode").TOP_SCORES
        self._json = java.type("com.fasterxml.jackson.databind.ObjectMapper")()

    @abc.abstractmethod
    def _build_query(self, query: str) -> Any:
        """Returns Lucene's query for a text; None for a text that cannot have hits."""

    def search(self, queries: Sequence[str], k: int, *, threads: int = 1) -> Hits:
        """Returns the top k passages of each query; a query without an indexed term has no hits."""
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        depth = max(1, min(k, self.num_documents))
        java = lucene_jvm()

        def search_queries(numbers: range) -> None:
            try:
                for number in numbers:
                    query = self._build_query(queries[number])
                    hits = [] if query is None else orjson.loads(self._top_docs(query, depth))["scoreDocs"]
                    scores[number, : len(hits)] = [hit["score"] for hit in hits]
                    rows[number, : len(hits)] = [self.first_row + hit["doc"] for hit in hits]
            finally:
                java.detach()  # a thread that ends while it is attached to the JVM crashes the process

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(search_queries, [range(n, len(queries), threads) for n in range(threads)]))
        return Hits(scores, rows)

    def _top_docs(self, query: Any, k: int) -> str:
        """Returns the TopDocs of one query as JSON, so that one call into Java reads all hits, with exact floats."""
        if self._leaves is None:
            return self._json.writeValueAsString(self._searcher.search(query, k))
        # These calls search only some leaves; for all of them, IndexSearcher.search takes 60 microseconds less.
        collector = self._collectors.create(k, EXACT_COUNT)
        weight = self._searcher.createWeight(self._searcher.rewrite(query), self._mode, 1.0)
        self._searcher.search(self._leaves, weight, _cast_java("search.Collector", collector))
        with _COLLECT_LOCK:
            top_docs = collector.topDocs()
        return self._json.writeValueAsString(top_docs)

    def explain(self, query: str, rows: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Returns Lucene's explanations of the scores of passages, by row: {"value", "description", "details"}."""
        java = lucene_jvm()

        def explain_rows() -> dict[int, dict[str, Any]]:
            try:
                built = self._build_query(query)
                texts = [
                    self._json.writeValueAsString(self._searcher.explain(built, row - self.first_row)) for row in rows
                ]
                return {row: orjson.loads(text) for row, text in zip(rows, texts, strict=True)}
            finally:
                java.detach()  # as in `search`

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(explain_rows).result()


class LuceneSearch(SegmentSearch):
    """BM25 search over shards as one index. Queries are bags of words: no character has a special meaning."""

    def __init__(
        self,
        shards: Sequence[tuple[LuceneSegmentFiles, Path]],
        *,
        k1: float,
        b: float,
        language: str = "en",
        shard_range: slice = slice(None),
    ):
        """Opens the shards for BM25; `shards` and `shard_range` as for SegmentSearch. The first row is 0."""
        super().__init__(shards, _lucene_class("search.similarities.BM25Similarity")(k1, b), shard_range=shard_range)
        self._analyzer = _cast_java("analysis.Analyzer", make_analyzer(language))
        self._generator = lucene_jvm().type("io.anserini.search.query.BagOfWordsQueryGenerator")()

    def _build_query(self, query: str) -> Any:
        return self._generator.buildQuery(FIELD, self._analyzer, query.replace("\0", " "))


def open_shard(shard: LuceneSegmentFiles, bulk: Path) -> Any:
    """Opens a Lucene DirectoryReader on a shard. `bulk`: the path of its large file.

    Lucene expects all files under their names in one folder, which exists only while the reader opens.
    """
    java = lucene_jvm()
    for name in (shard.bulk, *shard.small):
        if name != Path(name).name or name in ("", ".", ".."):
            raise InputError(f"{bulk}: its record names a file {name!r}, which is no plain name")
    with TemporaryFolder("lucene") as folder:
        try:
            for name, content in shard.small.items():
                (folder / name).write_bytes(content)
            (folder / shard.bulk).symlink_to(bulk.resolve())
            directory = _lucene_class("store.MMapDirectory")(java.type("java.nio.file.Paths").get(str(folder)))
            return _lucene_class("index.DirectoryReader").open(_cast_java("store.Directory", directory))
        except Exception as error:
            if "JVM exception" not in str(error):
                raise
            raise InputError(f"{bulk}: Lucene cannot read it: {' '.join(str(error).split())[:200]}") from error
