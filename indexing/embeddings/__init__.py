"""Embeddings of a corpus, dense or sparse, and the work that makes them.

kind           the interface of a kind of vector
reader         the base of the readers of embeddings/NAME
embeddings     dense vectors and their reader
sparse         sparse vectors and their reader
sparse_files   the file of a part of sparse vectors
encoders       an encoder, or a task of the store, as artifacts name it
encoding       the work that encodes a corpus
mteb_models    an encoder or a task of a store as a model of the package mteb
"""
