"""Options of prompts that are computed from each query."""
