"""Sparse embeddings (SPLADE) and their index.

files        the file of a part: CSR vectors
embeddings   embeddings/NAME with sparse vectors, for reading
"""
