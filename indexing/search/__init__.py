"""Search: runs of many queries, re-ranking, and tables of hits for a few queries.

retrieval           the work that makes a run
runs                runs as artifacts
run_files           runs as files: TREC's columns, or JSON lines
document_search     search by document: the best passage of each (MaxP)
rescoring           re-ranking by a cross-encoder
few_queries         search for a few queries in this process
recorded_search     a fusion that keeps the hits of its sources
explanations        the explanation of a hit
hit_explanations    makes explanations from the hits and the score parts of each source
explanation_lines   formats explanations as lines of text
judgements          one query of a run, with its judgements
snippets            the part of a passage that matches a query
hit_tables          tables of hits for people
"""
