"""Requests and responses of the HTTP API, as the OpenAPI document describes them. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from riptide.indexing.hit_sources.search_options import By, Mode
from riptide.indexing.search.explanations import HitExplanation

MAX_QUERIES = 64  # maximum queries of one search request
MAX_CHARACTERS = 8_192  # maximum characters of a query
MAX_HITS = 1_000
MAX_RESPONSE_BYTES = 64 << 20  # maximum bytes of the results of one search request, in equal shares of its queries
MAX_EXPLAINED = 100  # maximum number of hits of a search request with explanations, over all its queries
MAX_EXPLAINED_CHARACTERS = 1_024  # maximum characters of its queries, each
MAX_INPUTS = 256  # maximum texts of one request for embeddings
MAX_TEXT = 65_536  # maximum characters of a text to embed or a document to re-rank
MAX_DOCUMENTS = 1_000
MAX_MS = 60_000
MAX_SOURCE = 1_024  # maximum characters of a source


def _check_number(value: Any) -> Any:
    """Raises ValueError for booleans and strings, which pydantic would convert to numbers."""
    if isinstance(value, bool | str):
        raise ValueError("expected a number")
    return value


def _check_filter(value: Any) -> Any:
    """Raises ValueError for a filter that is neither an object nor a string."""
    if not isinstance(value, dict | str):
        raise ValueError("expected an object or a text")
    return value


FilterIn = Annotated[dict[str, Any] | str, BeforeValidator(_check_filter)]
Whole = Annotated[int, BeforeValidator(_check_number)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Passage = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", examples=["default"])]
ReleaseId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", examples=["0123456789abcdef"])]
Milliseconds = Annotated[Whole, Field(ge=1, le=MAX_MS)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SearchRequest(StrictModel):
    """One query in `query`, or several in `queries`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"query": "who wrote the first law of robotics?", "k": 3},
                {"task": "default", "queries": ["tides", "rip currents"], "mode": "hybrid", "filter": {"lang": "en"}},
            ]
        }
    )

    task: Name = "default"
    query: Text | None = None
    queries: list[Text] | None = Field(None, min_length=1, max_length=MAX_QUERIES)
    k: Whole = Field(10, ge=1, le=MAX_HITS)
    mode: Mode = "dense"
    source: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE)] | None = Field(
        None,
        description="Sources of the task instead of a mode: one, A+B (by reciprocal ranks), 0.4*A+0.6*B (by scores).",
        examples=["0.4*bm25+0.6*exact:minilm"],
    )
    by: By | None = Field(
        None,
        description="What the hits are if the corpus is one of split documents: documents, each with its best passage "
        "(the default), or passages. Otherwise both are the passages.",
    )
    filter: FilterIn | None = Field(
        None,
        description="Conditions on metadata, as an object or as a text; docs/data.md has the grammar.",
        examples=[{"lang": ["en", "de"], "year": {"gte": 2000}}, "lang in (en, de) and year >= 2000"],
    )
    rerank: Whole = Field(0, ge=0, le=MAX_HITS, description="Number of first hits to re-rank; 0: none.")
    timeout_ms: Milliseconds = 10_000
    allow_partial: StrictBool = Field(False, description="Accept an answer without the hits of shards that failed.")
    release: ReleaseId | None = Field(
        None,
        description="The release that must answer. Its hits do not change. A server whose live release is another one "
        "refuses the request.",
    )
    explain: StrictBool = Field(
        False,
        description=f"Explain each hit. Such a request has up to {MAX_EXPLAINED} hits (k times its queries), and "
        f"queries of up to {MAX_EXPLAINED_CHARACTERS:,} characters.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> SearchRequest:
        if (self.query is None) == (self.queries is None):
            raise ValueError("give one of query and queries")
        if self.source is not None and "mode" in self.model_fields_set:
            raise ValueError("give one of mode and source")
        if self.explain and (hits := self.k * len(self.texts)) > MAX_EXPLAINED:
            raise ValueError(
                f"explain: {hits:,} hits (k times queries), expected up to {MAX_EXPLAINED}: ask for fewer, or leave "
                "explain out"
            )
        if self.explain and (longest := max(map(len, self.texts))) > MAX_EXPLAINED_CHARACTERS:
            raise ValueError(
                f"explain: a query has {longest:,} characters, expected up to {MAX_EXPLAINED_CHARACTERS:,}: shorten "
                "it, or leave explain out"
            )
        return self

    @property
    def texts(self) -> list[str]:
        return [self.query] if self.query is not None else list(self.queries or [])


class FoundPassage(StrictModel):
    """A hit.

    `score` is the score of the last stage that ordered the hit; below the re-ranked hits it is the negative rank.
    `scores` has the score of each source that found it.
    """

    id: str
    document: str | None = Field(None, description="Document of the passage. Only hits of a split corpus have one.")
    start: int | None = Field(None, description="First character of the passage in the text of its document.")
    end: int | None = Field(None, description="Character of that text at which the passage ends.")
    rank: int
    score: float
    title: str
    text: str
    metadata: dict[str, Any] | None
    scores: dict[str, float] = Field(description="Scores by source: dense, bm25, or as `source` names them; reranker.")
    explanation: HitExplanation | None = Field(None, description="Why it is a hit. Only with `explain`.")


class ShardsOut(StrictModel):
    total: int
    successful: int
    failed: int
    timed_out: int


class ResultOut(StrictModel):
    query: str
    hits: list[FoundPassage]
    shards: ShardsOut


class SearchResponse(StrictModel):
    """One result per query, in order. `took_ms` has the milliseconds of each stage and the `total`."""

    request_id: str
    release: str
    task: str
    mode: str | None = Field(description="The mode of the request; null if it gave a source.")
    source: str = Field(description="The source that was searched, with all names filled in.")
    raised_settings: dict[str, int] = Field(
        default_factory=dict,
        description="By source with an index: nprobe or ef_search in place of the one that its build measured, as "
        "--certify-raise has raised it. Missing if no setting is raised.",
    )
    took_ms: dict[str, float]
    results: list[ResultOut]


class EmbeddingsRequest(BaseModel):
    """OpenAI's request for embeddings, with `input_type`. `model` is a task. Unknown fields are ignored, as OpenAI has
    fields without a meaning here."""

    model_config = ConfigDict(
        extra="ignore", json_schema_extra={"examples": [{"model": "default", "input": ["rip currents"]}]}
    )

    model: Name = "default"
    input: Passage | Annotated[list[Passage], Field(min_length=1, max_length=MAX_INPUTS)]
    input_type: Literal["query", "passage"] = "query"
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = Field(None, ge=1)
    timeout_ms: Milliseconds = 30_000

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else list(self.input)


class EmbeddingOut(StrictModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(StrictModel):
    """Tokens that were encoded, as OpenAI counts them, and those that were not."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int = Field(
        description="Inputs that are longer than the encoder reads: only their first tokens count."
    )
    truncated_tokens: int = Field(description="Tokens that were cut off these inputs.")


class EmbeddingsResponse(StrictModel):
    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingOut]
    usage: Usage


class RerankRequest(StrictModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"query": "what is a rip current?", "documents": ["A current …", "A tear …"]}]},
    )

    query: Text
    documents: list[Passage] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    top_n: Whole | None = Field(None, ge=1)
    timeout_ms: Milliseconds = 30_000


class RerankedOut(StrictModel):
    index: int
    relevance_score: float


class RerankResponse(StrictModel):
    request_id: str
    model: str
    results: list[RerankedOut]


class TaskOut(StrictModel):
    name: str
    prompt: str | None = Field(description="First 16 digits of the prompt's fingerprint; null: the bare backbone.")
    length: dict[str, int] = Field(description="Tokens of the prompt, by side.")
    embeddings: str | None = Field(description="Dense embeddings of its passages; null: it has no dense search.")
    index: str | None
    bm25: str | None
    modes: list[str] = Field(description="The modes that searches of the task may name.")
    sources: list[str] = Field(description="The sources that searches of the task may name.")


class TasksResponse(StrictModel):
    release: str
    tasks: list[TaskOut]


class ModelOut(StrictModel):
    """A task as OpenAI's API describes a model."""

    id: str = Field(description="The name of the task.")
    object: Literal["model"]
    created: int = Field(description="Always 0: a release does not record when its tasks were made.")
    owned_by: str


class ModelsResponse(StrictModel):
    object: Literal["list"]
    data: list[ModelOut]


class ReleaseRequest(StrictModel):
    """An earlier release to switch to; null: a new release of the same tasks over what the store holds now."""

    release: ReleaseId | None = None


class CacheOut(StrictModel):
    """The size of a cache and its bound, in bytes, and its number of entries."""

    bytes: int
    max_bytes: int
    entries: int


class RecallOut(StrictModel):
    """The estimated recall of the latest searches in an index, from a sample that was searched again exactly."""

    task: str
    mode: str
    k: str = Field(description="Class of the number of hits: 1-10, 11-100 or 101+.")
    filter: str = Field(description="Class of the share of passages that match the filter; none: no filter.")
    samples: int
    recall: float
    lower: float = Field(description="Lower end of the 95% confidence interval.")
    upper: float = Field(description="Upper end of the 95% confidence interval.")
    is_below_target: bool


class RaisedSettingOut(StrictModel):
    """A search setting of an index that --certify-raise has raised for the searches of a task and mode."""

    task: str
    mode: str
    source: str
    setting: str = Field(description="nprobe: lists to probe; ef_search: vectors that the search of a graph keeps.")
    value: int
    built: int = Field(description="The value that the build of the index measured.")


class ClientOut(StrictModel):
    """The owner of a token, with its limits; a limit that is not set is null."""

    name: str
    rate: float | None = Field(description="Queries per second.")
    share: float = Field(description="Share of each queue that its waiting queries may fill.")
    quota: int | None = Field(description="Queries per day (UTC).")
    remaining: int | None = Field(description="Queries that the quota leaves for today, in this process.")


class InfoResponse(StrictModel):
    """The live release. Without dense embeddings, `encoder`, `dim`, `similarity` and `numerics` are null."""

    release: str
    encoder: str | None
    query_model: str | None = Field(
        description="models/NAME of the store that encodes queries in place of `encoder`, such as a new encoder with a "
        "map to the vectors of the old one; null: `encoder` encodes queries too."
    )
    dim: int | None
    similarity: str | None
    numerics: str | None
    prompt_bytes: int = Field(
        description="Bytes of the prompts of the live release's encoder in this process. Networks that compute prompts "
        "are not counted. A prompt for which they would exceed the free memory is refused."
    )
    stored_similarity: dict[str, float] = Field(
        description="By the name of dense embeddings: the smallest similarity of stored vectors to those that the "
        "encoder of this process gives for the same 8 passages; 1: they are equal. Below 0.99 a release is not served. "
        "By `query_model`: the same of 8 fixed queries, if a map was saved with the model."
    )
    filter_cache: CacheOut = Field(
        description="The rows that match the latest filters, in this process. With row ranges the leaves keep them."
    )
    passages: int
    is_split: bool = Field(description="Whether the passages are those of documents that the import has split.")
    shards: int
    reranker: str | None
    modes: list[str]
    filters: dict[str, str]
    tasks: list[str]
    newer: list[str] | None = Field(
        description="Artifacts of the store that are newer than the release; null: not known, as no look at the store "
        "has succeeded yet."
    )
    stop_words: list[str] = Field(
        description="Words that BM25 leaves out of English texts, and that the page does not mark."
    )
    certified: list[RecallOut] = Field(
        description="The estimated recall of searches in an index, by this process; empty without --certify."
    )
    raised_settings: list[RaisedSettingOut] = Field(
        description="The search settings that this process has raised; empty without --certify-raise."
    )
    examples: list[str] = Field(description="Queries to try, which the operator has chosen; often none.")
    client: ClientOut | None = Field(description="The client whose token the request has; null: it has none.")


class ErrorOut(StrictModel):
    """An error in OpenAI's format."""

    message: str
    type: str
    request_id: str


class ErrorResponse(StrictModel):
    error: ErrorOut
