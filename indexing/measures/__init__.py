"""Measures beyond judged passages: vectors of embeddings (alignment, uniformity, cosines) and pages of hits (KILT)."""
