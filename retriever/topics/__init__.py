"""Topic models of text corpora, and topic prompts (Topic-DPR).

words      the words that determine a text's topic
model      the model that infers the topic of a text, in numpy
network    the network that computes the prompt of a topic
training   the topics of training texts
saved      the saved form of topic prompts
"""
