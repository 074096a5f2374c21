"""The Python API of a store: its artifacts are made, read, searched and measured with methods.

making    the methods that make artifacts; each one is a job with its options
store     the class `Store`: its artifacts are read, searched and measured with methods
"""
