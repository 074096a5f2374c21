"""Parts of the evaluation job: searches of its sources, metrics of its runs, measures of its embeddings."""
