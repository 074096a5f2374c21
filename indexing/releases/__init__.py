"""Releases in a store: the object that names the live one, and how long releases that it does not name are kept."""
