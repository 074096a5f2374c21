"""Draws the pictures of the papers as PNG files, with pure functions of arrays that need no display.

measured         the quality and the rate of runs, from the files of evaluations
drawn_passages   the passages of a picture: their vectors and groups
points           draws vectors as points in the plane (Topic-DPR, Fig. 4)
query_sets       the query sets that a picture compares
rate_chart       draws quality against queries per second (HYPER, Fig. 4)
similarities     draws the similarities of query sets (HYPER, Fig. 2)
"""
