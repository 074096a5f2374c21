"""Search by Lucene, and BM25.

java     the JVM, started once in a process
lucene   Lucene on strings and arrays: shards as segments, and search
bm25     bm25/NAME, and the work that builds it
"""
