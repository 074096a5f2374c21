"""What turns text into vectors and learns to."""
