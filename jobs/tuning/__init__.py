"""Training of a retriever, checked against the store before any training, and without Ray.

options     the options of `train_retriever` and `tune_prompts`
opening     opens the artifacts that they name, and checks that all of them fit
serving     warnings about artifacts that one server cannot serve together with the new prompt
"""
