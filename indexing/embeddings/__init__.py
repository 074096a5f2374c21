"""Embeddings of a corpus: kinds of vector, dense vectors, and the work that makes embeddings.

vector_kind         the interface of a kind of vector
embeddings_reader   the base of the readers of embeddings/NAME
dense_embeddings    dense vectors and their reader
named_encoders      an encoder, or a task of the store, as artifacts name it
corpus_encoding     the work that encodes a corpus
stored_encoder      the encoder of some embeddings, open in this process
mteb_models         an encoder or a task of a store as a model of the package mteb
"""
