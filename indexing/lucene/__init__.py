"""Search by Lucene: BM25 over texts, and the impacts of sparse embeddings.

java              the JVM, started once in a process
lucene            Lucene on strings and arrays: shards as segments, and search
bm25              bm25/NAME, and the work that builds it
impacts           the weights of sparse vectors as whole numbers
impact_lucene     impacts as term frequencies in Lucene
impact_building   the work that builds an index of impacts
impact_index      index/NAME over sparse embeddings
"""
