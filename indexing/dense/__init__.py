"""Dense search: FAISS indexes, and search over shards and rows.

factory            chooses and parses FAISS factory strings
kmeans             trains the centroids of inverted lists
faiss_index        creates, writes and reads FAISS indexes
faiss_filling      trains FAISS indexes, and fills them with vectors
faiss_search       searches FAISS indexes for candidates
index              index/NAME over dense embeddings
building           the work that builds an index
explained_rows     the inverted lists that hold given passages
shard              open shards: FAISS finds candidates, and the vectors score them exactly
dense_search       dense and exact search by tasks over shards and ranges of rows
recall             recall at k of approximate search
certified_recall   recall of approximate search from a sample of queries, with a confidence interval
"""
