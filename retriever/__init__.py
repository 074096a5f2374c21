"""Models that convert text to vectors and score pairs, and their training, without stores or Ray."""
