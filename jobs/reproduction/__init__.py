"""Reproductions of the papers' tables.

page           the page: our figures next to the paper's
raw_data       the raw data and the backbones of the tables
table          reads a table and makes the experiment of a scale
"""
