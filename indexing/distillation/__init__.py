"""Teacher scores for training by distillation."""
