"""Pairs of a query and a relevant passage, as the judgements of a query set name them."""
