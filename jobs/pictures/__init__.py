"""Pictures of the papers as PNG files: pure functions of arrays, without a display."""
