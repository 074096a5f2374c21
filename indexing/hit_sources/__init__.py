"""Hit sources: a module per kind, the registry of kinds, and the grammar that names sources and fusions.

source_kind      the interfaces of a source and of a kind of source
registry         the kinds; a new kind is added here
bm25             the source bm25:NAME
dense            search in dense embeddings, shared by exact:EMBEDDINGS and index:NAME
exact            the source exact:EMBEDDINGS
index_source     the source index:NAME
splade           the source splade:NAME
fusion           fusions of sources, A+B and w*A+v*B
grammar          parses and formats the names of sources
modes            short names of the usual sources
search_options   the settings of a search
query_encoder    encodes the queries of a search
opened_sources   opens sources for a job
online_search    the interface by which a service opens and searches sources
"""
