"""Helpers that several benchmarks share; they are no benchmarks themselves.

files       data sets in BEIR form, and figures as JSON
machine     the name of the CPU
models      the backbone of most experiments
"""
