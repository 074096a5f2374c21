"""The corpus of a store: import, reading and filters.

corpus          corpus/: passages as a chain of generations, for reading
importing       imports raw files as a generation of the corpus
syncing         makes the corpus equal to its source by importing what differs
ids             finds the rows of passage ids by hashes
duplicates      merges the ids of parts, and refuses an id that occurs twice
filters         conditions on the metadata of passages
row_sets        sets of rows, and the cache of those that match filters
filter_text     parses conditions that are written as text
later_filters   replaces the filters of an existing corpus
categories      the categories of passages, from their metadata
"""
