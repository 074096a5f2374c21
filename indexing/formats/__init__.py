"""Detects the formats of corpora, queries and judgements, and parses them to Arrow; a module per format.

sources       finds the files of a corpus and its queries, and detects their format
chunking      cuts the rows of a corpus into chunks
parse         parses a chunk, or files of queries, to Arrow tables
format        the interface of a format: file names, detection, columns, readers, documentation
registry      the registry of formats
tables        the base class of formats whose columns are chosen
csv_tsv       CSV and TSV
jsonl         JSON Lines
parquet       Parquet
beir          BEIR
msmarco       MS MARCO
dpr           DPR
kilt          KILT
text_folder   folders of plain text, Markdown and HTML
"""
