"""Releases: what is served together, how it is planned and changed, and its artifacts opened for reading."""
