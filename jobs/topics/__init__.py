"""Options of prompts of topics."""
