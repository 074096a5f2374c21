"""Options and steps of the training jobs; everything is checked against the store before any training, without Ray.

categories      options of training on pairs with a common category
lora            options of a LoRA adapter
opening         opens the artifacts of a training run, and checks that all of them fit
options         options of `train_retriever` and `tune_prompts`
runs            options and steps of all training jobs: batches, workers, checkpoints, curves
serving         warnings about artifacts that one server cannot serve together with a new prompt
sweep_grid      the options of each run of a sweep
sweep_report    the table and the picture of a sweep
sweep_work      the work that makes sweeps/NAME: one part for each run
synthesis       options of prompts that are computed from each query, or for each task
topics          options of prompts of topics
"""
