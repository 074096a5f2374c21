"""Topics of a corpus (Topic-DPR).

words       the words of a text that count for topics
model       the topics, and how the topic of a text is inferred
controls    topics by chance, for comparisons
"""
