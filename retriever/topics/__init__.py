"""Topics of texts, and prompts of topics (Topic-DPR).

words      the words of a text that count
model      the model that infers the topic of a text, in numpy
network    the network that makes the prompt of a topic
training   the topics of training texts
saved      the saved form of prompts of topics
"""
