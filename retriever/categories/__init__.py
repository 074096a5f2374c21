"""Categories of passages: which pairs of a batch are positives where no judgement says so (Topic-DPR).

table      the categories of each passage of a corpus
options    options of training
"""
