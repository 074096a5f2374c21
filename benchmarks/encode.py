"""Compares encoding with sentence-transformers in its documented forms: tokens/s, CPU time, cosine and nDCG@10.

    python benchmarks/encode.py --data examples/squad/corpus.jsonl.gz --count 512 --threads 2
    python benchmarks/encode.py --peers ENVIRONMENT/bin/python --quality ../shared/data/scifact

Rounds alternate riptide (with default settings, in float32 and in int8) and sentence-transformers (in float32; in
bfloat16 unless the CPU lacks its instructions; with --peers also as ONNX and OpenVINO int8, in the environment that
`benchmarks/common/int8_peer.py` names); the medians are compared. Each round has different passages, because batches of
lengths that occurred before are faster. All systems get the same strings (title and text joined by a space) and
tokenise them within the measured time, and their tokens/s count the tokens of the texts without padding. --quality
encodes a data set in BEIR form with each system and measures its test split. Start-up is the time from a fresh process
to the first vector, once with an empty compiler cache and once with a filled one.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from benchmarks.common.files import read_documents, read_qrels, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.forward.numerics import bfloat16_instructions
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.options import EncoderOptions, EncoderPrecision
from riptide.retriever.options.encoding import Compile

START = """
import sys, time
started = time.perf_counter()
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
encoder = Encoder(sys.argv[1], EncoderOptions(compile=sys.argv[2]), threads=int(sys.argv[3]))
encoder.encode(["a query"])
print(time.perf_counter() - started)
"""


START_UPS = {"not compiled": "never", "compiled, empty cache": "always", "compiled, filled cache": "always"}


def read_passages(path: Path, count: int, rounds: int) -> list[tuple[list[str], list[str]]]:
    """Returns the titles and the texts of each round: different passages, spread evenly over a BEIR corpus.

    A round has `count` passages; fewer if the corpus is small.
    """
    rows = list(read_documents(path))
    rows = rows[:: max(1, len(rows) // (count * rounds))]
    rows_by_round = [rows[number::rounds][: min(count, len(rows) // rounds)] for number in range(rounds)]
    return [([row.get("title") or "" for row in part], [row["text"] for row in part]) for part in rows_by_round]


def measure_start_up(model: str, compile: str, threads: int, cache: str) -> float:
    """Returns the seconds from a fresh process, before any import, to its first vector. cache: that of the compiler."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", START, model, compile, str(threads)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


class Encoding(NamedTuple):
    """The result of a call: vectors, float32 [n, dim], and its seconds and CPU seconds."""

    vectors: np.ndarray
    seconds: float
    cpu: float


System = Callable[[Sequence[str]], Encoding]


def timed(encode: Callable[[Sequence[str]], Any]) -> System:
    """Returns the system of a function of this process."""

    def run(texts: Sequence[str]) -> Encoding:
        started, cpu = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        return Encoding(np.asarray(vectors, np.float32), time.perf_counter() - started, time.process_time() - cpu)

    return run


@contextmanager
def int8_peer(python: str, folder: str, form: str, threads: int, calibration: Sequence[str]) -> Iterator[System]:
    """Starts sentence-transformers in an int8 form, "onnx" or "openvino", and yields it as a system."""
    script = Path(__file__).with_name("common") / "int8_peer.py"
    with tempfile.TemporaryDirectory() as scratch:
        texts_file, vectors_file = Path(scratch, "texts.json"), Path(scratch, "vectors.npy")
        texts_file.write_text(json.dumps(list(calibration)), encoding="utf-8")
        command = [python, str(script), folder, form, str(threads), str(texts_file)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdin
            assert process.stdout
            call = json.dumps({"texts": str(texts_file), "vectors": str(vectors_file)})

            def run(texts: Sequence[str]) -> Encoding:
                texts_file.write_text(json.dumps(list(texts)), encoding="utf-8")
                assert process.stdin
                assert process.stdout
                print(call, file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if not answer:
                    raise SystemExit(f"error: {' '.join(command)} ended; run it to see why")
                seconds = json.loads(answer)
                return Encoding(np.load(vectors_file).astype(np.float32), seconds["seconds"], seconds["cpu"])

            yield run
            process.stdin.close()


def smallest_cosine(vectors: np.ndarray, reference: np.ndarray) -> float:
    """Returns the smallest cosine of vectors, float [n, dim], with those of the same rows of `reference`."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float(((vectors * reference).sum(1) / norms).min())


def measure_quality(folder: Path, systems: Mapping[str, System], encoder: Encoder) -> dict[str, float]:
    """Returns nDCG@10 on the test split of a data set in BEIR form, over all its passages, of each system."""
    import ir_measures

    documents = list(read_documents(folder / "corpus.jsonl"))
    passages = encoder.compose([row.get("title") or "" for row in documents], [row["text"] for row in documents])
    qrels = [ir_measures.Qrel(q, p, int(score)) for q, p, score in read_qrels(folder / "qrels/test.tsv")]
    judged = {qrel.query_id for qrel in qrels}
    queries = list(read_documents(folder / "queries.jsonl", judged))
    ndcg = {}
    for name, encode in systems.items():
        scores = encode([row["text"] for row in queries]).vectors @ encode(passages).vectors.T
        hits = np.argsort(-scores, axis=1, kind="stable")[:, :10]
        run = [
            ir_measures.ScoredDoc(query["_id"], documents[hit]["_id"], float(scores[row, hit]))
            for row, query in enumerate(queries)
            for hit in hits[row]
        ]
        ndcg[name] = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, run)[ir_measures.nDCG @ 10]
    return ndcg


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", ROOT / "examples/squad/corpus.jsonl.gz", "BEIR corpus, compressed or not")
    parser.add("--count", 512, "passages per round")
    parser.add("--model", MINILM, "encoder")
    parser.add("--threads", os.cpu_count(), "CPU threads (default: all cores)")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--batch", 32, "texts per batch of sentence-transformers in float32 and bfloat16")
    parser.add(
        "--dtypes", ["auto", "float32", "int8"], "dtypes of riptide's encoder", choices=get_args(EncoderPrecision)
    )
    parser.add("--compile", "auto", "whether riptide's encoder is compiled", choices=get_args(Compile))
    parser.add("--peers", None, "Python of the environment of sentence-transformers' int8 forms (default: none)")
    parser.add("--quality", None, "data set in BEIR form for nDCG@10 (default: none)")
    parser.add("--no-start-up", False, "do not measure start-up times")
    parser.add("--json", "results/encode.json", "output file")
    options = parser.parse_args()

    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    encoders = {
        dtype: Encoder(options.model, EncoderOptions(dtype=dtype, compile=options.compile), threads=options.threads)
        for dtype in options.dtypes
    }
    encoder = encoders[options.dtypes[0]]
    first, *others = [encoder.compose(*part) for part in read_passages(options.data, options.count, 1 + options.rounds)]
    num_tokens = [int(encoder.tokenize(passages, side="passage").lengths.sum()) for passages in others]
    folder, device = str(find_model_folder(options.model)), encoder.device.type
    systems: dict[str, System] = {
        f"riptide {dtype}": timed(functools.partial(model.encode, side="passage")) for dtype, model in encoders.items()
    }
    for dtype in ("float32", "bfloat16") if device != "cpu" or bfloat16_instructions() else ("float32",):
        model = SentenceTransformer(folder, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
        systems[f"sentence-transformers {dtype}"] = timed(
            lambda texts, model=model: model.encode(list(texts), batch_size=options.batch)
        )
    with ExitStack() as stack:
        for form in ("onnx", "openvino") if options.peers else ():
            peer = int8_peer(options.peers, folder, form, options.threads, first)
            systems[f"sentence-transformers {form} int8"] = stack.enter_context(peer)
        count = len(first)
        print(f"{count} passages per round, {sum(num_tokens)} tokens, {options.threads} threads; {encoder.numerics}")
        warm_up = {name: encode(first).vectors for name, encode in systems.items()}
        cosines = {
            name: smallest_cosine(vectors, warm_up["sentence-transformers float32"])
            for name, vectors in warm_up.items()
        }
        calls = [{name: encode(passages) for name, encode in systems.items()} for passages in others]
        quality = measure_quality(Path(options.quality), systems, encoder) if options.quality else {}
    rates = {
        name: statistics.median(tokens / turn[name].seconds for tokens, turn in zip(num_tokens, calls, strict=True))
        for name in systems
    }
    cpu = {name: statistics.median(turn[name].cpu / count * 1000 for turn in calls) for name in systems}
    base = next(iter(systems))
    ratios = {name: statistics.median(turn[name].seconds / turn[base].seconds for turn in calls) for name in systems}
    for name, rate in rates.items():
        line = f"{name:36} {rate:9,.0f} tokens/s  {cpu[name]:6.2f} CPU ms a passage  cosine >= {cosines[name]:.5f}"
        print(line + (f"  nDCG@10 {quality[name]:.4f}" if quality else ""))
    for name, times in list(ratios.items())[1:]:
        print(f"{base} is {times:.2f} times as fast as {name} (median of {options.rounds} pairs)")
    figures: dict[str, Any] = {
        "options": vars(options),
        "num_passages": count,
        "num_tokens": num_tokens,
        "numerics": encoder.numerics,
        "seconds": {name: [turn[name].seconds for turn in calls] for name in systems},
        "cpu_seconds": {name: [turn[name].cpu for turn in calls] for name in systems},
        "cpu_ms_per_passage": cpu,
        "smallest_cosine_to_float32": cosines,
        "ndcg_at_10": quality,
        "tokens_per_second": rates,
        "times_as_fast_as": ratios,
    }
    if not options.no_start_up:
        with tempfile.TemporaryDirectory() as cache:
            figures["start_up_seconds"] = {
                name: measure_start_up(options.model, compile, options.threads, cache)
                for name, compile in START_UPS.items()
            }
        print("start-up:", ", ".join(f"{name} {time_s:.1f} s" for name, time_s in figures["start_up_seconds"].items()))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
