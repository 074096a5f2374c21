"""The corpus of a store and the query sets with judgements: import, reading and filters.

corpus               corpus/: passages as a chain of generations, for reading
importing            raw files to a generation of the corpus
ids                  passage id to row
duplicates           merges the ids of parts, and refuses an id that occurs twice
filters              conditions on the metadata of passages
filter_text          parses conditions that are written as text
later_filters        gives an existing corpus other filters
named_values         parses NAME=VALUE and NAME=VALUE,…, by which options name query sets
queries              queries/NAME: queries and judgements
hold_out             moves queries of a split to a new one
judged_pairs         the relevant passages of each query, as the judgements name them
categories           the categories of passages, from their metadata
category_relevance   a passage is relevant for a query if they have a category in common
"""
