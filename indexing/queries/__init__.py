"""The query sets of a store, and which passages are relevant to their queries.

queries              queries/NAME: queries and judgements
hold_out             moves queries of a split to a new split
provenance           judges passages by the pages and spans that queries name (KILT)
judged_pairs         the relevant passages of each query, by the judgements
category_relevance   relevance of passages that share a category with the query
"""
