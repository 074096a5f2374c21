"""Tables with any column names: CSV, TSV, JSON lines and Parquet as corpora, queries and judgements."""
