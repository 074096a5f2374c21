"""Modules of benchmarks/hostile_requests.py: the requests, the store that is served, and the measurement."""
