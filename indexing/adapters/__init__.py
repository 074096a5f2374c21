"""Encoders and tasks of a store as other programs call them; the adapters are in retriever/adapters/."""
