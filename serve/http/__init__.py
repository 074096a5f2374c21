"""The HTTP server of the local topology: bounded connections and request heads over uvicorn."""
