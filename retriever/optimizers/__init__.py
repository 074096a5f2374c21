"""The optimizers of training: parameter groups, and Adafactor."""
