"""The Python API of a store: methods that make, read, search and measure its artifacts.

hits           the hits of a search: rows with their passages
keywords       the types of the keyword arguments of the methods (a stub that a test writes)
making         the methods that make artifacts; each one is a job with its options
parameters     the parameters of a method: the options of its job, and their names in errors
raw_rows       dicts, and tables of pandas, polars and pyarrow, as the source of an import
stored_run     a run of the store, as data frames and TREC files
open_search    a search source that is opened once and answers often
server         starts a server in a separate process, and ends it
python_store   the class `Store`: its artifacts are read, searched and measured with methods
trained        the result of a training
"""
