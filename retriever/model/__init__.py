"""Model folders: finds them, reads their settings and weights, and refuses damaged or malicious ones.

model_folder             finds a model folder, names the files that matter, and hashes them
recipe                   how a text becomes a vector: the options and the settings of a folder
modules                  the modules of a folder in the layout of sentence-transformers
json_fields              JSON files with checked types
configuration            config.json: no field that loads code, kernels or other files
transformers_arguments   the arguments that sentence-transformers' files may pass on to transformers
weights                  weight files, and the report of what was loaded from them
vocabulary               tokenizer files, and whether the tokenizer fits the weights
libraries                imports transformers
failures                 the errors of transformers, tokenizers, safetensors and torch as InputError
"""
