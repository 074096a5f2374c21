"""Encoders of texts, re-rankers that score query-passage pairs, and the saving of trained encoders.

encoder          texts to dense vectors
encoder_tasks    the prompts of tasks, and their assignment to texts
backbones        loads backbones with their pooling
sparse_encoder   texts to sparse vectors (SPLADE)
sparse_model     SPLADE pooling over a masked language model
sparse_vectors   sparse vectors in CSR format
language_model   masked language models and their heads
pair_encoding    query-passage pairs: settings and tokenizer of a cross-encoder
reranker         scores pairs with a cross-encoder
saving           saves a trained encoder in the layout of sentence-transformers
mteb_encoder     adapts an encoder to the package mteb
"""
