"""The backbone of most experiments."""

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
