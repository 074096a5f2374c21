"""Sparse vectors (SPLADE): embeddings, and search by their impacts in Lucene.

sparse_embeddings   sparse vectors and their reader
csr_file            the file of a part of sparse vectors
impacts             the weights of sparse vectors as whole numbers
lucene_search       impacts in Lucene
index               index/NAME over sparse embeddings
building            the work that builds it
"""
