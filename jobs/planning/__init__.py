"""Estimates what the work of jobs takes, for `--plan`: work, memory, hours and price on a machine or a cluster.

backbone_sizes        the sizes of backbones: floating-point operations per token, bytes of weights and activations
calibration           measures this machine, and keeps the result for later plans
estimate              the work of a job, its time and price on a machine, and warnings
indexing_estimates    estimates of imports, encodings, indexes and topics
machine               descriptions of machines: this one, or those of a YAML file with throughputs and prices
models                the models of jobs: sizes, limits of texts and mean numbers of tokens
plan_options          options of the estimates that --plan prints
planned_job           a job to estimate, and what is known of its data and models
planner               estimates the jobs of a chain one after the other, for which the sizes of earlier steps count
requests              counts the object store requests of an artifact
search_estimates      estimates of searches, mining, evaluations and servers
sizes                 the sizes of data: those of a store, of earlier steps, or those that the user expects
training_estimates    estimates of trainings
"""
