"""Training runs on data of a store: in this process, or on the workers of a Ray cluster."""
