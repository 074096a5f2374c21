"""Fits topic models to a corpus, infers topics of passages, and reads topics/NAME.

topic_options      the options of a fit
fitting            hierarchical LDA, or LDA, by tomotopy: a topic for each word of each passage
tree               the fitted tree as a topic model of plain arrays: topics of level 1, small ones merged
topic_model_file   the file of a topic model and its tree
topics_work        the work that makes topics/NAME, and that infers the topics of new passages
topics_reader      topics/NAME for other jobs
passage_topics     the topics of passages that are encoded by prompts of topics
topics_page        an HTML page of the tree
"""
