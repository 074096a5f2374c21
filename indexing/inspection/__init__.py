"""Inspection of results: search in this process, snippets, tables of hits, one query of a run with its judgements."""
