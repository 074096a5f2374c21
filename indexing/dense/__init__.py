"""Dense search: FAISS indexes, and search over shards and rows.

faiss_index   FAISS on plain arrays
index         index/NAME over dense embeddings
building      the work that builds an index
searching     dense and exact search, as tasks over shards and ranges of rows
online        searchers that stay open in one process
"""
