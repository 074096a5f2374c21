"""Reads the files of a model folder, which may be damaged or hostile, and refuses them in one line.

parsing        JSON in short steps, in time linear in its length
documents      JSON files with checked types
arguments      the arguments that sentence-transformers' files may pass on to transformers
configuration  config.json: no field that loads code, kernels or other files
tensors        safetensors files, in time linear in their bytes
weights        weight files, and the report of what was loaded from them
vocabulary     tokenizer files, and whether the tokenizer fits the weights
failures       the errors of transformers, tokenizers and torch as InputError
"""
