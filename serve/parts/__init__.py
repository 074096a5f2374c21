"""What answers queries: the models, the leaves, and the engine over them."""
