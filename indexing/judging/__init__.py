"""Judges trained models by what they were trained on."""
