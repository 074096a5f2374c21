"""Trains models on data of a store: in this process, or on workers of a Ray cluster.

retriever_data     the training data of a retriever
reranking_data     the training data of a re-ranker
pretraining_data   the training data of RIP
training_sets      the training sets of a run, by name
named_values       parses NAME=VALUE and NAME=VALUE,…, by which options name query sets
dev_splits         dev splits, by which training measures quality
process_cache      what a job has opened, for the check of a run and the run itself
order              compares a re-ranker's order of hits with the order that it was trained on
worker             one worker of a run
local              a run in this process
cluster            a run on Ray Train
workers            the workers of a run on Ray
messages           messages of workers, and the state of a run
monitor            the actor that receives the messages
"""
