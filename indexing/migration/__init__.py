"""The change of an encoder: what it gains or loses, before and after the corpus is encoded again.

space_maps         maps from the vectors of one encoder to another one's, fitted on texts that both have encoded
rank_metrics       nDCG@K, R@K and RR@K of a query from the ranks of its relevant passages
unknown_passages   the number of passages with unknown scores above a relevant one, from random passages
forecast           the quality of an encoder of which only a sample of the passages is encoded
migration_sample   the passages and queries that both encoders encode for a forecast
requirements       the requirements of a gate, and whether paired values of queries meet them
"""
