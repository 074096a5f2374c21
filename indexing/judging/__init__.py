"""Judges models: during training on a dev split, and at its end by the order of hits that they were trained on."""
