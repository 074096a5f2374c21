"""Model folders: finds them, reads their settings and weights, and refuses damaged or malicious ones.

model_folder             finds a model folder, and lists and hashes its files
recipe                   resolved settings by which a text becomes a vector
modules                  the modules of a folder in the layout of sentence-transformers
json_fields              JSON files with checked types
configuration            loads config.json; refuses fields that load code, kernels or other files
transformers_arguments   the arguments that sentence-transformers' files may pass on to transformers
weights                  loads weight files and checks that they are complete
vocabulary               loads a tokenizer and checks that it fits the weights
libraries                imports transformers
failures                 converts errors of transformers, tokenizers, safetensors and torch to InputError
"""
