"""Measures of the vectors of embeddings: alignment, uniformity, cosines of relevant and other pairs."""
