"""Reads raw files (text and Parquet) row by row within limits; errors name the file and line of each bad row.

listing         the files of a folder, local or in a cloud, and the identity of a file
start           the file extension and the first lines of a file; refuses files that no format reads
limits          the limits of raw files
raw             reads text files, local or in a cloud, plain or .gz, in pieces of whole lines
delimited       reads CSV and TSV in pieces of whole rows, and splits rows into columns
parquet_rows    reads Parquet in blocks of bounded memory
parquet_pages   checks the footer and the page headers of a Parquet file before Arrow reads it
thrift          decodes Thrift, in which Parquet stores footers and page headers
rows            parses blocks of lines to rows; errors name the line
columns         chooses the columns that hold the id, the title, the text, the metadata and the judgements
markup          extracts the title and the text of plain text, Markdown and HTML
qrels           reads files of judgements
splitting       splits documents into passages of at most N words
titles          joins the titles of a separate file to the passages of a corpus
"""
