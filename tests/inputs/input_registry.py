"""The registry of inputs that a user, a file or a client controls: their cost and their errors are tested."""

from __future__ import annotations

import file_inputs
import model_inputs
import request_inputs
import text_inputs

from riptide.indexing.formats.registry import FORMATS

MODELS = request_inputs.MODELS
INPUTS = {
    tested.name: tested
    for module in (text_inputs, file_inputs, model_inputs, request_inputs)
    for tested in module.INPUTS
}
FORMAT_NAMES = {f"passages of {format.name}" for format in FORMATS}
