"""Hit sources: a module per kind, the registry of kinds, and the grammar that names sources and fusions.

source_kind      the interface of a kind of source
registry         the kinds; a new kind is added here
bm25             the source bm25:NAME
dense            what exact:EMBEDDINGS and index:NAME share
exact            the source exact:EMBEDDINGS
index_source     the source index:NAME
splade           the source splade:NAME
fusion           fusions of sources, A+B and w*A+v*B
grammar          the names of sources
modes            short names of the usual sources
search_options   the settings of a search
query_encoder    encodes the queries of a search
opened_sources   opens sources for a job
online_search    opens sources for a service
"""
