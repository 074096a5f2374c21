"""Mines hard negatives: pools hits of several sources, denoises them by a re-ranker, and samples.

pools        pooling, seeded order and margins as functions on tables
sampling     samples negatives from a pool, as a function on tables; the options of the negatives
candidates   the work that pools the hits of all sources
copies       passages with the title and text of another one
scoring      the work that scores a pool with a re-ranker, and the known scores
denoising    the work that samples negatives from a pool and its scores
negatives    mined negatives as training data
teacher      a re-ranker's scores, stored with negatives
exports      training files of other programs
report       a page about a mining
"""
