"""sentence-transformers in its int8 forms, which need a separate environment; `benchmarks/encode.py` starts it.

The environment, as transformers 4 is needed (Python 3.11):

    pip install torch "sentence-transformers<6" "transformers<5" "huggingface-hub<1.0" "datasets<4.2" \\
        optimum-onnx onnxruntime openvino optimum-intel nncf

Its arguments are a model folder, the form (onnx or openvino), a number of threads, and a JSON file of the texts from
which OpenVINO finds its scales. It reads one JSON line per call, {"texts": FILE, "vectors": FILE}, and answers with the
seconds and the CPU seconds of the encoding.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CALIBRATION_TEXTS = 300


def open_onnx(folder: str, target: str, texts: list[str], threads: int) -> Any:
    """Quantises a model dynamically for this CPU's instructions and opens it."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    del texts
    instructions = "avx512_vnni" if "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else "avx2"
    export_dynamic_quantized_onnx_model(SentenceTransformer(folder, backend="onnx"), instructions, target)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    [file] = Path(target, "onnx").glob("*.onnx")  # model_qint8_avx512_vnni.onnx or model_quint8_avx2.onnx
    arguments = {"file_name": f"onnx/{file.name}", "session_options": settings}
    complete(folder, target)
    return SentenceTransformer(target, backend="onnx", model_kwargs=arguments)


def open_openvino(folder: str, target: str, texts: list[str], threads: int) -> Any:
    """Quantises a model statically, with scales from texts, and opens it."""
    from datasets import Dataset
    from optimum.intel import OVConfig, OVQuantizationConfig, OVQuantizer
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, backend="openvino")
    tokens = model.tokenizer(texts[:CALIBRATION_TEXTS], padding="max_length", max_length=256, truncation=True)
    OVQuantizer.from_pretrained(model[0].auto_model).quantize(
        calibration_dataset=Dataset.from_dict(dict(tokens)),
        save_directory=target,
        ov_config=OVConfig(quantization_config=OVQuantizationConfig()),
    )
    complete(folder, target)
    settings = {"INFERENCE_NUM_THREADS": str(threads)}
    [file] = Path(target, "openvino").glob("*.xml")
    arguments = {"file_name": f"openvino/{file.name}", "ov_config": settings}
    return SentenceTransformer(target, backend="openvino", model_kwargs=arguments)


def complete(folder: str, target: str) -> None:
    """Links the files of the original model that the quantised one lacks."""
    for file in Path(folder).rglob("*"):
        place = Path(target, file.relative_to(folder))
        if file.is_file() and not place.exists() and file.suffix not in (".safetensors", ".bin"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.resolve())


def main() -> None:
    """Opens the model and answers calls until the input ends."""
    import numpy as np
    import torch

    folder, form, threads, calibration = sys.argv[1:]
    torch.set_num_threads(int(threads))
    answers = os.fdopen(os.dup(1), "w")  # libraries print to standard output
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as target:
        texts = json.loads(Path(calibration).read_text(encoding="utf-8"))
        model = {"onnx": open_onnx, "openvino": open_openvino}[form](folder, target, texts, int(threads))
        for line in sys.stdin:
            call = json.loads(line)
            texts = json.loads(Path(call["texts"]).read_text(encoding="utf-8"))
            started, cpu = time.perf_counter(), time.process_time()
            vectors = model.encode(texts, batch_size=32)
            seconds = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
            np.save(call["vectors"], vectors)
            print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
