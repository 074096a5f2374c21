"""Hard negatives: pooled from several sources, denoised by a re-ranker, and sampled.

pools        pooling, seeded order, denoising and margins as functions on tables
sampling     samples negatives from a pool
candidates   the work that pools the hits of all sources
copies       passages with the title and text of another one
denoising    the works that score a pool and sample negatives from it
negatives    mined negatives as training data
teacher      a re-ranker's scores, stored with negatives
exports      training files of other programs
report       a page about a mining
"""
