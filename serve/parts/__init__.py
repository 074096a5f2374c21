"""The parts that answer queries: the models, the leaves that search, and the engine that calls them.

part             the base of the parts: opens releases by id, and answers requests until they are closed
part_files       the files of a part: read into memory, and checked while it serves
part_states      the parts of a release, and the state of each
service_models   the encoders and the re-ranker
leaf             the searches and the passages of a range of rows
query_states     the queries of the engine, their states during a search, and their answers
engine           batches of queries, of texts to embed and of pairs to re-rank, over the models and all leaves
"""
