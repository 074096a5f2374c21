"""Encoders of texts, re-rankers that score query-passage pairs, and the saving of trained encoders.

encoder          texts to dense vectors
encoder_tasks    the prompts of tasks, and which of them a text has
backbones        loads backbones with their pooling
sparse_encoder   texts to sparse vectors (SPLADE)
sparse_model     a weight for each word of the vocabulary
sparse_vectors   sparse vectors in CSR form
language_model   masked language models and their heads
pair_encoding    pairs of a query and a passage for a cross-encoder
reranker         the cross-encoder
saving           saves a trained encoder in the layout of sentence-transformers
mteb_encoder     the encoder protocol of the package mteb
"""
