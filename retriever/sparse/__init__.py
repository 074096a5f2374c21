"""Learned sparse retrieval (SPLADE): texts to weights of the words of a vocabulary.

vectors          sparse vectors in CSR form
language_model   masked language models of transformers, and their heads
model            SPLADE's vectors over such a model
encoder          texts to sparse vectors
flops            the FLOPS regulariser of training
"""
