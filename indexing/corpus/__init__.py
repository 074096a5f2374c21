"""The corpus of a store and the query sets with judgements: import, reading and filters.

corpus               corpus/: passages as a chain of generations, for reading
importing            imports raw files as a generation of the corpus
syncing              makes the corpus equal to its source by importing what differs
ids                  finds the rows of passage ids by hashes
duplicates           merges the ids of parts, and refuses an id that occurs twice
filters              conditions on the metadata of passages
row_sets             sets of rows, and the cache of those that match filters
filter_text          parses conditions that are written as text
later_filters        replaces the filters of an existing corpus
queries              queries/NAME: queries and judgements
hold_out             moves queries of a split to a new split
provenance           judges passages by the pages and spans that queries name (KILT)
judged_pairs         the relevant passages of each query, by the judgements
categories           the categories of passages, from their metadata
category_relevance   relevance of passages that share a category with the query
"""
