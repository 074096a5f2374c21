"""The peer of `benchmarks/serving.py`: FastAPI, sentence-transformers and FAISS, as in their documentation.

It imports nothing of riptide. sentence-transformers' int8 form needs a separate environment:
that of `int8_peer.py`, with fastapi, uvicorn, uvloop, httptools and faiss-cpu in addition.

Its arguments are the form (default, bfloat16, float32 or openvino), a model folder, a folder with the passages
(`vectors.npy`, float32 [n, dim], and `passages.json`), and a port. In its default form it encodes each request
separately (float32) and searches a flat index. All other forms are tuned: they use all cores, encode requests that
arrive together in one batch, and search inverted lists. OpenVINO finds its scales from the first passages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import Body, FastAPI
from int8_peer import open_openvino
from sentence_transformers import SentenceTransformer


def main() -> None:
    """Opens the model and the index, and serves until it is killed."""
    form, model_folder, data, port = sys.argv[1:]
    tuned = form != "default"
    vectors = np.load(Path(data, "vectors.npy"))
    passages = json.loads(Path(data, "passages.json").read_text(encoding="utf-8"))
    cores = os.cpu_count() or 1
    if tuned:
        torch.set_num_threads(cores)
        faiss.omp_set_num_threads(cores)
        index: Any = faiss.index_factory(vectors.shape[1], "IVF256,Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.nprobe = 16
    else:
        index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    with tempfile.TemporaryDirectory() as target:
        if form == "openvino":
            model = open_openvino(model_folder, target, [passage["text"] for passage in passages], cores)
        else:
            arguments = {"dtype": getattr(torch, form)} if tuned else {}
            model = SentenceTransformer(model_folder, device="cpu", model_kwargs=arguments)
        app = make_app(model, index, passages, batches=tuned)
        print(f"serving http://127.0.0.1:{port}/", flush=True)
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


def make_app(model: Any, index: Any, passages: list[dict[str, str]], *, batches: bool) -> FastAPI:
    """Returns the application. batches: encode requests that arrive together in one batch of at most 32."""
    app = FastAPI()

    def best_passages(texts: list[str], k: int) -> list[list[dict[str, Any]]]:
        """Returns the k best passages of each query."""
        encoded = model.encode(texts, normalize_embeddings=True, show_progress_bar=False).astype(np.float32)
        scores, rows = index.search(encoded, k)
        return [
            [passages[row] | {"score": score} for row, score in zip(query_rows, query_scores, strict=True)]
            for query_rows, query_scores in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    if not batches:

        @app.post("/v1/search")
        def search_alone(query: str = Body(), k: int = Body(10)) -> Any:
            return {"hits": best_passages([query], k)[0]}

        return app

    waiting: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()

    async def encode_batches() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < 32 and not waiting.empty():
                batch.append(waiting.get_nowait())
            results = await asyncio.to_thread(best_passages, [text for text, _ in batch], 10)
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        running = asyncio.create_task(encode_batches())
        yield
        running.cancel()

    app.router.lifespan_context = lifespan

    @app.post("/v1/search")
    async def search(query: str = Body(), k: int = Body(10)) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.put_nowait((query, future))
        return {"hits": await future}

    return app


if __name__ == "__main__":
    main()
