"""Sparse embeddings (SPLADE) and their index.

files        the file of a part: CSR vectors
embeddings   embeddings/NAME with sparse vectors, for reading
impacts      weights as whole numbers
lucene       impacts in Lucene: segments, and search
building     the work that builds an index of impacts
index        index/NAME over sparse embeddings, for reading and search
"""
