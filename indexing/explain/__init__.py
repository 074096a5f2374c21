"""Explanations of hits: what each source, the fusion and the re-ranker contributed to the score of a hit.

score_parts        the parts of the score of a hit: terms, probed lists, sources, the re-ranker
lucene_terms       reads the terms of a score from Lucene's explanation
recorded_search    a fusion that keeps the hits of its sources
hit_explanations   explanations of hits, from the hits and the score parts of each source
explanation_lines  formats explanations as lines of text
"""
