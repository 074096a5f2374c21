"""Raw files: corpora, queries and judgements in many formats, cut into chunks and parsed to Arrow.

sources         detects the format of a file or folder, and cuts its rows into chunks
raw             text files, local or on S3, plain or .gz, in blocks of whole lines
readers         readers of the fixed formats, which name file and line of a bad row
parse           a chunk to an Arrow table, checked row by row
limits          the limits of raw files
delimited       CSV and TSV
parquet         Parquet in blocks of bounded memory
parquet_pages   the headers of Parquet pages, read before Arrow reads the pages
schema          the columns that a file has
columns         which column holds the id, the title, the text, the metadata or a judgement
passages        passages from tables
judgements      queries and judgements from tables
titles          joins the titles of a separate file to MS MARCO's passages
"""
