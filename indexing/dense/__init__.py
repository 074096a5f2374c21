"""Dense search: FAISS indexes, and search over shards and rows.

factory       the choice of FAISS' factory string
faiss_index   FAISS on plain arrays
index         index/NAME over dense embeddings
building      the work that builds an index
shard         a shard, opened: candidates of FAISS, scored again by the vectors
searching     dense and exact search, as tasks over shards and ranges of rows
online        searchers that stay open in one process
"""
