"""Measures beyond judged passages: vectors of embeddings, pages of hits (KILT), length of hits (GTR)."""
