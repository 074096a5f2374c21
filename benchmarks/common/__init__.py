"""Helpers that several benchmarks share; they are no benchmarks themselves.

program       the command line of a benchmark, and the jobs that it runs
watching      runs a job while its memory is watched
server        starts and stops servers
timing        times functions that take turns
files         data sets in BEIR form, and figures as JSON
prepared_set  training queries with negatives of several kinds, and test queries, as JSON lines
machine       the name of the CPU
tables        tables in Markdown
models        the backbone of most experiments
"""
