"""The HTTP server of one process: bounded connections and request heads over uvicorn."""
