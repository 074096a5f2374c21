"""Options of LoRA adapters in jobs that train an encoder."""
