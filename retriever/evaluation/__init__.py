"""Evaluation of a model during its training: quality on a dev split, shared by the workers."""
