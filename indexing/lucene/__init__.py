"""BM25 search with Lucene, and the Lucene segments that sparse search uses too.

java             the JVM, started once in a process
stop_words       the stop words of English
lucene           Lucene on strings and arrays: shards as segments, and search
lucene_terms     reads the terms of a score from Lucene's explanation
segments         segments as parts of an artifact: files, versions, commit
segment_search   search of segments, for a job and for a service
bm25_index       bm25/NAME, and the work that builds it
"""
