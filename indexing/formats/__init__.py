"""Detects the formats of corpora, queries and judgements, and parses them to Arrow; a module per format.

sources       finds corpora and queries, and detects their format
chunking      cuts the rows of a corpus into chunks
parse         parses a chunk, or files of queries, to Arrow tables
format        what a format says about itself: names of files, detection, columns, readers, documentation
registry      the registry of formats
tables        what all formats with any columns have in common
csv_tsv       CSV and TSV
jsonl         JSON lines
parquet       Parquet
beir          BEIR
msmarco       MS MARCO
dpr           DPR
kilt          KILT
text_folder   folders of plain text, Markdown and HTML
"""
