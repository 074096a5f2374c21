"""Corpus to embeddings: Ray Data drives a pool of encoders over part references, one embeddings part each."""

from __future__ import annotations

import functools
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from indexing.artifact import Draft
from indexing.chain import RowPart
from indexing.corpus import Corpus, open_table
from indexing.encoders import EncoderSpec, differing
from indexing.store import Store, generation
from indexing.tasks import node_cores, num_slots
from retriever.encoder import Encoder, EncoderOptions
from retriever.errors import InputError
from retriever.numerics import expected_numerics

_PROCESS = 1 << 30  # bytes of an encoder's process beside its model's weights, compiled and not
AT_ONCE = 2  # parts of an encoder: one is read, tokenised or written, the other is on the device
GROWS_AT = 0.75  # of what a pool can hold at once: that is never more than all, as nothing waits at an actor
RESTARTS = 100  # of an encoder whose process or node is lost; what it had begun is done again


@dataclass(frozen=True)
class Pool:
    """How many encoders run, and what each holds. A GPU encoder takes one GPU."""

    min_workers: int
    max_workers: int
    cpus: int  # cores, and threads, of each
    gpus: int

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class PartDone:
    """A part that is committed: passages, tokens, and when its encoder was ready (seconds since the epoch)."""

    rows: int
    tokens: int
    ready: float
    startup: float
    error: str = ""  # of an InputError: Ray Data would wrap it beyond recognition, and print its trace


class Encoding:
    """The embeddings of a corpus, begun: what is left to do, and the doing."""

    def __init__(self, store: Store, spec: EncoderSpec, name: str, *, numerics: str, limit: int | None = None):
        """Pin configuration and inputs of each generation. Raises InputError where others were pinned."""
        self.store, self.spec, self.numerics = store, spec, numerics
        self.corpus = Corpus.open(store)
        self.name = limited_name(name, limit)
        config = {"encoder": spec.describe("passage"), "numerics": numerics, "limit": limit}
        self.drafts: list[Draft] = []
        self.items: list[dict[str, int]] = []  # parts to encode: index in corpus.parts, rows
        self.rows_kept = 0
        committed: dict[tuple[str, str], Any] = {}
        for number, artifact in enumerate(self.corpus.generations):
            key = f"{self.name}/{generation(number)}"
            draft = store.create("embeddings", key, inputs={"corpus": artifact, **spec.inputs()}, config=config)
            self.drafts.append(draft)
            committed |= {(artifact.key, part): entry for part, entry in draft.committed().items()}
        left = self.corpus.num_rows if limit is None else limit
        for index, part in enumerate(self.corpus.parts):
            rows = min(part.part.rows, left)
            left -= rows
            if rows and (part.artifact.key, part.part.name) in committed:
                self.rows_kept += rows
            elif rows:
                self.items.append({"part": index, "rows": rows})

    @property
    def rows_left(self) -> int:
        return sum(item["rows"] for item in self.items)

    def run(self, pool: Pool) -> Iterator[PartDone]:
        """Encode what is left on the cluster; yields each part as it is committed."""
        if not self.items:
            return
        import ray

        set_up(ray.data.DataContext.get_current())
        pooled = ray.data.ActorPoolStrategy(
            min_size=pool.min_workers,
            max_size=pool.max_workers,
            initial_size=max(pool.min_workers, min(pool.max_workers, places(pool.cpus, pool.gpus), len(self.items))),
            max_concurrent_calls_per_actor=AT_ONCE,
            max_tasks_in_flight_per_actor=AT_ONCE,  # not more ahead: an encoder may be ready later
            enable_true_multi_threading=True,
        )
        parts = ray.data.from_items(self.items, override_num_blocks=len(self.items))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the last two have no other name yet
            dataset = parts.map(
                EncodeWorker,
                fn_constructor_args=(self.store, self.drafts, self.spec, self.numerics, pool),
                compute=pooled,
                num_cpus=pool.cpus,
                num_gpus=pool.gpus,
                max_restarts=RESTARTS,
                max_task_retries=-1,  # they are spent while a lost encoder waits for a place; restarts are the bound
            )
        for row in dataset.iter_rows():
            done = PartDone(**row)
            if done.error:
                raise InputError(done.error)
            yield done

    def finish(self, dim: int, similarity: str) -> None:
        """Complete every generation."""
        for draft in self.drafts:
            if not draft.complete:
                spec = self.spec
                draft.note(encoder=spec.name, options=asdict(spec.options), task=spec.task, dim=dim,
                           similarity=similarity)  # fmt: skip
                draft.finish()


def set_up(context: Any) -> None:
    """Ray Data's DataContext, for an encoding."""
    context.enable_progress_bars = False
    context.max_errored_blocks = 0  # a part that fails ends the job: nothing is dropped
    context.actor_task_retry_on_errors = False
    context.autoscaling_config.actor_pool_util_upscaling_threshold = GROWS_AT


class EncodeWorker:
    """An encoder in a process of its own: from a part reference to a committed part of embeddings."""

    def __init__(self, store: Store, drafts: list[Draft], spec: EncoderSpec, numerics: str, pool: Pool):
        started = time.time()
        self.error = ""
        # All that runs the model runs in this one thread. OpenMP keeps a pool of threads for each thread that calls it,
        # and once these are more than the cores its workers sleep between steps instead of waiting at the ready.
        self.device = ThreadPoolExecutor(1, "device")
        try:
            self.device.submit(self._open, store, drafts, spec, numerics, pool).result()
        except InputError as error:
            self.error = str(error)
        self.ready = 0.0
        self.startup = time.time() - started

    def _open(self, store: Store, drafts: list[Draft], spec: EncoderSpec, numerics: str, pool: Pool) -> None:
        self.corpus = Corpus.open(store)
        self.drafts = {f"corpus/{draft.key.rpartition('/')[2]}": draft for draft in drafts}
        self.encoder, self.task = spec.open(device=pool.device, threads=pool.cpus), spec.task
        check_encoder(spec.config_of(self.encoder, "passage"), drafts[0].config["encoder"])
        if self.encoder.numerics != numerics:
            raise InputError(
                f"{drafts[0].url} is of the numerics class `{numerics}`, this worker's is `{self.encoder.numerics}`: "
                "one artifact has one class; use workers of one kind, or set --dtype and --compile"
            )

    def __call__(self, item: Mapping[str, int]) -> dict[str, Any]:
        rows = tokens = 0
        self.ready = self.ready or time.time()
        error = self.error
        try:
            if not error:
                rows, tokens = self.encode(item)
        except InputError as raised:
            error = str(raised)
        return asdict(PartDone(rows, tokens, self.ready, self.startup, error))

    def encode(self, item: Mapping[str, int]) -> tuple[int, int]:
        """Encode and commit a part; (passages, tokens)."""
        part, rows = self.corpus.parts[item["part"]], item["rows"]
        if self.drafts[part.artifact.key].find(part.part.name):
            return rows, 0  # Ray tries again what it did not hear the end of
        tokens, vectors = encode_part(self.encoder, part, rows, self.device, self.task)
        draft = self.drafts[part.artifact.key]
        draft.commit(
            part.part.name, ".npy", lambda path: np.save(path, vectors), rows=rows, corpus_sha256=part.part.sha256
        )
        return rows, tokens


def check_encoder(config: Mapping[str, Any], pinned: Mapping[str, Any]) -> None:
    """Raises InputError unless this worker's encoder is the pinned one: another machine may hold other weights."""
    if differ := differing(pinned, config):
        names = ", ".join(differ)
        raise InputError(
            f"the encoder on {platform.node()} is not the pinned one ({names} differ): give all nodes the same"
        )


def encode_part(
    encoder: Encoder, part: RowPart, rows: int, device: Executor, task: str | None = None
) -> tuple[int, np.ndarray]:
    """(tokens, float16 [rows, dim]) of the first `rows` passages of a part; the model runs on the thread of `device`.

    Beside a GPU, one part is tokenised while another is on it. On the processor both would want all cores at once, and
    the model's threads would wait for one another.
    """
    table = open_table(part).slice(0, rows)
    texts = encoder.compose(table.column("title").to_pylist(), table.column("text").to_pylist())
    if encoder.device.type == "cpu":
        tokens = device.submit(encoder.tokenize, texts, side="passage").result()
    else:
        tokens = encoder.tokenize(texts, side="passage")
    vectors = device.submit(functools.partial(encoder.forward, tokens, side="passage", task=task)).result()
    half = vectors.astype(np.float16)
    if not np.isfinite(half).all():
        row = int(np.flatnonzero(~np.isfinite(half).all(axis=1))[0])
        raise InputError(
            f"{part.artifact.url}/{part.part.file}: the vector of passage {part.first_row + row} does not fit float16 "
            f"(largest {np.abs(vectors[row]).max():.3g}); normalise it (--normalize)"
        )
    return int(tokens.lengths.sum()), half


def choose_pool(
    min_workers: int,
    max_workers: int | None,
    cpus: int | None,
    gpus: int | None,
    weights: int = 0,
    packed: Callable[[], bool] = lambda: False,
) -> Pool:
    """Fill in what was left open, from the cluster as it is. Raises InputError for what it cannot give.

    weights: the model's bytes. packed: tells whether batches are not padded, and each is one thread's. Without GPUs
    such encoders share a node's cores in about fours, one copy of the weights for all threads of each. Others get as
    few cores each as memory allows: one of one core makes 7% more of it than one of two, whose threads wait for each
    other.
    """
    import ray

    if cpus is not None and cpus < 1:
        raise InputError(f"--cpus {cpus}: expected at least 1")
    if gpus not in (None, 0, 1):
        raise InputError(f"--gpus {gpus}: expected 0 or 1")
    if min_workers < 1:
        raise InputError(f"--min-workers {min_workers}: expected at least 1")
    if max_workers is not None and max_workers < min_workers:
        raise InputError(f"--max-workers {max_workers}: expected at least the {min_workers} of --min-workers")
    total = ray.cluster_resources()
    gpus = gpus if gpus is not None else int(total.get("GPU", 0) >= 1)
    if gpus > total.get("GPU", 0) and max_workers is None:
        raise InputError(
            f"--gpus {gpus}: the cluster has {total.get('GPU', 0):.0f} GPUs now; name --max-workers to wait for more"
        )
    if cpus is not None and max_workers is None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        largest = max((node.get("CPU", 0) for node in nodes if node.get("GPU", 0) >= gpus), default=0)
        if cpus > largest:
            raise InputError(
                f"--cpus {cpus}: the largest node{' with a GPU' * gpus} has {largest:.0f} cores now; "
                "name --max-workers to wait for a larger one"
            )
    cpus = cpus or (min(4, node_cores()) if gpus else _cores_each(weights, _shared() if packed() else 1))
    return Pool(min_workers, max(min_workers, max_workers or places(cpus, gpus)), cpus, gpus)


def places(cpus: int, gpus: int) -> int:
    """How many encoders of so many cores and GPUs the cluster has room for, now."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0) // gpus) if gpus else num_slots(cpus)


def _shared() -> int:
    """Cores of each encoder, eight at most (its threads share Python's lock): next to four, of those that leave a tenth
    of all nodes' cores idle at most, or else the fewest."""
    import ray

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    sizes, tenth = range(1, 1 + min(8, max([1, *nodes]))), sum(nodes) / 10
    return min(sizes, key=lambda each: (max(tenth, sum(cores % each for cores in nodes)), abs(each - 4), -each))


def _cores_each(weights: int, least: int) -> int:
    """The fewest cores for an encoder of so many bytes at which those of a node fill half its memory at most, and not
    below `least`; never more than the largest node has."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    each = _PROCESS + 2 * weights
    cores = max((node["CPU"] * each / (node.get("memory", 0) / 2 or each) for node in nodes), default=1)
    return min(int(max((node["CPU"] for node in nodes), default=1)), max(least, math.ceil(cores)))


def numerics_of(pool: Pool, options: EncoderOptions, kind: str) -> str:
    """The numerics class of this pool's workers, asked of one of them; waits until the cluster has room for it. kind:
    the backbone's `model_type`."""
    import ray

    task = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus, max_retries=RESTARTS)(expected_numerics)
    return ray.get(task.remote(options, pool.device, kind))


def similarity_of(described: Mapping[str, Any]) -> str:
    """What the inner product of an encoder's vectors is: cosine where its head ends by normalising them."""
    return "cosine" if described["head"] and described["head"][-1] == "normalize" else "dot"


def limited_name(name: str, limit: int | None) -> str:
    """`name`, or `name-limitN` for the embeddings of the first N passages."""
    return name if limit is None else f"{name}-limit{limit}"


def is_encoded(store: Store, name: str, described: Mapping[str, Any], limit: int | None) -> bool:
    """Whether every generation of the corpus has complete embeddings of this encoder, of whatever numerics class."""
    corpus = Corpus.open(store)
    made = store.generations("embeddings", limited_name(name, limit))
    return len(made) == len(corpus.generations) and all(
        one.inputs["corpus"]["fingerprint"] == other.fingerprint
        and one.config["encoder"] == described
        and one.config["limit"] == limit
        for one, other in zip(made, corpus.generations, strict=True)
    )
