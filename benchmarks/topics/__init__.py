"""What topic_prompts.py needs: that script plans the experiment, and these modules carry it out.

options       the options of the script
settings      the settings of training runs, and the values that are tried
runs          a run: an arm on a set, with a backbone, a seed and settings; its values
sets          the sets, each in a store with BM25 and the topics of its passages
words         stores of a set with words of topics in front of its texts
training      trains the prompts or the model of a run
measurement   trains and measures runs
figures       the file of figures
summary       means over seeds, and intervals of differences between arms
tables        the figures as tables in Markdown
serving       mixed batches of tasks with prompts of topics and of other tasks
"""
