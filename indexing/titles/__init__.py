"""Titles of passages from a separate file."""
