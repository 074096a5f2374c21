"""Measures the quality and speed of runs, and properties of embeddings.

metrics                  metrics of a run with judgements, paired tests and intervals
metadata_metric          the interface of a metric from metadata of the queries
many_relevant            metrics for queries with many relevant passages
answers                  whether a passage contains an answer
pages                    R-precision of pages (KILT)
ranked_lists             the hits of a run as ranked lists
lengths                  the median length of the first hits
rates                    queries per second of a source
vectors                  alignment and uniformity of vectors
embedding_measures       embeddings measured with judged pairs
embeddings_by_category   embeddings measured by category
prompt_weights           the mean attention of query sets to basic prompts
sparsity                 how sparse vectors are, and what a search with them costs
distributions            similarities of probability distributions
"""
