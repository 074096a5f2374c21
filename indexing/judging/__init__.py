"""Decides which of two runs is better from few verdicts of people.

judging_pool    the passages that the runs rank differently, and what a verdict on each changes
judging_order   the random order in which the pairs are judged, and the rounds
verdicts        files of verdicts of people or of models
difference      the difference of the runs with an interval, and the number of verdicts that is still needed
"""
