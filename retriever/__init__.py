"""Models that convert text to vectors and score pairs, and their training; it knows no stores and no Ray."""
