"""Training on several training sets: which queries each batch holds."""
