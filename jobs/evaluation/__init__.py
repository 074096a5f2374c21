"""Parts of the job evaluate: searches of its sources, metrics of its runs, measures of its embeddings.

category_metrics      metrics of runs by category (Topic-DPR)
document_runs         runs over a corpus of split documents, by document
measured_embeddings   embeddings that an evaluation measures
evaluating            opens an evaluation, searches its sources and measures its runs
evaluation            the class `Evaluation`: means, values per query, and p-values
frames                data frames of pandas
measures              the metrics of a run
evaluate_options      options of `evaluate`
certified_sources     the recall of indexes against exact search
source_rates          the rates of the sources
evaluated_runs        the measured queries, the runs, and whether they fit each other
searches              the searches of the sources that have no run yet
"""
