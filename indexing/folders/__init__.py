"""Folders of result files on this machine that appear whole; a command that writes one can be repeated."""
