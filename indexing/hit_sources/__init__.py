"""Sources of hits: a module per kind, their registry, and the grammar that names them and their fusions."""
