"""Embeddings of a corpus, dense or sparse, and the work that makes them.

embeddings     embeddings/NAME with dense vectors, for reading
sparse         embeddings/NAME with sparse vectors, for reading
sparse_files   the file of a part of sparse vectors
encoders       an encoder, or a task of the store, as artifacts name it
encoding       the work that encodes a corpus
mteb_models    an encoder or a task of a store as a model of the package mteb
"""
