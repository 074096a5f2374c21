"""The jobs of riptide, one module per command, and the packages that they share."""
