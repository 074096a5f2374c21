"""Embeddings of a corpus: kinds of vector, dense vectors, and the work that makes embeddings.

kind              the interface of a kind of vector
reader            the base of the readers of embeddings/NAME
embeddings        dense vectors and their reader
encoders          an encoder, or a task of the store, as artifacts name it
encoding          the work that encodes a corpus
stored_encoder    the encoder of some embeddings, open in this process
mteb_models       an encoder or a task of a store as a model of the package mteb
"""
