"""The search service: answers queries over HTTP, in one process or on Ray Serve."""
