"""Parts of benchmarks/hostile_requests.py: the requests that it sends, and the store that it serves."""
