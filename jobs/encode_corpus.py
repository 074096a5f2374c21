"""Encode a corpus with a pool of encoders, one embeddings part for each corpus part.

python jobs/encode_corpus.py --store data/squad --encoder sentence-transformers/all-MiniLM-L6-v2
ray job submit --working-dir . -- python jobs/encode_corpus.py --store s3://bucket/squad --encoder intfloat/e5-large
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect

from indexing.corpus import Corpus
from indexing.encoders import EncoderSpec, spec_of
from indexing.encoding import (
    Encoding,
    choose_pool,
    is_encoded,
    limited_name,
    numerics_of,
    similarity_of,
)
from indexing.store import Store
from retriever.encoder import EncoderOptions, resolve
from retriever.files import weight_files
from retriever.numerics import choose_device
from retriever.packing import packs


@dataclass(frozen=True, kw_only=True)
class EncodeCorpus(Common):
    encoder: str | None = None
    """A Hugging Face name, a folder (transformers or sentence-transformers), or models/NAME of the store."""
    task: str | None = None
    """Instead of an encoder: a tuned task, whose own options count."""
    name: str | None = None
    """The embeddings' name; default: the task's, or the last piece of the encoder's."""
    pooling: Literal["cls", "mean", "last"] | None = None
    normalize: bool | None = None
    """L2-normalise the vectors (cosine)."""
    query_prefix: str | None = None
    passage_prefix: str | None = None
    title: Literal["space", "newline", "sep", "none"] = "space"
    """How title and text become one passage."""
    query_length: int | None = None
    """Tokens, special ones included."""
    passage_length: int | None = None
    dimension: int | None = None
    """Keep the first so many dimensions (Matryoshka)."""
    append_eos: bool = False
    padding_side: Literal["right", "left"] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the processor has it."""
    compile: Literal["auto", "never", "always"] = "auto"
    """torch.compile; auto: where it pays and a compiler is there (not BERT and its kin on a processor)."""
    min_workers: int = 1
    max_workers: int | None = None
    """Encoders at once; default: as many as the cluster holds now. A cluster that scales up may be given more."""
    cpus: int | None = None
    """Cores of each encoder; default: 4 at most beside a GPU, about 4 where texts are encoded without padding (BERT and
    its kin on a processor), else as few as memory allows."""
    gpus: int | None = None
    """GPUs of each encoder, 0 or 1; default: 1 where the cluster has GPUs."""

    def encoder_options(self) -> EncoderOptions:
        names = EncoderOptions.__dataclass_fields__
        return EncoderOptions(**{name: getattr(self, name) for name in names})


def main(options: EncodeCorpus) -> None:
    store = Store(options.store).require()
    encoder_options = options.encoder_options()
    spec = spec_of(store, options.encoder, options.task, encoder_options)
    name = options.name or options.task or spec.name.rstrip("/").rpartition("/")[2]
    described = spec.describe("passage")
    if options.plan:
        return plan(store, options, spec, described)
    encoded = is_encoded(store, name, described, options.limit)
    if not encoded and (speed := encode(store, options, spec, name, described)):
        say(f"  an encoder starts in {speed.startup:.1f} s, then {speed.rows / speed.seconds:,.0f} passages/s, "
            f"{speed.tokens / speed.seconds:,.0f} tokens/s")  # fmt: skip
    for artifact in store.generations("embeddings", limited_name(name, options.limit)):
        say(f"{artifact.url}: {artifact.rows:,} vectors of {described['dim']}, {artifact.config['numerics']}")
    return None


@dataclass(frozen=True)
class Speed:
    """How fast an encoding went. startup: seconds of an encoder; ready, first, last: when the first encoder was ready,
    and when the first and the last part were committed, seconds since the epoch; first_rows: passages of the first."""

    rows: int
    tokens: int
    startup: float
    ready: float
    first: float
    first_rows: int
    last: float

    @property
    def seconds(self) -> float:
        return max(self.last - self.ready, 1e-9)


def encode(
    store: Store, options: EncodeCorpus, spec: EncoderSpec, name: str, described: dict[str, Any]
) -> Speed | None:
    """Encode what is left of the corpus and complete its generations; None where nothing was left."""
    connect(store)
    weights = sum(file.stat().st_size for file in weight_files(resolve(spec.folder)))
    kind = described["model_type"]
    pool = choose_pool(options.min_workers, options.max_workers, options.cpus, options.gpus, weights,
                       lambda: packs(kind, spec.options, choose_device("cpu")))  # fmt: skip
    numerics = numerics_of(pool, spec.options, kind)
    encoding = Encoding(store, spec, name, numerics=numerics, limit=options.limit)
    startup, ready, last, tokens = 0.0, float("inf"), 0.0, 0
    first, first_rows = 0.0, 0
    with Stage("encode", encoding.rows_kept + encoding.rows_left) as stage:
        stage.count(encoding.rows_kept, kept=True)
        for done in encoding.run(pool):
            startup, ready, last = done.startup, min(ready, done.ready), time.time()
            tokens += done.tokens
            if not first:
                first, first_rows = last, done.rows
            stage.count(done.rows)
    encoding.finish(described["dim"], similarity_of(described))
    return Speed(encoding.rows_left, tokens, startup, ready, first, first_rows, last) if tokens else None


def plan(store: Store, options: EncodeCorpus, spec: EncoderSpec, described: dict) -> None:
    """What an encoding reads and writes; the time only a first run can tell."""
    corpus = Corpus.open(store)
    rows = min(corpus.num_rows, options.limit or corpus.num_rows)
    text = sum(part.part.bytes for part in corpus.parts)
    say(f"corpus   {corpus.num_rows:,} passages in {len(corpus.parts):,} parts, {human(text)}")
    say(f"encoder  {options.task or spec.name}: {described['dim']} dimensions, {similarity_of(described)}")
    say(f"writes   {rows:,} vectors, {human(rows * described['dim'] * 2)} of float16")
    say(f"tokens   about {text / 4.5 * rows / max(1, corpus.num_rows):,.0f} (4.5 bytes a token), before cutting")


if __name__ == "__main__":
    run(main, EncodeCorpus)
