"""What query_prompt_transfer.py needs: that script plans the experiment, and these modules carry it out.

runs          a training run: an arm on some sets, with a seed and settings
sets          parts of the sets, each in a store with BM25, embeddings and negatives; their dev and test splits
training      trains the prompts or the model of a run
measurement   trains and measures runs
figures       the file of figures
tables        intervals of differences between arms, and tables in Markdown
"""
