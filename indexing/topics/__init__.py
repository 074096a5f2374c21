"""Topics of a corpus: topics/NAME.

options    the options of a fit
fitting    hierarchical LDA, or LDA, by tomotopy: a topic for each word of each passage
tree       the fitted tree as a topic model: topics of level 1, small ones merged; plain arrays, without tomotopy
files      the file of a topic model and its tree
work       the work that makes topics/NAME, and that infers the topics of new passages
reader     topics/NAME for other jobs
passages   the topics of passages that are encoded by prompts of topics
page       an HTML page of the tree
"""
