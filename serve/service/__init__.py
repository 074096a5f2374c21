"""The service of one process: queues, the live release, and its changes."""
