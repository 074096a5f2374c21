"""The types of the keyword arguments of the methods of a store, made from the options of their jobs.

None stands for the default. `RIPTIDE_WRITE_TABLES=1 pytest tests/jobs/api/test_keywords.py` writes this file.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

class ImportCorpusKeywords(TypedDict, total=False):
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "beir", "msmarco", "dpr", "kilt", "documents"] | None
    append: bool | None
    delete: str | PathLike[str] | None
    erase: str | PathLike[str] | None
    yes: bool | None
    sync: bool | None
    max_removed: float | None
    drop_duplicates: bool | None
    skip_invalid: bool | None
    id: str | None
    title: str | None
    text: str | None
    metadata: str | Sequence[str] | None
    decode_entities: bool | None
    filters: Mapping[str, str] | None
    split_words: int | None
    overlap: int | None
    part_size: int | None
    skip_unknown: bool | None
    hold_out: int | None
    hold_out_split: str | None
    hold_out_seed: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class ImportQueriesKeywords(TypedDict, total=False):
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "beir", "msmarco", "dpr", "kilt", "documents"] | None
    provenance: Literal["span", "page", "none"] | None
    split: str | None
    skip_invalid: bool | None
    id: str | None
    text: str | None
    relevant: str | None
    score: str | None
    metadata: str | Sequence[str] | None
    decode_entities: bool | None
    skip_unknown: bool | None
    hold_out: int | None
    hold_out_split: str | None
    hold_out_seed: int | None
    limit: int | None

class EncodeCorpusKeywords(TypedDict, total=False):
    task: str | None
    allow_unknown_tokens: bool | None
    pooling: Literal["cls", "mean", "last", "splade"] | None
    normalize: bool | None
    query_prefix: str | None
    passage_prefix: str | None
    title: Literal["space", "newline", "sep", "none"] | None
    query_length: int | None
    passage_length: int | None
    dimension: int | None
    append_eos: bool | None
    padding_side: Literal["left", "right"] | None
    dtype: Literal["auto", "float32", "bfloat16", "int8"] | None
    compile: Literal["auto", "never", "always"] | None
    query_terms: int | None
    passage_terms: int | None
    gpus: int | None
    cpus: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class BuildIndexKeywords(TypedDict, total=False):
    factory: str | None
    recall: float | None
    queries: str | None
    split: str | None
    filter_field: str | None
    memory_gb: float | None
    shards: int | None
    cpus: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class BuildBm25Keywords(TypedDict, total=False):
    name: str | None
    k1: float | None
    b: float | None
    language: str | None
    shards: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class FitTopicsKeywords(TypedDict, total=False):
    name: str | None
    method: Literal["hlda", "lda"] | None
    topics: int | None
    depth: int | None
    gamma: float | None
    eta: float | None
    alpha: float | None
    min_passages: int | None
    most_frequent: int | None
    iterations: int | None
    seed: int | None
    words: int | None
    merge_below: float | None
    sample: int | None
    page: str | PathLike[str] | None
    overwrite: bool | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class MineNegativesKeywords(TypedDict, total=False):
    queries: str | None
    split: str | None
    depth: int | None
    drop_answers: bool | None
    half: Literal[1, 2] | None
    part_queries: int | None
    reranker: str | None
    pool_negatives: int | None
    denoised_negatives: int | None
    denoise_threshold: float | None
    score_all: bool | None
    seed: int | None
    max_score: float | None
    relative_margin: float | None
    absolute_margin: float | None
    teacher_scores: bool | None
    encoder: str | None
    task: str | None
    candidates: str | None
    tevatron: str | PathLike[str] | None
    sentence_transformers: str | PathLike[str] | None
    report: str | PathLike[str] | None
    overwrite: bool | None
    rerank_dtype: Literal["auto", "float32", "bfloat16", "int8"] | None
    gpus: int | None
    cpus: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class TrainRetrieverKeywords(TypedDict, total=False):
    train: Literal["prompts", "lora", "all"] | None
    prompt: Literal["none", "matrix", "mlp", "synthesised", "per-task", "topics"] | None
    sides: Literal["tied", "untied", "query"] | None
    projection: int | None
    dropout: bool | None
    embeddings: str | None
    init: str | None
    length: int | None
    prompt_dropout: float | None
    position_offset: bool | None
    negatives: str | None
    queries: str | None
    split: str | None
    positives: Literal["judged", "categories"] | None
    also_train: str | Sequence[str] | None
    task_size: int | None
    batches: Literal["mixed", "one-task"] | None
    refresh_epochs: float | None
    refresh_depth: int | None
    batch: int | None
    negatives_per_query: int | None
    negatives_from: Literal["batch", "own"] | None
    draw_positive: Literal["random", "first", "weighted"] | None
    draw_negatives: Literal["random", "windows"] | None
    loss: Literal["contrastive", "symmetric", "symmetric-sum", "kl", "margin-mse"] | None
    contrastive_weight: float | None
    temperature: float | None
    learn_temperature: bool | None
    temperature_lr: float | None
    pooling: Literal["cls", "mean", "last", "splade"] | None
    normalize: bool | None
    query_prefix: str | None
    passage_prefix: str | None
    title: Literal["space", "newline", "sep", "none"] | None
    query_length: int | None
    passage_length: int | None
    dimension: int | None
    append_eos: bool | None
    padding_side: Literal["left", "right"] | None
    epochs: float | None
    steps: int | None
    lr: float | None
    warm_up: float | None
    weight_decay: float | None
    clip: float | None
    optimizer: Literal["adamw", "adafactor"] | None
    max_minutes: float | None
    seed: int | None
    zero: Literal[0, 1, 2, 3] | None
    offload: bool | None
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    evaluate_every: int | None
    patience: int | None
    grad_cache: Literal["auto", "on", "off"] | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int | str | None
    curves: str | None
    workers: int | None
    cpus: int | None
    gpus: Literal[0, 1] | None
    min_workers: int | None
    dtype: Literal["auto", "float32", "bfloat16"] | None
    checkpointing: bool | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    lora_rank: int | None
    lora_alpha: int | None
    lora_dropout: float | None
    lora_targets: str | Sequence[str] | None
    topics: str | None
    query_topics: Literal["own", "judged"] | None
    wordless_queries: Literal["refuse", "prior"] | None
    topic_loss: bool | None
    topic_sample: int | None
    topic_margin: float | None
    prompt_hidden: int | None
    basic_prompts: int | None
    prompt_bottleneck: int | None
    prompt_temperature: float | None
    mix: Literal["before", "after"] | None
    attention: Literal["learned", "uniform"] | None
    category_weight: float | None
    categories_field: str | None
    divergence_weight: float | None
    alignment: bool | None
    uniformity: bool | None
    flops_queries: float | None
    flops_passages: float | None
    flops_warm_up: float | None
    sweep: str | Sequence[str] | None
    limit: int | None

class TunePromptsKeywords(TypedDict, total=False):
    method: Literal["prompt", "lora", "finetune"] | None
    side: Literal["query", "both"] | None
    untied: bool | None
    parametrisation: Literal["embedding", "mlp"] | None
    train: Literal["prompts", "lora", "all"] | None
    prompt: Literal["none", "matrix", "mlp", "synthesised", "per-task", "topics"] | None
    sides: Literal["tied", "untied", "query"] | None
    projection: int | None
    dropout: bool | None
    embeddings: str | None
    init: str | None
    length: int | None
    prompt_dropout: float | None
    position_offset: bool | None
    negatives: str | None
    queries: str | None
    split: str | None
    positives: Literal["judged", "categories"] | None
    also_train: str | Sequence[str] | None
    task_size: int | None
    batches: Literal["mixed", "one-task"] | None
    refresh_epochs: float | None
    refresh_depth: int | None
    batch: int | None
    negatives_per_query: int | None
    negatives_from: Literal["batch", "own"] | None
    draw_positive: Literal["random", "first", "weighted"] | None
    draw_negatives: Literal["random", "windows"] | None
    loss: Literal["contrastive", "symmetric", "symmetric-sum", "kl", "margin-mse"] | None
    contrastive_weight: float | None
    temperature: float | None
    learn_temperature: bool | None
    temperature_lr: float | None
    pooling: Literal["cls", "mean", "last", "splade"] | None
    normalize: bool | None
    query_prefix: str | None
    passage_prefix: str | None
    title: Literal["space", "newline", "sep", "none"] | None
    query_length: int | None
    passage_length: int | None
    dimension: int | None
    append_eos: bool | None
    padding_side: Literal["left", "right"] | None
    epochs: float | None
    steps: int | None
    lr: float | None
    warm_up: float | None
    weight_decay: float | None
    clip: float | None
    optimizer: Literal["adamw", "adafactor"] | None
    max_minutes: float | None
    seed: int | None
    zero: Literal[0, 1, 2, 3] | None
    offload: bool | None
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    evaluate_every: int | None
    patience: int | None
    grad_cache: Literal["auto", "on", "off"] | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int | str | None
    curves: str | None
    workers: int | None
    cpus: int | None
    gpus: Literal[0, 1] | None
    min_workers: int | None
    dtype: Literal["auto", "float32", "bfloat16"] | None
    checkpointing: bool | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    lora_rank: int | None
    lora_alpha: int | None
    lora_dropout: float | None
    lora_targets: str | Sequence[str] | None
    topics: str | None
    query_topics: Literal["own", "judged"] | None
    wordless_queries: Literal["refuse", "prior"] | None
    topic_loss: bool | None
    topic_sample: int | None
    topic_margin: float | None
    prompt_hidden: int | None
    basic_prompts: int | None
    prompt_bottleneck: int | None
    prompt_temperature: float | None
    mix: Literal["before", "after"] | None
    attention: Literal["learned", "uniform"] | None
    category_weight: float | None
    categories_field: str | None
    divergence_weight: float | None
    alignment: bool | None
    uniformity: bool | None
    flops_queries: float | None
    flops_passages: float | None
    flops_warm_up: float | None
    sweep: str | Sequence[str] | None
    limit: int | None

class TrainRerankerKeywords(TypedDict, total=False):
    negatives: str | None
    queries: str | None
    split: str | None
    dev_negatives: str | None
    batch: int | None
    negatives_per_query: int | None
    loss: Literal["bce", "listwise"] | None
    max_length: int | None
    title: Literal["space", "newline", "sep", "none"] | None
    epochs: float | None
    steps: int | None
    lr: float | None
    warm_up: float | None
    weight_decay: float | None
    clip: float | None
    optimizer: Literal["adamw", "adafactor"] | None
    max_minutes: float | None
    seed: int | None
    zero: Literal[0, 1, 2, 3] | None
    offload: bool | None
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    evaluate_every: int | None
    patience: int | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int | str | None
    curves: str | None
    workers: int | None
    cpus: int | None
    gpus: Literal[0, 1] | None
    min_workers: int | None
    dtype: Literal["auto", "float32", "bfloat16"] | None
    checkpointing: bool | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class PretrainRipKeywords(TypedDict, total=False):
    objective: Literal["rip", "cocondenser", "condenser", "mlm", "pairs"] | None
    train: Literal["backbone", "prompts"] | None
    prompt_length: int | None
    batch: int | None
    max_length: int | None
    pooling: Literal["cls", "mean"] | None
    min_words: int | None
    language: str | None
    unit: Literal["sentence", "span"] | None
    mask: Literal["token", "word"] | None
    mlm_probability: float | None
    temperature: float | None
    head_layers: int | None
    skip_from: int | None
    late_loss: bool | None
    queries: str | None
    epochs: float | None
    steps: int | None
    lr: float | None
    warm_up: float | None
    weight_decay: float | None
    clip: float | None
    optimizer: Literal["adamw", "adafactor"] | None
    max_minutes: float | None
    seed: int | None
    zero: Literal[0, 1, 2, 3] | None
    offload: bool | None
    checkpoint_every: int | None
    checkpoint_minutes: float | None
    evaluate_every: int | None
    patience: int | None
    grad_cache: Literal["auto", "on", "off"] | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int | str | None
    curves: str | None
    workers: int | None
    cpus: int | None
    gpus: Literal[0, 1] | None
    min_workers: int | None
    dtype: Literal["auto", "float32", "bfloat16"] | None
    checkpointing: bool | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class MigrateKeywords(TypedDict, total=False):
    task: str | None
    embeddings: str | None
    to_embeddings: str | None
    queries: str | None
    split: str | None
    metric: str | None
    sample: int | None
    hard: int | None
    seed: int | None
    save_map: str | None
    require: str | Sequence[str] | None
    switch: bool | None
    json: str | PathLike[str] | None
    html: str | PathLike[str] | None
    overwrite: bool | None
    pooling: Literal["cls", "mean", "last", "splade"] | None
    normalize: bool | None
    query_prefix: str | None
    passage_prefix: str | None
    title: Literal["space", "newline", "sep", "none"] | None
    query_length: int | None
    passage_length: int | None
    dimension: int | None
    append_eos: bool | None
    padding_side: Literal["left", "right"] | None
    dtype: Literal["auto", "float32", "bfloat16", "int8"] | None
    compile: Literal["auto", "never", "always"] | None
    query_terms: int | None
    passage_terms: int | None
    limit: int | None

class ServeKeywords(TypedDict, total=False):
    tasks: str | Sequence[str] | None
    embeddings: str | None
    index: str | None
    bm25: str | None
    sources: str | Sequence[str] | None
    renew: bool | None
    keep_release: bool | None
    rerank: str | None
    replicas: int | None
    row_ranges: int | None
    application: str | None
    route_prefix: str | None
    threads: int | None
    batch: int | None
    queue: int | None
    warm_up_s: float | None
    certify: float | None
    certify_recall: float | None
    certify_raise: int | None
    compile: Literal["auto", "never"] | None
    examples: str | PathLike[str] | None
    rerank_dtype: Literal["auto", "float32", "bfloat16", "int8"] | None
    max_connections: int | None
    max_header_bytes: int | None
    max_headers: int | None
    max_url_bytes: int | None
    head_timeout_s: float | None
    idle_timeout_s: float | None
    write_timeout_s: float | None

class SearchQueriesKeywords(TypedDict, total=False):
    queries: str | None
    split: str | None
    mode: Literal["dense", "exact", "bm25", "hybrid"] | None
    embeddings: str | None
    index: str | None
    k: int | None
    filter: str | Mapping[str, Any] | None
    by: Literal["document", "passage"] | None
    drop_self: bool | None
    run: str | PathLike[str] | None
    overwrite: bool | None
    encoder: str | None
    task: str | None
    nprobe: int | None
    ef_search: int | None
    depth: int | None
    rerank: str | None
    rerank_depth: int | None
    rerank_dtype: Literal["auto", "float32", "bfloat16", "int8"] | None
    gpus: int | None
    cpus: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class EvaluateKeywords(TypedDict, total=False):
    queries: str | None
    split: str | None
    encoder: str | None
    task: str | None
    metrics: str | Sequence[str] | None
    relevance: Literal["judged", "category"] | None
    categories_field: str | None
    median_length: int | None
    cpus: int | None
    min_workers: int | None
    max_workers: int | None
    wait: int | None
    node_label: str | Sequence[str] | None
    ray: bool | None
    limit: int | None

class CompareKeywords(TypedDict, total=False):
    split: str | None
    metrics: str | Sequence[str] | None
    queries: str | None
    limit: int | None

class JudgeKeywords(TypedDict, total=False):
    split: str | None
    measure: str | None
    margin: float | None
    verdicts: str | PathLike[str] | Sequence[str | PathLike[str]] | None
    model_verdicts: str | PathLike[str] | Sequence[str | PathLike[str]] | None
    round_size: int | None
    seed: int | None
    folder: str | PathLike[str] | None
    all_pairs: bool | None
    queries: str | None
    limit: int | None

class ReplayKeywords(TypedDict, total=False):
    release: str | None
    url: str | None
    write: str | PathLike[str] | None
    overwrite: bool | None
    limit: int | None
