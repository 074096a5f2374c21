"""Helpers that several benchmarks share; they are no benchmarks themselves.

files       data sets in BEIR form, and figures as JSON
bootstrap   95% intervals of means over queries
markdown    rows and cells of tables
machine     the name of the CPU
models      the backbone of most experiments
"""
