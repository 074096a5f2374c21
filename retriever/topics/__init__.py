"""Topics of a corpus (Topic-DPR).

words       the words of a text that count for topics
model       the topics, and how the topic of a text is inferred
controls    topics by chance, for comparisons
options     the size of the network over the words of topics, the topics of queries, and the loss of topics
training    the topics of the texts of a training run
network     the network that makes the prompt of a topic from its words, for training
saved       the saved form of the prompts of topics
"""
