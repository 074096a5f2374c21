"""What holds and searches vectors and words."""
