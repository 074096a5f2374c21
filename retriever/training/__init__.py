"""The training loop, and the interfaces, data and optimizers that all trained systems share.

system             the interface of a system to train: a model, its loss and its data
loop               the training loop, with checkpoints
freed_memory       keeps the memory of a step for the next one
time_limit         the number of steps that fit into a time limit
hooks              progress, checkpoints and stop requests of a run
stepping           optimizer steps with torch or DeepSpeed's ZeRO
parameter_groups   groups of parameters with their own settings
adafactor          Adafactor as T5X has it
training_data      batches of queries with positives and negatives
mixture_sets       training on several training sets
mixture_schedule   the choice of queries for each batch
dev                evaluation on dev splits during training
dev_workers        distributes forward passes over dev splits to the workers
"""
