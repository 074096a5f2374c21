"""Raw files: text and Parquet, read row by row within limits; every bad row is refused with its file and line.

listing         the files of a folder, local or on S3; what identifies a file
start           the ending and the first line of a file; files that no format reads
limits          the limits of raw files
raw             text files, local or on S3, plain or .gz, in blocks of whole lines
delimited       CSV and TSV, in blocks of whole rows, and their columns
parquet_rows    Parquet in blocks of bounded memory
parquet_pages   the headers of Parquet pages, read before Arrow reads the pages
thrift          the encoding of Parquet's footers and page headers
rows            blocks of lines parsed to rows; errors that name the line
columns         which column holds the id, the title, the text, the metadata or a judgement
markup          the title and the text of plain text, Markdown and HTML
qrels           files of judgements
splitting       splits documents into passages of at most N words
titles          joins the titles of a separate file to the passages of a corpus
"""
