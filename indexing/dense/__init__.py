"""Dense search: FAISS indexes, and search over shards and rows.

factory        FAISS' factory strings: their choice, whether one is flat, its number of lists
faiss_index    FAISS on plain arrays
index          index/NAME over dense embeddings
building       the work that builds an index
shard          open shards: candidates of FAISS, scored again by the vectors
dense_search   dense and exact search, as tasks over shards and ranges of rows
"""
