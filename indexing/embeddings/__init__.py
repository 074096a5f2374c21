"""Embeddings of a corpus: kinds of vector, dense vectors, and the work that makes embeddings.

vector_kind         the interface of a kind of vector
embeddings_reader   the base class of the readers of embeddings/NAME
dense_embeddings    dense vectors and their reader
copied_vectors      vectors of deleted passages, copied to later passages with the same text
named_encoders      specifications of encoders by name: a model with options, or a task of the store
corpus_encoding     the work that encodes a corpus
stored_encoder      the encoder that made embeddings, opened in this process
drift               compares an encoder with stored vectors, to find encoder drift
mteb_models         opens an encoder or a task of a store as a model of the package mteb
"""
