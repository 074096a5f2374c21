"""Reads the files of a model folder, which may be damaged or hostile, and refuses them in one line.

documents      JSON files with checked types
arguments      the arguments that sentence-transformers' files may pass on to transformers
configuration  config.json: no field that loads code, kernels or other files
weights        weight files, and the report of what was loaded from them
vocabulary     tokenizer files, and whether the tokenizer fits the weights
failures       the errors of transformers, tokenizers, safetensors and torch as InputError
"""
